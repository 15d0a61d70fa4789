"""Models whose layers remember in different ways: windows, chunks, sinks, recurrent states, and mixes of them.

What `test_oracle.py` says of every family is not repeated here. These tests look at the places where a
window, a chunk or a cell ends, at the blocks that each group holds, and at what is saved.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from doors import coordinator_of, runner_of, settle
from foreword.batch import Batch, BatchEntry, BatchResult
from foreword.cache import (
    NULL_BLOCK,
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from foreword.engine import Engine
from foreword.engine.scheduler import Scheduler
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVFormat
from foreword.model.layout import LayerLayout, LayoutOptions, StateLayout, plan_layout
from foreword.model.loader import LoadedModel
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from lanes import SLOW, slow
from model.test_oracle import assert_oracle_agrees
from tiny_models import TinyModels, add, build_engine, complete, drain, greedy, longest_hit, random_tokens

WINDOWED = ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text", "gemma4_text"]
RECURRENT = ["mamba2", "qwen3_next", "falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"]
FAMILIES = WINDOWED + RECURRENT
MORE_OF_A_KIND = ["gemma3_text", "cohere2", "mistral", "falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"]
"""Their layers remember as those of gemma2, gpt_oss, mamba2 and qwen3_next, in other mixtures."""
NUM_TOKENS = 8


@pytest.fixture(params=[name for name in FAMILIES if name not in MORE_OF_A_KIND] + slow(*MORE_OF_A_KIND))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(tiny_models: TinyModels, family: str) -> LoadedModel:
    return tiny_models.loaded(family)


# ------------------------------------------------------------------------------------------- answers


def test_hits_of_every_length_around_windows_chunks_and_cells(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    """Windows of 8 and 24, chunks of 12, blocks and cells of 4."""
    prompt = random_tokens(np.random.default_rng(1), 53)
    hits = []
    for num_shared in (3, 4, 9, 12, 13, 23, 25, 33, 41, 53):
        engine = build_engine(model, block_size=4)
        complete(engine, [prompt[:num_shared]], greedy(1), name="first")
        outputs = complete(engine, [prompt], greedy(2), name="second")
        assert_oracle_agrees(tiny_models, family, outputs)
        hits.append(outputs[0].num_cached_tokens)
        assert hits[-1] == longest_hit(engine, num_shared, len(prompt))
    assert len(set(hits)) > 5


@pytest.mark.parametrize(
    ("family", "state_block_size"),
    [
        pytest.param(family, size, marks=SLOW if family in MORE_OF_A_KIND else ())
        for family, size in [*itertools.product(RECURRENT, [2, 12]), *((family, 4) for family in WINDOWED)]
    ],
)
def test_cells_and_blocks_of_different_sizes(
    tiny_models: TinyModels, family: str, model: LoadedModel, state_block_size: int
) -> None:
    rng = np.random.default_rng(2)
    shared = random_tokens(rng, 40)
    prompts = [shared + random_tokens(rng, length) for length in (1, 9, 30)]
    engine = build_engine(
        model, block_size=4, state_block_size=state_block_size, state_interval=12, max_num_batched_tokens=19
    )
    cold = complete(engine, prompts, greedy(4), name="cold")
    warm = complete(engine, prompts, greedy(4), name="warm")
    assert_oracle_agrees(tiny_models, family, cold + warm)
    assert all(output.num_cached_tokens >= 36 for output in warm)


def test_prompts_much_longer_than_the_window(tiny_models: TinyModels, family: str, model: LoadedModel) -> None:
    rng = np.random.default_rng(3)
    shared = random_tokens(rng, 300)
    prompts = [shared, shared + random_tokens(rng, 41)]
    engine = build_engine(model, block_size=8, state_block_size=8, max_num_batched_tokens=70)
    outputs = [complete(engine, [prompt], greedy(4), name=f"{n}")[0] for n, prompt in enumerate(prompts)]
    assert_oracle_agrees(tiny_models, family, outputs)
    assert outputs[1].num_cached_tokens == longest_hit(engine, 300, 341) >= 288


def test_logits_agree_with_transformers(tiny_models: TinyModels, family: str, model: LoadedModel) -> None:
    """Of every prompt position, computed cold in chunks and after a hit."""
    prompt = random_tokens(np.random.default_rng(4), 61)
    expected = tiny_models.oracle(family).logits(prompt).log_softmax(-1)
    engine = build_engine(model, block_size=4, max_num_batched_tokens=13)
    [output] = complete(engine, [prompt], greedy(1, prompt_logprobs=0), name="cold")
    assert output.prompt_logprobs is not None
    for position, logprobs in enumerate(output.prompt_logprobs[1:]):
        [(token_id, logprob)] = [] if logprobs is None else list(logprobs.items())
        torch.testing.assert_close(logprob.logprob, float(expected[position, token_id]), rtol=1e-3, atol=2e-3)
    [warm] = complete(engine, [prompt], greedy(1, logprobs=0), name="warm")
    assert warm.num_cached_tokens >= 56
    assert warm.outputs[0].logprobs is not None
    [(token_id, logprob)] = warm.outputs[0].logprobs[0].items()
    torch.testing.assert_close(logprob.logprob, float(expected[-1, token_id]), rtol=1e-3, atol=2e-3)


def test_several_continuations_share_a_prompt(tiny_models: TinyModels, family: str, model: LoadedModel) -> None:
    """They wait for its blocks or its state instead of computing it three times."""
    prompt = random_tokens(np.random.default_rng(5), 50)
    engine = build_engine(model, block_size=4, num_blocks=96)
    output = add(engine, "request", prompt, greedy(NUM_TOKENS, n=3))
    drain(engine)
    assert_oracle_agrees(tiny_models, family, [output])
    assert [completion.token_ids for completion in output.outputs] == [output.outputs[0].token_ids] * 3
    assert engine.num_computed_tokens <= 50 + 2 * (50 - 48) + 3 * NUM_TOKENS


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_next", "lfm2"])
def test_aborting_one_request_does_not_disturb_the_others(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    rng = np.random.default_rng(7)
    shared = random_tokens(rng, 30)
    engine = build_engine(model, block_size=4, num_blocks=128, max_num_batched_tokens=16)
    outputs = [
        add(engine, f"request-{n}", shared + random_tokens(rng, n), greedy(NUM_TOKENS)) for n in range(4)
    ]  # fmt: skip
    for victim in (0, 2):
        engine.step()
        engine.abort_request(f"request-{victim}")
        engine.check_integrity()
    drain(engine)
    assert_oracle_agrees(tiny_models, family, [outputs[1], outputs[3]])


# ---------------------------------------------------------------------------------- blocks of groups


def first_read(spec: GroupSpec, position: int) -> int:
    """First position whose KV computing `position` reads."""
    match spec:
        case SlidingWindowSpec():
            return max(0, position - spec.window + 1)
        case ChunkedLocalSpec():
            return position - position % spec.chunk
    return 0


def needed_blocks(spec: GroupSpec, length: int) -> set[int]:
    """Numbers of the blocks that a hit of `length` tokens needs."""
    if isinstance(spec, MambaSpec):
        return {length // spec.block_size - 1} if length else set()
    return {position // spec.block_size for position in range(first_read(spec, length), length)}


def longest_agreed(specs: tuple[GroupSpec, ...], num_tokens: int, is_cached: Callable[[int, int], bool]) -> int:
    """The longest hit by trying every length; `is_cached(group, block number)` says what there is."""
    step = math.lcm(*(spec.block_size for spec in specs))
    for length in range((num_tokens - 1) // step * step, 0, -step):
        if all(is_cached(group, n) for group, spec in enumerate(specs) for n in needed_blocks(spec, length)):
            return length
    return 0


class OracleRunner(ModelRunner):
    """Knows what every block was filled with, and compares each step's tables and hits with that."""

    scheduler: Scheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Block -> group and the prefix that it ends."""
        self.tables: dict[tuple[str, int], list[set[int]]] = {}
        """What each request, since its last admission, held in each group."""
        self.num_hits = 0

    def execute(self, batch: Batch) -> BatchResult:
        self.specs = self.scheduler.manager.groups
        self.states_of_step: set[int] = set()
        for row, entry in enumerate(batch.entries):
            self._check(batch, row, entry)
        return super().execute(batch)

    def _check(self, batch: Batch, row: int, entry: BatchEntry) -> None:
        life = (entry.request.request_id, entry.request.num_preemptions)
        held_before = self.tables.get(life)
        tokens = tuple(entry.request.sequence.token_ids.tolist())
        most = self._num_findable(entry)
        if held_before is None:
            self._check_hit(entry, tokens)
        self.tables[life] = []
        for group, (spec, tables) in enumerate(zip(self.specs, batch.group_tables, strict=True)):
            size = spec.block_size
            table = tables[row, : -(-entry.end // size)].tolist()
            held = {number for number, block_id in enumerate(table) if block_id != NULL_BLOCK}
            if isinstance(spec, MambaSpec):
                writes, reads = (entry.end - 1) // size, (entry.start - 1) // size
                assert writes in held
                assert held <= {writes, reads}
                full = [writes] if self._is_saved(entry) and entry.end <= most else []
                self.states_of_step.add(table[writes])
                new = set() if held_before is not None and table[writes] in held_before[group] else {writes}
                if entry.start and reads not in held:
                    assert not new, "a state was lost on its way"
            else:
                assert held == {p // size for p in range(first_read(spec, entry.start), entry.end)}
                full = [number for number in held if entry.start < (number + 1) * size <= min(entry.end, most)]
                new = {number for number in held if number * size >= entry.start}
            for number in new | {n for n in held if isinstance(spec, MambaSpec) and n == (entry.end - 1) // size}:
                self.content.pop(table[number], None)
            for number in full:
                self.content[table[number]] = (group, tokens[: (number + 1) * size])
            self.tables[life].append({table[number] for number in held})

    def _check_hit(self, entry: BatchEntry, tokens: tuple[int, ...]) -> None:
        contents = {content for block_id, content in self.content.items() if block_id not in self.states_of_step}
        is_cached = functools.cache(
            lambda group, number: (group, tokens[: (number + 1) * self.specs[group].block_size]) in contents
        )
        expected = longest_agreed(self.specs, min(len(tokens), self._num_findable(entry) + 1), is_cached)
        assert entry.start <= expected if self.scheduler.num_preemptions else entry.start == expected
        self.num_hits += entry.start > 0

    def _num_findable(self, entry: BatchEntry) -> int:
        """Leading tokens that other requests may find."""
        states, request = self.scheduler.states, entry.request
        return len(request) if states is None else states.num_in_cells(request.num_prompt_tokens)

    def _is_saved(self, entry: BatchEntry) -> bool:
        states, request = self.scheduler.states, entry.request
        assert states is not None
        if entry.end % states.alignment:
            return False
        return entry.end % states.interval == 0 or entry.end in request.state_positions


@pytest.mark.parametrize(
    ("family", "num_blocks", "seed"),
    [
        pytest.param(family, *pool, marks=SLOW if family in MORE_OF_A_KIND or (n + m) % 2 else ())
        for n, family in enumerate(FAMILIES)
        for m, pool in enumerate([(24, 0), (64, 1)])
        if family not in MORE_OF_A_KIND or (n + m) % 2
    ],
)
def test_tables_and_hits_of_a_live_engine_are_what_the_oracle_says(
    tiny_models: TinyModels, family: str, model: LoadedModel, num_blocks: int, seed: int
) -> None:
    """Requests over two tokens, so that many begin alike, and pools that evict."""
    rng = np.random.default_rng(seed)
    engine = build_engine(
        model,
        num_blocks=num_blocks,
        block_size=4,
        state_interval=16,
        runner_class=OracleRunner,
        max_num_batched_tokens=30,
        max_num_seqs=4,
        coalesce_in_flight=False,
    )
    runner = runner_of(engine)
    assert isinstance(runner, OracleRunner)
    runner.scheduler = engine.scheduler
    outputs = []
    for number in range(16):
        prompt = [5] * int(rng.integers(0, 24)) + rng.integers(5, 7, int(rng.integers(1, 25))).tolist()
        outputs.append(add(engine, f"request-{number}", prompt, greedy(int(rng.integers(1, 4)))))
        for _ in range(int(rng.integers(0, 3))):
            engine.step()
            engine.check_integrity()
    drain(engine)
    assert runner.num_hits > 0
    assert_oracle_agrees(tiny_models, family, outputs)


def test_blocks_that_a_group_needs_end_a_hit_when_they_are_evicted_and_no_others(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    prompt = random_tokens(np.random.default_rng(8), 45)
    for needed in (False, True):
        for group in range(len(model.plan_layout(LayoutOptions(4, 4)).groups)):
            engine = build_engine(model, block_size=4)
            manager, spec = engine.manager, engine.manager.groups[group]
            held: dict[int, int] = {}  # number of block -> block, over the request's whole life
            add(engine, "first", prompt, greedy(1))
            while engine.has_unfinished_requests():
                batch = engine.scheduler.schedule()
                assert batch is not None
                entries = batch.group_tables[group][0].tolist()
                held.update({number: block for number, block in enumerate(entries) if block != NULL_BLOCK})
                settle(engine, batch)
            if engine.manager.has_one_full_group:
                return
            most = longest_hit(engine, 45, 45)
            wanted = needed_blocks(spec, most)
            victims = sorted(wanted if needed else set(range(most // spec.block_size)) - wanted)
            if not victims:
                continue
            manager.evict_blocks(np.array([held[n] for n in victims[:1] if n in held], np.int32))
            outputs = complete(engine, [prompt], greedy(3), name="second")
            assert_oracle_agrees(tiny_models, family, outputs)
            if needed:
                assert outputs[0].num_cached_tokens < most
            else:
                assert outputs[0].num_cached_tokens == most


# ------------------------------------------------------------------------------------- what is saved


def hit_of(engine: Engine, prompt: list[int], name: str) -> int:
    [output] = complete(engine, [prompt], greedy(1), name=name)
    return output.num_cached_tokens


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_the_third_prompt_that_begins_alike_hits_where_the_second_parted(model: LoadedModel) -> None:
    rng = np.random.default_rng(9)
    shared = random_tokens(rng, 33)
    engine = build_engine(model, block_size=4, num_blocks=256, state_interval=512)
    hits = [hit_of(engine, shared + random_tokens(rng, 30), f"prompt-{n}") for n in range(3)]
    assert hits == [0, 0, 32]


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_states_are_saved_at_intervals(model: LoadedModel) -> None:
    rng = np.random.default_rng(10)
    shared = random_tokens(rng, 50)
    engine = build_engine(model, block_size=4, num_blocks=256, state_interval=16)
    assert hit_of(engine, shared + random_tokens(rng, 30), "first") == 0
    assert hit_of(engine, shared + random_tokens(rng, 30), "second") == 48


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_states_are_saved_at_the_ends_of_messages(model: LoadedModel) -> None:
    from foreword.engine import Prompt

    rng = np.random.default_rng(11)
    message, second, third = (random_tokens(rng, length) for length in (37, 30, 25))
    engine = build_engine(model, block_size=4, num_blocks=256, state_interval=512)
    engine.add_request("first", Prompt(np.array(message + second, np.int32), message_ends=(37,)), greedy(1))
    drain(engine)
    assert hit_of(engine, message + third, "second") == 36


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_no_state_of_an_answer_is_kept(model: LoadedModel) -> None:
    """It comes from tokens that were computed one by one, which a later prompt computes in cells."""
    prompt = random_tokens(np.random.default_rng(12), 10)
    engine = build_engine(model, block_size=4, num_blocks=256, state_interval=512)
    [output] = complete(engine, [prompt], greedy(40), name="first")
    states = [g for g, spec in enumerate(engine.manager.groups) if isinstance(spec, MambaSpec)]
    counts = coordinator_of(engine.manager).num_indexed_by_group()
    assert [counts[group] for group in states] == [1] * len(states)  # after 8 tokens
    second = prompt + output.outputs[0].token_ids + [7, 8, 9]
    assert hit_of(engine, second, "second") == 8
    assert hit_of(engine, second, "third") == 52


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_a_request_waits_for_a_state_that_another_is_asked_to_save(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    rng = np.random.default_rng(13)
    shared = random_tokens(rng, 61)
    prompts = [shared + random_tokens(rng, 50), shared + random_tokens(rng, 9)]
    engine = build_engine(
        model, block_size=4, num_blocks=256, state_interval=512, long_prefill_token_threshold=16
    )  # fmt: skip
    outputs = [add(engine, "first", prompts[0], greedy(NUM_TOKENS))]
    engine.step()
    outputs.append(add(engine, "second", prompts[1], greedy(NUM_TOKENS)))
    drain(engine)
    assert outputs[1].num_cached_tokens == 60
    assert_oracle_agrees(tiny_models, family, outputs)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_a_step_without_room_for_a_cell_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=15 is less than the 16 tokens"):
        build_engine(model, state_block_size=16, max_num_batched_tokens=15)


# ------------------------------------------------------------------------------------------- layouts


FULL = LayerLayout(2, 64, 64)
SLIDING = LayerLayout(2, 64, 64, sliding_window=512)


def test_one_full_layer_in_six_holds_several_times_the_tokens() -> None:
    layers = {layer: FULL if layer % 6 == 5 else SLIDING for layer in range(24)}
    mixed = plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions())
    alone = plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions(keep_all=True))
    assert [len(group.layers) for group in mixed.groups] == [4] * 6
    assert alone.is_one_full_group
    assert alone.bytes_per_block == 6 * mixed.bytes_per_block

    def bytes_of(num_tokens: int) -> int:
        return mixed.bytes_per_block * (num_tokens // 16 + 5 * (512 // 16 + 1))

    assert alone.bytes_per_block * 32768 // 16 > 5 * bytes_of(32768)


def test_few_slots_stay_empty() -> None:
    for num_sliding, num_full in [(22, 4), (13, 13), (12, 13), (30, 6), (1, 7), (5, 1), (2, 1)]:
        layers = dict(enumerate([SLIDING] * num_sliding + [FULL] * num_full))
        layout = plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions())
        total = num_sliding + num_full
        assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(total))
        assert len(layout.groups) * layout.num_slots - total <= total / 8


def test_layers_of_different_width_get_blocks_of_equal_bytes() -> None:
    layers = {0: LayerLayout(8, 64, 64), 1: LayerLayout(2, 64, 64, sliding_window=512)}
    layout = plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions())
    assert [group.spec.block_size for group in layout.groups] == [16, 64]


def test_a_large_state_makes_blocks_of_more_tokens_and_little_waste() -> None:
    state = StateLayout((("conv", 0), ("recurrent", 0)), ((4096, 4), (16, 128, 128)), (torch.bfloat16, torch.float32))
    layers = dict.fromkeys(range(3, 24, 4), FULL)
    states = {layer: state for layer in range(24) if layer % 4 != 3}
    layout = plan_layout(layers, states, KVFormat(torch.bfloat16), LayoutOptions())
    [full, *recurrent] = layout.groups
    assert full.spec.block_size < 512
    assert full.spec.block_size % 16 == 0
    assert all(len(group.layers) * state.num_bytes <= layout.bytes_per_block for group in recurrent)
    stored = sum(len(group.layers) for group in recurrent) * state.num_bytes
    assert stored > 0.85 * len(recurrent) * layout.bytes_per_block
    assert layout.state_interval is not None
    assert layout.state_interval % layout.hit_granularity == 0


def test_a_window_that_is_never_left_is_full_attention() -> None:
    layers = {0: FULL, 1: SLIDING, 2: LayerLayout(2, 64, 64, local_chunk=8192)}
    assert plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions(max_tokens=512)).is_one_full_group
    layout = plan_layout(layers, {}, KVFormat(torch.bfloat16), LayoutOptions(max_tokens=513))
    assert [type(spec) for spec in layout.specs] == [FullAttentionSpec, FullAttentionSpec, SlidingWindowSpec]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2", "gpt_oss"])
def test_kv_lies_without_gaps_beside_states(model: LoadedModel) -> None:
    """The compiled attention kernel counts on it; states that take more than KV get pages of their own."""
    for size in (4, 16):
        storage = KVStorage(model.plan_layout(LayoutOptions(size, 4)), 8, model.device)
        assert all(storage.is_contiguous(group) for group in set(storage.group_of.values()))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2"])
def test_states_come_back_from_blocks_as_they_were_and_leave_other_blocks_alone(model: LoadedModel) -> None:
    storage = KVStorage(model.plan_layout(LayoutOptions(4, 4)), 8, model.device)
    saved = {}
    for number, layer in enumerate(storage.state_group_of):
        for block in (number % 3, 5):
            shapes = model.states[layer]
            tensors = [
                torch.randn(1, *s).to(model.device, d) for s, d in zip(shapes.shapes, shapes.dtypes, strict=True)
            ]
            if block == 5 and any(
                b == 5 and storage.state_group_of[x] != storage.state_group_of[layer] for x, b in saved
            ):
                continue  # a block belongs to one group
            if block != 5 and any(b == block for _, b in saved):
                continue
            storage.save_state(layer, block, tensors)
            saved[layer, block] = tensors
    assert len(saved) > 3 or len(storage.state_group_of) < 3
    for (layer, block), tensors in saved.items():
        for ours, theirs in zip(storage.load_state(layer, block), tensors, strict=True):
            assert torch.equal(ours, theirs)

"""Models under adapters: PEFT's logits, and bits that depend neither on the cache nor on who else is in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from doors import runner_of
from foreword.config import ModelConfig, WeightArithmetic
from foreword.engine import Engine, Prompt
from foreword.errors import InvalidRequestError
from foreword.model.adapters.loaded import read_adapter
from foreword.model.adapters.weights import AdapterWeights
from foreword.model.checkpoint.gguf.unfold import unfold
from foreword.model.cpu import layer_program
from foreword.model.loader import LoadedModel, load_model
from foreword.request import Links, RequestOutput
from gguf_writer import write_gguf
from model.test_exactness import RecordingRunner, assert_same_bits
from peft_folders import ATTENTION, save_adapter
from tiny_models import TinyModels, build_engine, drain, greedy, in_codes, random_tokens

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "granite", "qwen3_moe"]
"""With biases, norms of heads, windows, joined products, scaled branches, and experts that no adapter changes."""
BLOCK_SIZE = 4


class Adapted:
    """An engine whose requests may have adapters, and the logits of every request that it ran."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        options = {"num_blocks": 512, "block_size": BLOCK_SIZE, **options}
        self.engine: Engine = build_engine(model, runner_class=RecordingRunner, **options)
        self.logits = runner_of(self.engine).logits

    def add(
        self, name: str, prompt: Sequence[int], adapter: AdapterWeights | None, num_tokens: int = 4, **params: Any
    ) -> RequestOutput:
        own = Prompt(np.array(prompt, np.int32), adapter=adapter)
        return self.engine.add_request(name, own, greedy(num_tokens, **params))

    def run(self, name: str, prompt: Sequence[int], adapter: AdapterWeights | None, **params: Any) -> RequestOutput:
        output = self.add(name, prompt, adapter, **params)
        drain(self.engine)
        return output


def adapter_for(family: str, tiny_models: TinyModels, folder: Path, **options: Any) -> AdapterWeights:
    base, model = tiny_models.folder(family), tiny_models.loaded(family)
    targets = ATTENTION if "moe" in family else options.pop("targets", None)
    more = {} if targets is None else {"targets": targets}
    return read_adapter(str(save_adapter(folder, base, **more, **options)), model.decoder.spec, 64)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_tokens(np.random.default_rng(3), 90)


# ------------------------------------------------------------------------------------------- PEFT

VARIANTS: list[dict[str, Any]] = [
    {},
    {
        "use_rslora": True,
        "ranks": {"q_proj": 2, "qkv_proj": 3, "down_proj": 7},
        "alpha_pattern": {"layers.2.self_attn.o_proj": 20, "down_proj": 1},
        "layers": [0, 2],
    },
    {"alora_invocation_tokens": [11, 12, 13]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_peft(family: str, tiny_models: TinyModels, tmp_path: Path, prompt: list[int]) -> None:
    peft = pytest.importorskip("peft")
    for number, variant in enumerate(VARIANTS if family == "llama" else VARIANTS[1:2]):
        folder = tmp_path / str(number)
        weights = adapter_for(family, tiny_models, folder, **variant)
        tokens = [*prompt[:40], 11, 12, 13, *prompt[40:55], 11, 12, 13, *prompt[55:]]
        run = Adapted(tiny_models.loaded(family))
        run.run("a", tokens, weights, prompt_logprobs=1)
        base = AutoModelForCausalLM.from_pretrained(tiny_models.folder(family), attn_implementation="eager").eval()
        theirs = peft.PeftModel.from_pretrained(base, folder).eval()
        with torch.inference_mode():
            wanted = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
            plain = tiny_models.oracle(family).logits(tokens)
            for position in range(len(tokens)):
                torch.testing.assert_close(run.logits["a"][position], wanted[position], rtol=2e-3, atol=2e-3)
            assert (wanted[-1] - plain[-1]).abs().max() > 0.05, "the adapter changes too little"
            if "alora_invocation_tokens" not in variant:
                merged = theirs.merge_and_unload()(torch.tensor([tokens]), use_cache=False).logits[0]
                torch.testing.assert_close(run.logits["a"][len(tokens) - 1], merged[-1], rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    ("family", "dtype", "is_coded"),
    [(*each, False) for each in product(("llama", "gemma3_text", "phi3", "qwen3_moe"), ("float32", "bfloat16"))]
    + [("llama", "float32", True), ("llama", "bfloat16", True)],
)
def test_bits_depend_neither_on_cuts_nor_on_hits_nor_on_neighbours(
    family: str, dtype: Any, is_coded: bool, tiny_models: TinyModels, tmp_path: Path, prompt: list[int]
) -> None:
    model = tiny_models.loaded(family, dtype)
    model = in_codes(model) if is_coded else model
    adapters = [adapter_for(family, tiny_models, tmp_path / str(n), seed=n, rank=3 + n) for n in range(3)]
    cold = Adapted(model)
    first = cold.run("a", prompt, adapters[0])
    plain = Adapted(model)
    plain.run("base", prompt, None)
    plain.run("short", prompt[:30], None)
    assert not torch.equal(plain.logits["base"][89], cold.logits["a"][89])

    warm = cold.run("b", prompt, adapters[0])
    assert warm.num_cached_tokens > 80
    assert warm.outputs[0].token_ids == first.outputs[0].token_ids
    last = {position: logits for position, logits in cold.logits["a"].items() if position in cold.logits["b"]}
    assert_same_bits(cold.logits["b"], last)

    chunked = Adapted(model, max_num_batched_tokens=13)
    chunked.run("a", prompt, adapters[0])
    assert_same_bits(chunked.logits["a"], cold.logits["a"])

    mixed = Adapted(model, max_num_batched_tokens=37)
    for number, weights in enumerate(adapters[1:]):
        mixed.add(f"other {number}", prompt[number:], weights)
    mixed.add("a", prompt, adapters[0])
    mixed.add("base", prompt, None)
    mixed.add("short", prompt[:30], None)
    drain(mixed.engine)
    assert_same_bits(mixed.logits["a"], cold.logits["a"])
    assert_same_bits(mixed.logits["base"], plain.logits["base"])
    assert_same_bits(mixed.logits["short"], plain.logits["short"])


@pytest.mark.parametrize(("mode", "name", "near"), [("exact", "Q8_0", 2e-3), ("int8", "Q8_0 int8", 0.1)])
def test_weights_in_the_codes_of_a_file_take_adapters_too(
    mode: WeightArithmetic,
    name: str,
    near: float,
    tiny_models: TinyModels,
    tmp_path: Path,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, weights = tmp_path / "model.gguf", adapter_for("wide_llama", tiny_models, tmp_path / "adapter")
    plain = write_gguf(tiny_models.folder("wide_llama"), path)
    folder = str(unfold(path, with_tokenizer=False))
    coded = load_model(ModelConfig(folder, dtype="float32", weight_arithmetic=mode))
    same = load_model(ModelConfig(str(plain), dtype="float32"))
    assert coded.parts()[name]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer_program, "Wires", interrupted)
        with pytest.raises(KeyboardInterrupt):  # as the first adapter comes
            Adapted(coded).run("a", prompt, weights)
    whole, parts = Adapted(coded), Adapted(coded, max_num_batched_tokens=13)
    for run in (whole, parts):
        run.run("base", prompt, None)
    assert_same_bits(parts.logits["base"], whole.logits["base"])

    cold, chunked, wanted = Adapted(coded), Adapted(coded, max_num_batched_tokens=13), Adapted(same)
    for run in (cold, chunked, wanted):
        run.run("a", prompt, weights)
    chunked.run("b", prompt, weights)
    plain_rows, mixed = Adapted(coded), Adapted(coded)
    plain_rows.run("base", prompt, None)
    plain_rows.run("short", prompt[:30], None)
    mixed.add("a", prompt, weights)
    mixed.add("short", prompt[:30], None)  # the last layer computes from row 89 on: its rows have other numbers
    mixed.run("base", prompt, None)
    assert_same_bits(mixed.logits["short"], plain_rows.logits["short"])
    chain = coded.decoder.chain
    assert chain is not None
    assert chain._adapter_wires is not None  # all of these ran the layers as one program, with and without adapters
    monkeypatch.setattr(coded.decoder, "chain", None)
    for run in (mixed, Adapted(coded)):
        run.add("a, layer by layer", prompt, weights)
        run.run("base, layer by layer", prompt, None)
        assert_same_bits(run.logits["a, layer by layer"], cold.logits["a"])
        assert_same_bits(run.logits["base, layer by layer"], plain_rows.logits["base"])
        assert_same_bits(run.logits["base, layer by layer"], whole.logits["base"])
    assert_same_bits(mixed.logits["base"], plain_rows.logits["base"])
    assert_same_bits(mixed.logits["a"], cold.logits["a"])
    assert_same_bits(chunked.logits["a"], cold.logits["a"])
    assert torch.equal(chunked.logits["b"][89], cold.logits["a"][89])
    torch.testing.assert_close(cold.logits["a"][89], wanted.logits["a"][89], rtol=near, atol=near)


def test_an_alora_adapter_leaves_the_prefix_to_the_base_and_hits_it(
    tiny_models: TinyModels, tmp_path: Path, prompt: list[int]
) -> None:
    model = tiny_models.loaded("llama")
    experts = [
        adapter_for("llama", tiny_models, tmp_path / str(n), seed=n, alora_invocation_tokens=[20 + n, 5])
        for n in range(4)
    ]
    asked = [[*prompt, 20 + n, 5, 9] for n in range(4)]
    cold = Adapted(model, max_num_batched_tokens=16)
    for number, expert in enumerate(experts):
        cold.engine.reset_prefix_cache()
        cold.run(f"expert {number}", asked[number], expert)

    shared = Adapted(model)
    base = shared.run("base", prompt, None)
    for number, expert in enumerate(experts):
        output = shared.run(f"expert {number}", asked[number], expert)
        assert output.num_cached_tokens == len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        assert_same_bits(shared.logits[f"expert {number}"], cold.logits[f"expert {number}"])
    again = shared.run("base again", prompt, None)
    assert again.outputs[0].token_ids == base.outputs[0].token_ids
    # The base goes on from a prefix that an expert computed, and has its own bits.
    other = Adapted(model)
    other.run("expert 0", asked[0], experts[0])
    hit = other.run("base", prompt, None)
    assert hit.num_cached_tokens >= len(prompt) - BLOCK_SIZE
    assert_same_bits(other.logits["base"], shared.logits["base"])
    # Without its invocation an aLoRA adapter does nothing, as in PEFT.
    silent = other.run("silent", prompt, experts[1])
    assert silent.outputs[0].token_ids == base.outputs[0].token_ids


def test_a_mark_before_the_invocation_keeps_the_bases_blocks(
    tiny_models: TinyModels, tmp_path: Path, prompt: list[int]
) -> None:
    """Also where an earlier invocation is left in the shorter prompt."""
    expert = adapter_for("llama", tiny_models, tmp_path, alora_invocation_tokens=[20, 5])
    tokens = np.array([*prompt[:20], 20, 5, *prompt[20:60], 20, 5, 9], np.int32)
    begun = Prompt(tokens, adapter=expert).begun()
    assert begun.extra_keys.adapter_offset == 62
    run = Adapted(tiny_models.loaded("llama"))
    shorter = Prompt(tokens[:40])
    keys = [
        run.engine.check("x", one, greedy(1))[0].block_hashes()
        for one in (shorter, replace(shorter, extra_keys=begun.extra_keys, adapter=expert))
    ]
    assert keys[0] == keys[1]


def test_a_linked_prompt_takes_no_adapter(tiny_models: TinyModels, tmp_path: Path, prompt: list[int]) -> None:
    run = Adapted(tiny_models.loaded("llama"), allows_links=True)
    weights = adapter_for("llama", tiny_models, tmp_path)
    links = Links("all", (), np.arange(len(prompt), dtype=np.int32))
    with pytest.raises(InvalidRequestError, match="takes no adapter"):
        run.engine.add_request("a", Prompt(np.array(prompt, np.int32), adapter=weights, links=links), greedy(2))


# --------------------------------------------------------------------------------------- random traffic


def test_random_traffic_over_adapters_answers_as_each_request_alone(tiny_models: TinyModels, tmp_path: Path) -> None:
    """With a pool so small that requests are preempted, aborts, and prompts that repeat, so that drafts are right."""
    model, rng = tiny_models.loaded("llama"), np.random.default_rng(5)
    adapters: list[AdapterWeights | None] = [None]
    adapters += [adapter_for("llama", tiny_models, tmp_path / str(n), seed=n, rank=1 + n) for n in range(4)]
    adapters += [
        adapter_for("llama", tiny_models, tmp_path / f"a{n}", seed=n, alora_invocation_tokens=[9, 9]) for n in range(3)
    ]
    heads = [[int(token) for token in rng.integers(3, 6, 24)] for _ in range(2)]
    busy = Adapted(model, num_blocks=36, max_num_batched_tokens=24, max_num_seqs=6)
    busy.engine.draft(4)
    wanted: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    asked = []
    for number in range(16):
        which, length = int(rng.integers(len(adapters))), int(rng.integers(1, 12))
        prompt = [*heads[rng.integers(2)][: rng.integers(8, 25)], 9, 9, *rng.integers(3, 6, length).tolist()]
        asked.append((which, prompt, busy.add(f"r{number}", prompt, adapters[which], num_tokens=20)))
        for _ in range(int(rng.integers(0, 8))):
            busy.engine.step()
            busy.engine.check_integrity()
        if rng.random() < 0.1:
            busy.engine.abort_request(f"r{number}")
    drain(busy.engine)
    assert busy.engine.snapshot().num_preemptions > 0
    assert busy.engine.manager.stats.hits > 0
    assert any(output.outputs[0].drafts.num_accepted for _, _, output in asked)
    alone = Adapted(model, enable_prefix_caching=False)
    for which, prompt, output in asked:
        key = which, tuple(prompt)
        if key not in wanted:
            answer = alone.run(f"alone {len(wanted)}", prompt, adapters[which], num_tokens=20)
            wanted[key] = answer.outputs[0].token_ids
        answer_ids = output.outputs[0].token_ids
        assert answer_ids == wanted[key][: len(answer_ids)]
        assert output.outputs[0].finish_reason in ("length", "abort")

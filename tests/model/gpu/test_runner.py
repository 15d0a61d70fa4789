"""Batches on a device: graphs, padding, one copy in and one out. The device is a fake; what it computes is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fake_device import FakeDevice
from foreword.batch import Batch, BatchResult, Entries
from foreword.config import ModelConfig
from foreword.engine import Engine
from foreword.model.gpu.decode_graphs import DECODE_SIZES, padded_size
from foreword.model.gpu.runner import DeviceRunner, RunnerLimits
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel, load_model
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from foreword.request import SamplingParams
from tiny_models import TinyModels, add, build_engine, drain, random_tokens

FAMILIES = ["llama", "mistral", "gemma2", "gemma4_text", "odd_llama", "mqa_llama"]
"""Full layers and windows, softcap, sizes that no vector divides, gaps between blocks, one KV head."""
SIZES = (16, 32)
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def plain_model(tiny_models: TinyModels) -> Callable[[str], LoadedModel]:
    """Models as they are loaded for a GPU: neither packed nor fused for this processor."""
    known: dict[str, LoadedModel] = {}

    def load(family: str) -> LoadedModel:
        if family not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("foreword.model.loader.accelerate", lambda *_: None)
                options = ModelConfig(str(tiny_models.folder(family)), dtype="float32", attention_kernel="reference")
                known[family] = load_model(options)
        return known[family]

    return load


class Setup:
    """An engine on a fake device."""

    def __init__(self, model: LoadedModel, *, sizes: Sequence[int] = SIZES, **options: Any) -> None:
        self.device = FakeDevice()
        limits = RunnerLimits(MAX_TOKENS, 64, tuple(sizes))
        pass_rows = options.pop("pass_rows", None)

        def make(model: LoadedModel, storage: KVStorage) -> DeviceRunner:
            self.runner = DeviceRunner(model, storage, self.device, limits, pass_rows=pass_rows)
            return self.runner

        self.engine = build_engine(model, runner_class=make, **{"block_size": 4, "num_blocks": 256, **options})

    @property
    def num_replays(self) -> int:
        return 0 if self.runner.graphs is None else self.runner.graphs.num_replays


def random_work(seed: int, num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that partly share their beginnings, and parameters that use everything that sampling can."""
    rng = np.random.default_rng(seed)
    common = random_tokens(rng, 40)
    work = []
    for number in range(num_requests):
        own = random_tokens(rng, int(rng.integers(1, 30)))
        prompt = common[: int(rng.integers(0, 41))] + own
        options: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
            {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.4, "frequency_penalty": 0.2},
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0, "logit_bias": {5: 1.5}},
            {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": (7, 8, 9), "logprobs": 5},
            {"temperature": 0.0, "prompt_logprobs": 2},
            {"temperature": 1.2, "allowed_token_ids": (5, 6, 7, 9, 300), "min_tokens": 4, "stop_token_ids": (7,)},
        ]
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 12)), seed=number, ignore_eos=True, **options[number % len(options)]
        )
        work.append((prompt, params))
    return work


def answers(engine: Engine, work: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Tokens and log probabilities, to the last bit."""
    outputs = [add(engine, str(number), prompt, params) for number, (prompt, params) in enumerate(work)]
    drain(engine)
    return [
        (out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs, out.outputs[0].finish_reason)
        for out in outputs
    ]


# ---------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_same_bits_with_graphs_without_and_on_the_plain_runner(
    plain_model: Callable[[str], LoadedModel], family: str
) -> None:
    model, work = plain_model(family), random_work(1, 14)
    with_graphs, without = Setup(model), Setup(model, sizes=())
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert answers(with_graphs.engine, work) == expected
    assert answers(without.engine, work) == expected
    assert with_graphs.num_replays > 5
    assert without.num_replays == 0


def test_decoding_is_replayed_for_batches_of_every_size(plain_model: Callable[[str], LoadedModel]) -> None:
    """Requests end one by one, so that steps of 20 to 1 requests use both graphs."""
    model = plain_model("llama")
    rng = np.random.default_rng(2)
    params = [SamplingParams(temperature=0.0, max_tokens=2 + number, ignore_eos=True) for number in range(20)]
    work = [(random_tokens(rng, int(rng.integers(1, 60))), own) for own in params]
    setup = Setup(model)
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 20, "every step but the first, which computes the prompts"


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 1), (3, 4), (4, 4), (5, 8), (17, 24), (249, 256), (256, 256), (257, None)]
)
def test_batches_are_rounded_up_to_the_next_size(num_rows: int, expected: int | None) -> None:
    assert padded_size(num_rows, DECODE_SIZES) == expected


def test_sizes_are_recorded_up_to_the_first_that_holds_all_requests() -> None:
    assert RunnerLimits(64, 10).sizes == [1, 2, 4, 8, 16]
    assert RunnerLimits(64, 8).sizes == [1, 2, 4, 8]
    assert RunnerLimits(64, 300).sizes == list(DECODE_SIZES)
    assert RunnerLimits(64, 300, ()).sizes == []


def test_more_requests_than_the_largest_graph_holds_are_computed_without_one(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    model = plain_model("llama")
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    work = [(random_tokens(rng, 5), params) for _ in range(17)]
    setup = Setup(model, sizes=(16,))
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 0


def test_sequences_longer_than_the_graphs_were_made_for_are_computed_without_one(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    model = plain_model("llama")
    work = [(random_tokens(np.random.default_rng(4), MAX_TOKENS - 3), SamplingParams(temperature=0.0, max_tokens=10))]
    setup = Setup(model)
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 3


def test_padding_writes_to_the_scrap_block_alone(plain_model: Callable[[str], LoadedModel]) -> None:
    """One request decodes in a graph of 16 rows: in the whole pool, one slot of each layer changes."""
    setup = Setup(plain_model("llama"))
    storage: KVStorage = setup.runner._storage
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    add(setup.engine, "one", random_tokens(np.random.default_rng(5), 6), params)
    setup.engine.step()
    setup.engine.step()
    tensors = (*storage.keys.values(), *storage.values.values())
    for tensor in tensors:  # what earlier steps wrote would hide what this one writes
        tensor.fill_(7.0)
    num_replays = setup.num_replays
    setup.engine.step()
    assert setup.num_replays == num_replays + 1
    for tensor in tensors:
        written = (tensor != 7.0).flatten(2).any(-1)
        assert int(written[: storage.scrap_block].sum()) == 1
        assert int(written[storage.scrap_block].sum()) == 1


def test_other_storage_is_recorded_anew(plain_model: Callable[[str], LoadedModel]) -> None:
    model = plain_model("gemma2")
    setup = Setup(model)
    work = random_work(6, 8)
    expected = answers(setup.engine, work)
    before = setup.device.num_captures
    old: KVStorage = setup.runner._storage
    setup.engine.manager.reset_prefix_cache()
    setup.runner.use_storage(KVStorage(old.layout, old.num_blocks, torch.device("cpu")))
    for tensor in (*old.keys.values(), *old.values.values()):
        tensor.fill_(torch.nan)  # whoever still reads it shows
    assert setup.device.num_captures == 2 * before
    assert answers(setup.engine, work) == expected


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2"])
def test_models_that_cannot_be_recorded_run_without_graphs(
    plain_model: Callable[[str], LoadedModel], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, work = plain_model(family), random_work(7, 6)
    setup = Setup(model)
    assert setup.runner.graphs is None
    assert "not recorded" in caplog.text
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)


def test_a_device_that_refuses_to_record_is_used_without_graphs(
    plain_model: Callable[[str], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model("llama")
    storage = KVStorage(model.plan_layout(LayoutOptions(4)), 8, model.device)
    device = FakeDevice(cannot_capture="out of memory")
    runner = DeviceRunner(model, storage, device, RunnerLimits(64, 16))
    assert runner.graphs is None
    assert "RuntimeError: out of memory" in caplog.text


def test_what_reads_results_while_it_is_recorded_is_refused_as_by_cuda() -> None:
    values = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        FakeDevice().capture(lambda: print(values.sum().item()))


def test_a_graph_reads_its_memory_and_not_what_the_host_had() -> None:
    """What the fake device must do for the other tests to mean anything."""
    source, target = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        target.copy_((source * 10).view(1, 2)[0] + 1)

    graph = FakeDevice().capture(work)
    source.copy_(torch.tensor([5.0, 6.0]))
    graph.replay()
    assert target.tolist() == [51.0, 61.0]


# ---------------------------------------------------------------------------------------------- copies


def test_each_step_takes_one_copy_in_and_one_out_whatever_it_holds(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    """Prompts, decoding, both, copies on write, penalties, log probabilities: always one."""
    setup = Setup(plain_model("gemma2"))
    device, engine = setup.device, setup.engine
    for number, (prompt, params) in enumerate(random_work(8, 24)):
        add(engine, str(number), prompt, params)
        before = device.num_copies_in, device.num_copies_out
        engine.step()
        assert (device.num_copies_in - before[0], device.num_copies_out - before[1]) == (1, 1)
    while engine.has_unfinished_requests():
        before = device.num_copies_in, device.num_copies_out
        engine.step()
        copied = device.num_copies_in - before[0], device.num_copies_out - before[1]
        assert copied == ((1, 1) if engine._in_flight else (0, 0))
    assert setup.num_replays


def test_a_step_that_outgrows_the_buffer_takes_more_copies_and_the_next_again_one(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    setup = Setup(plain_model("llama"), sizes=())
    buffer = setup.runner._other_buffer  # whose turn is next
    buffer._parts.clear()
    buffer._used.clear()
    buffer._grow(256)
    work = random_work(9, 12)
    copies = []
    for number, (prompt, params) in enumerate(work):
        add(setup.engine, str(number), prompt, params)
    while setup.engine.has_unfinished_requests():
        before = setup.device.num_copies_in
        setup.engine.step()
        copies.append(setup.device.num_copies_in - before)
    assert copies[0] > 1
    assert set(copies[1:-1]) == {1}


def test_the_gpu_kernels_plans_travel_in_the_one_copy(plain_model: Callable[[str], LoadedModel]) -> None:
    """Triton's kernels, interpreted; their graphs can only be recorded on a GPU."""
    pytest.importorskip("triton")
    from foreword.kernels.triton.attention import TritonAttention

    model = plain_model("llama")
    work = [(prompt[:9], replace(params, max_tokens=4, min_tokens=0)) for prompt, params in random_work(11, 3)]
    setup = Setup(replace(model, kernel=TritonAttention()), sizes=())
    tokens = [answer[0] for answer in answers(setup.engine, work)]
    assert tokens == [answer[0] for answer in answers(build_engine(model, block_size=4), work)]
    assert setup.device.num_copies_in == setup.device.num_copies_out == len(setup.device.events)


def test_logits_never_leave_the_device(plain_model: Callable[[str], LoadedModel]) -> None:
    """What is copied out is a few numbers per request, not a number per word of the vocabulary."""
    setup = Setup(plain_model("llama"))
    sizes = []
    copy = setup.device.copy

    def watch(target: torch.Tensor, source: torch.Tensor) -> None:
        if target.untyped_storage().data_ptr() in setup.device.host_buffers:
            sizes.append(source.numel())
        copy(target, source)

    setup.device.copy = watch  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=5, logprobs=2, ignore_eos=True)
    answers(setup.engine, [([3, 4, 5], params), ([6, 7], replace(params, logprobs=None))])
    per_report = 3 + 2 * 2
    assert sizes == [4 * (2 + per_report)] * 5


# ---------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("pass_rows", [64, 128])
def test_passes_of_a_fixed_number_of_rows_change_no_bit(
    plain_model: Callable[[str], LoadedModel], pass_rows: int
) -> None:
    """Long prompts are cut across passes and several requests share one; on this CPU bits are equal either way."""
    model, work = plain_model("gemma2"), random_work(10, 12)
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert answers(Setup(model, pass_rows=pass_rows).engine, work) == expected

    shapes = set()

    class Watching(ModelRunner):
        def _run(self, passes: list[Any]) -> torch.Tensor:
            shapes.update(one.rows.shape[1] for one in passes)
            shapes.update(len(one.keep) for one in passes if one.num_kept)
            return super()._run(passes)

    engine = build_engine(
        model, runner_class=lambda m, s: Watching(m, s, pass_rows=pass_rows), block_size=4, num_blocks=256
    )
    assert answers(engine, work) == expected
    assert shapes == {pass_rows}, "every matrix product has the same number of rows"


# ------------------------------------------------------------------------------------------ steps behind


def plain_work(seed: int, num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose sampling looks at logits alone; some end with tokens that nobody can foresee."""
    rng = np.random.default_rng(seed)
    common = random_tokens(rng, 40)
    work = []
    for number in range(num_requests):
        prompt = common[: int(rng.integers(0, 41))] + random_tokens(rng, int(rng.integers(1, 30)))
        options: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.5, "logprobs": 2, "stop_token_ids": tuple(range(0, 320, 9))},
            {"temperature": 1.5, "top_p": 0.95, "min_tokens": 3, "stop_token_ids": tuple(range(0, 320, 4))},
            {"temperature": 0.0, "prompt_logprobs": 1},
            {
                "temperature": 1.5,
                "allowed_token_ids": tuple(range(0, 320, 3)),
                "min_tokens": 3,
                "stop_token_ids": tuple(range(0, 320, 4)),
            },
        ]
        length = int(rng.integers(1, 16))
        own = {"max_tokens": max(3, length), "seed": number, "ignore_eos": True} | options[number % len(options)]
        work.append((prompt, SamplingParams(**own)))
    return work


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"num_blocks": 40}),
        ("llama", {"sizes": (), "pass_rows": 8}),
        ("mistral", {"max_num_batched_tokens": 24}),
        ("gemma2", {"pass_rows": 64}),
        ("gemma4_text", {}),
        ("gpt_oss", {}),
        ("lfm2", {}),
    ],
)
def test_steps_planned_behind_others_give_the_answers_of_steps_one_by_one(
    plain_model: Callable[[str], LoadedModel], family: str, options: dict[str, Any]
) -> None:
    """Requests come and go while others decode; some are aborted, and with few blocks some are preempted."""
    model, work = plain_model(family), plain_work(1, 16)
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    setup = Setup(model, **options)
    engine, rng = setup.engine, np.random.default_rng(2)
    outputs = []
    for number, (prompt, params) in enumerate(work):
        outputs.append(add(engine, str(number), prompt, params))
        add(engine, f"aborted {number}", prompt, params)
        for _ in range(int(rng.integers(1, 4))):
            engine.step()
            engine.check_integrity()
        engine.abort_request(f"aborted {number}")
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
    assert engine.manager.get_num_free_blocks() == engine.manager.num_blocks, "a block leaked"
    assert [
        (out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs, out.outputs[0].finish_reason)
        for out in outputs
    ] == expected
    assert bool(engine.scheduler.num_preemptions) == ("num_blocks" in options)
    assert {"stop", "length"} == {out.outputs[0].finish_reason for out in outputs}
    assert ("in out in out wait" in " ".join(setup.device.log)) == (family != "lfm2"), "recurrent states wait"


def test_the_host_plans_and_queues_a_step_before_it_waits_for_the_one_before(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    """What the sampled tokens are is not asked before: the next step takes them where they are."""
    setup = Setup(plain_model("llama"))
    log, scheduler = setup.device.log, setup.engine.scheduler
    batch = scheduler._batch

    def watched(entries: Entries) -> Batch | None:
        log.extend(["schedule"] * (len(entries) > 0))
        return batch(entries)

    scheduler._batch = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(answers(setup.engine, [([3, 4, 5], params), ([6, 7, 8], params)])) == 2
    queued = ["schedule", "in", "out"]
    assert log == queued + [*queued, "wait"] * 3 + ["wait"]


def test_at_most_two_steps_are_launched_and_not_read(plain_model: Callable[[str], LoadedModel]) -> None:
    """The host memory of a step is used again by the one after the next."""
    setup = Setup(plain_model("llama"))
    add(setup.engine, "one", [3, 4, 5], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    first = setup.engine.scheduler.schedule()
    assert first is not None
    pending = setup.runner.launch(first)
    second = setup.engine.scheduler.schedule_after(first)
    assert second is not None
    assert second.expected.tolist() == [[0, 0]]
    setup.runner.launch(second)
    assert not pending.is_ready()
    with pytest.raises(AssertionError, match="was not read"):
        setup.runner.launch(second)
    result: BatchResult = pending.result()
    assert 0 <= result.token_ids[0] < 320


def test_constraints_hold_on_a_device(plain_model: Callable[[str], LoadedModel]) -> None:
    class Only:
        def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
            mask = np.zeros(320, np.bool_)
            mask[[100 + len(output_token_ids), 319]] = True
            return mask

    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, open_constraint=Only)
    model = plain_model("llama")
    [(tokens, *_)] = answers(Setup(model).engine, [([5, 6, 7], params)])
    assert all(token in (100 + place, 319) for place, token in enumerate(tokens))
    assert answers(build_engine(model), [([5, 6, 7], params)])[0][0] == tokens

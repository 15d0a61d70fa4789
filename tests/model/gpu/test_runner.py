"""Batches on a device: one copy in and one out, fixed shapes, steps that are planned before others are read.

The device is a fake; what it computes is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from drafters import draft_as_told
from fake_device import FakeDevice
from foreword.batch import BatchResult
from foreword.model.gpu.runner import StepBuffer
from foreword.model.loader import LoadedModel
from foreword.model.runner import ModelRunner
from foreword.request import SamplingParams
from lanes import SLOW
from model.gpu.device_case import Setup, answers, random_work
from tiny_models import add, build_engine, random_tokens

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
        assert copied in ((1, 1), (0, 0)), "the last step only reads what was launched before"
    assert device.num_copies_in == device.num_copies_out == len(device.events)
    assert setup.num_replays


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
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=5, logprobs=2, ignore_eos=True)
    answers(setup.engine, [([3, 4, 5], params), ([6, 7], replace(params, logprobs=None))])
    per_report = 3 + 2 * 2
    assert setup.device.num_bytes_out == [4 * (2 + per_report)] * 5


# ---------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("pass_rows", [64, 128])
def test_passes_of_a_fixed_number_of_rows_change_no_bit(
    plain_model: Callable[[str], LoadedModel], pass_rows: int
) -> None:
    """Long prompts are cut across passes and several requests share one; on this CPU bits are equal either way."""
    model, work = plain_model("gemma2"), random_work(10, 12)
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert answers(Setup(model, pass_rows=pass_rows).engine, work) == expected

    num_rows = set()
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: num_rows.add(inputs[0].shape[:-1].numel()))
        for part in model.flat.module.modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        engine = build_engine(
            model,
            runner_class=lambda model, storage: ModelRunner(model, storage, pass_rows=pass_rows),
            block_size=4,
            num_blocks=256,
        )
        assert answers(engine, work) == expected
    finally:
        for hook in hooks:
            hook.remove()
    assert num_rows == {pass_rows}, "every matrix product has the same number of rows"


# ------------------------------------------------------------------------------------------ two steps


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
        ("llama", {"num_blocks": 32}),
        ("mistral", {"max_num_batched_tokens": 24}),
        ("lfm2", {}),
        pytest.param("llama", {"sizes": (), "pass_rows": 8}, marks=SLOW),
        pytest.param("gemma2", {"pass_rows": 64}, marks=SLOW),
        pytest.param("gemma4_text", {}, marks=SLOW),
        pytest.param("gpt_oss", {}, marks=SLOW),
    ],
)
def test_steps_planned_before_others_are_read_give_the_answers_of_steps_one_by_one(
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
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert len(answers(setup.engine, [([3, 4, 5], params), ([6, 7, 8], params)])) == 2
    queued = ["in", "out"]
    assert setup.device.log == queued + [*queued, "wait"] * 3 + ["wait"]


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


# ---------------------------------------------------------------------------------------------- drafts


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_drafts_change_no_answer(plain_model: Callable[[str], LoadedModel], name: str) -> None:
    """The same work twice, so that the cache knows how it goes on."""
    work = random_work(8, 12)
    plain, setup = build_engine(plain_model(name), block_size=4, num_blocks=256), Setup(plain_model(name))
    setup.engine.draft(4)
    for _ in range(2):
        assert answers(setup.engine, work) == answers(plain, work)
    assert setup.engine.snapshot().drafts.num_accepted > 10
    rng = np.random.default_rng(0)
    drafting = draft_as_told(setup.engine, lambda request, most: random_tokens(rng, int(rng.integers(0, 4))))
    assert answers(setup.engine, work) == answers(plain, work)
    assert drafting.counts.num_rejected > 50
    assert setup.num_replays


DTYPES = (np.int32, np.int64, np.float32, np.bool_)


def some_arrays(rng: np.random.Generator, num_bytes: int) -> list[npt.NDArray[Any]]:
    """Arrays of every type and of odd sizes, one of them empty, that fill about so many bytes."""
    arrays: list[npt.NDArray[Any]] = [np.empty((2, 0), np.int32)]
    while sum(array.nbytes for array in arrays) < num_bytes:
        shape = tuple(rng.integers(1, 9, int(rng.integers(1, 3))))
        arrays.append(rng.integers(0, 2**20, shape).astype(DTYPES[len(arrays) % len(DTYPES)]))
    return arrays


def step(buffer: StepBuffer, device: FakeDevice, arrays: list[npt.NDArray[Any]]) -> int:
    """Bring the arrays to the device and compare; the number of copies that this took."""
    before = device.num_copies_in
    buffer.begin()
    tensors = [buffer.put(array) for array in arrays]
    buffer.upload()
    device.mark().synchronize()
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    return device.num_copies_in - before


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_outgrows_the_buffer_takes_more_copies_and_the_next_again_one(seed: int) -> None:
    rng, device = np.random.default_rng(seed), FakeDevice()
    buffer = StepBuffer(device, 1024)
    assert step(buffer, device, some_arrays(rng, 500)) == 1
    assert step(buffer, device, some_arrays(rng, 5000)) > 1
    for num_bytes in (3000, 100, 3500):
        assert step(buffer, device, some_arrays(rng, num_bytes)) == 1


def test_an_array_larger_than_all_of_the_buffer_arrives() -> None:
    device = FakeDevice()
    assert step(StepBuffer(device, 64), device, [np.arange(7), np.arange(10_000), np.arange(3)]) > 1


def test_a_step_without_arrays_takes_no_copy() -> None:
    device = FakeDevice()
    assert step(StepBuffer(device), device, []) == 0


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

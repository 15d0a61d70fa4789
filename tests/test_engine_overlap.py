"""A runner that computes while the host goes on gives the answers of one that does not, in steps of one schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foreword.batch import Batch, BatchResult
from foreword.engine import Engine, ModelLimits, Prompt
from foreword.errors import EngineError
from foreword.request import SamplingParams
from foreword.scheduler import Scheduler
from hash_runner import HashEngine, HashRunner, expected_answer

VOCAB_SIZE = 50


class LaunchedStep:
    """Computed when its result is asked for."""

    def __init__(self, runner: LateRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch

    def is_ready(self) -> bool:
        return self._runner.always_ready

    def result(self) -> BatchResult:
        self._runner.log.append("result")
        self._runner.num_in_flight -= 1
        return self._runner.compute(self._batch)


class LateRunner:
    """Computes a batch as late as it may, as a device does at the worst."""

    def __init__(self, inner: HashRunner) -> None:
        self._inner = inner
        self.always_ready = False
        self.log: list[str] = []
        self.num_in_flight = 0
        self.fail_at: int | None = None
        self.num_computed = 0

    def execute(self, batch: Batch) -> BatchResult:
        raise AssertionError("the engine launches if it can")

    def launch(self, batch: Batch) -> LaunchedStep:
        assert not self.num_in_flight, "one batch at a time"
        self.num_in_flight += 1
        self.log.append("launch")
        return LaunchedStep(self, batch)

    def compute(self, batch: Batch) -> BatchResult:
        self.num_computed += 1
        if self.num_computed == self.fail_at:
            raise RuntimeError("device-side assert")
        return self._inner.execute(batch)


def late_engine(**options: object) -> tuple[HashEngine, LateRunner]:
    """A HashEngine whose results come late."""
    world = HashEngine.build(vocab_size=VOCAB_SIZE, **options)  # type: ignore[arg-type]
    runner = LateRunner(world.runner)
    engine = Engine(world.scheduler, runner, world.engine.limits)
    return HashEngine(engine, world.runner), runner


def test_random_work_gets_the_answers_of_the_plain_engine() -> None:
    """Small pools, so that requests are preempted; shared beginnings; some are aborted while they are computed."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        world, _ = late_engine(num_blocks=24, max_num_batched_tokens=16, max_num_seqs=6)
        common = rng.integers(0, VOCAB_SIZE, 12).tolist()
        wanted, outputs = {}, {}
        for number in range(20):
            prompt = common[: rng.integers(0, 13)] + rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(1, 12)), seed=number, stop_token_ids=(3, 4))
            outputs[str(number)] = world.engine.add_request(str(number), prompt_of(prompt), params)
            wanted[str(number)] = expected_answer(prompt, params, seed=number, vocab_size=VOCAB_SIZE, max_model_len=512)
            if rng.random() < 0.3:
                world.step()
            if rng.random() < 0.1 and world.engine.abort_request(str(number)) is not None:
                del wanted[str(number)]
        world.drain()
        for name, answer in wanted.items():
            [completion] = outputs[name].outputs
            assert (completion.token_ids, completion.finish_reason) == answer


def prompt_of(token_ids: list[int]) -> Prompt:
    return Prompt(np.array(token_ids, np.int32))


def test_the_next_batch_is_launched_before_the_last_ones_outputs_are_made() -> None:
    world, runner = late_engine()
    made: list[str] = runner.log
    collect = world.engine._collect_all
    world.engine._collect_all = lambda requests: made.append("outputs") or collect(requests)  # type: ignore[method-assign,func-returns-value]
    world.add("one", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    lengths = []
    while world.engine.has_unfinished_requests():
        lengths.append([len(output.outputs[0].token_ids) for output in world.engine.step()])
    assert made == ["launch", "outputs"] + ["result", "launch", "outputs"] * 2 + ["result", "outputs"]
    assert lengths == [[], [1], [2], [3]], "outputs come one step later, and none is lost"


def test_a_step_that_is_done_at_once_is_returned_at_once() -> None:
    world, runner = late_engine()
    runner.always_ready = True
    world.add("one", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    assert [len(output.outputs[0].token_ids) for output in world.engine.step()] == [1]
    assert runner.log == ["launch", "result"]


def test_a_request_aborted_while_it_is_computed_leaves_nothing_behind() -> None:
    world, _ = late_engine()
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    world.add("stays", [1, 2, 3], params)
    world.add("goes", [4, 5, 6, 7, 8], params)
    world.step()
    output = world.engine.abort_request("goes")
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    again = world.engine.add_request("goes", prompt_of([9, 9, 9]), params)
    world.drain()
    expected = expected_answer([9, 9, 9], params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert (again.outputs[0].token_ids, again.outputs[0].finish_reason) == expected


def test_a_stop_string_found_while_the_next_token_is_computed_ends_the_answer_there() -> None:
    class Letters:
        """A text stream of one letter per token, that stops at the third."""

        def __init__(self) -> None:
            self.num_letters = 0

        def push(self, token_ids: Sequence[int]) -> Letters:
            self.num_letters += len(token_ids)
            self.new_text = "x" * len(token_ids)
            self.stop: str | None = "xxx" if self.num_letters >= 3 else None
            return self

        def finish(self) -> str:
            return ""

    world = HashEngine.build(vocab_size=VOCAB_SIZE)
    runner = LateRunner(world.runner)
    scheduler = Scheduler(world.manager, world.scheduler.config)
    engine = Engine(scheduler, runner, ModelLimits(VOCAB_SIZE, 512), open_text_stream=lambda _: Letters())
    output = engine.add_request(
        "one", prompt_of([1, 2, 3]), SamplingParams(max_tokens=9, seed=1, ignore_eos=True, stop=("xxx",))
    )
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("stop", 3)
    assert runner.log.count("launch") == 4, "one token was computed that nobody asked for"
    later = engine.add_request("two", prompt_of([1, 2, 3]), SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
    expected = expected_answer(
        [1, 2, 3], SamplingParams(max_tokens=2), seed=1, vocab_size=VOCAB_SIZE, max_model_len=512
    )
    assert later.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("abort", [False, True])
def test_a_step_that_fails_late_leaves_no_uncomputed_block_in_the_cache(abort: bool) -> None:
    """The second step fails; `goes` may have been aborted while it was computed, its blocks already free."""
    world, runner = late_engine(max_num_batched_tokens=8)
    runner.fail_at = 2
    prompt = list(range(20))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    world.add("goes", prompt, params)
    world.step()  # launches the first 8 tokens
    world.step()  # reads them, launches the next 8
    if abort:
        world.engine.abort_request("goes")
    with pytest.raises(EngineError, match="device-side assert"):
        world.step()
    world.engine.check_integrity()
    assert not world.engine.has_unfinished_requests()
    output = world.engine.add_request("again", prompt_of(prompt), params)
    world.drain()
    expected = expected_answer(prompt, params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert output.outputs[0].token_ids == expected[0]
    assert output.num_cached_tokens == (0 if abort else 8)

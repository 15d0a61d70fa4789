"""A runner that computes while the host goes on gives the answers of one that does not, in steps of one schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from doors import outputs_of
from foreword.batch import BatchResult
from foreword.engine import Engine, ModelLimits, Prompt, TextTools
from foreword.engine.drafts.drafting import Drafting
from foreword.engine.drafts.sources import CachedPaths, OwnText, RecentAnswers
from foreword.errors import EngineError
from foreword.request import SamplingParams
from hash_runner import HashEngine, expected_answer
from late_runner import VOCAB_SIZE, LateRunner, LaunchedStep


def late_engine(**options: object) -> tuple[HashEngine, LateRunner]:
    """A HashEngine whose results come late."""
    world = HashEngine.build(vocab_size=VOCAB_SIZE, **options)  # type: ignore[arg-type]
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits)
    return HashEngine(engine, world.runner), runner


WORLDS: dict[str, dict[str, object]] = {
    "hash": {},
    "radix": {"prefix_index": "radix"},
    "deduplicated": {"deduplicate": True},
    "uncached": {"enable_prefix_caching": False},
    "roomy": {"num_blocks": 96, "max_num_batched_tokens": 64},
    "few tokens": {"max_num_batched_tokens": 3, "num_blocks": 12},
}


@pytest.mark.parametrize("name", WORLDS)
def test_random_work_gets_the_answers_of_the_plain_engine(name: str) -> None:
    """Small pools, so that requests are preempted; shared beginnings; stop tokens; some are aborted while computed."""
    num_behind = num_preemptions = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        world, runner = late_engine(
            **{"num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 6} | WORLDS[name]
        )
        common = rng.integers(0, VOCAB_SIZE, 12).tolist()
        wanted, outputs = {}, {}
        for number in range(20):
            prompt = common[: rng.integers(0, 13)] + rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(1, 16)), seed=number, stop_token_ids=(3, 4, 5))
            outputs[str(number)] = world.engine.add_request(str(number), prompt_of(prompt), params)
            wanted[str(number)] = expected_answer(prompt, params, seed=number, vocab_size=VOCAB_SIZE, max_model_len=512)
            for _ in range(rng.integers(0, 4)):
                world.step()
            if rng.random() < 0.1 and world.engine.abort_request(str(number)) is not None:
                del wanted[str(number)]
        world.drain()
        assert world.manager.get_num_free_blocks() == world.manager.num_blocks, "a block leaked"
        for own, answer in wanted.items():
            [completion] = outputs[own].outputs
            assert (completion.token_ids, completion.finish_reason) == answer
        num_behind += runner.num_behind
        num_preemptions += world.scheduler.num_preemptions
    assert num_behind > 100
    assert (num_preemptions > 0) == (name != "roomy")


def prompt_of(token_ids: list[int]) -> Prompt:
    return Prompt(np.array(token_ids, np.int32))


def test_the_next_batch_is_launched_before_the_last_ones_outputs_are_made() -> None:
    world, runner = late_engine()
    made: list[str] = runner.log
    outputs = outputs_of(world.engine)
    collect = outputs.collect
    outputs.collect = lambda requests: made.append("outputs") or collect(requests)  # type: ignore[func-returns-value]
    world.add("one", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    lengths = []
    while world.engine.has_unfinished_requests():
        lengths.append([len(output.outputs[0].token_ids) for output in world.engine.step()])
    assert made == ["launch", "outputs"] + ["launch", "result", "outputs"] * 2 + ["result", "outputs"]
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

        cut = finish

    world = HashEngine.build(vocab_size=VOCAB_SIZE)
    runner = LateRunner(world.runner)
    engine = Engine(
        world.manager,
        world.scheduler.config,
        runner,
        ModelLimits(VOCAB_SIZE, 512),
        text=TextTools(lambda *_: Letters()),
    )
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


@pytest.mark.parametrize("rests_on_it", ["nothing", "a step behind", "blocks of one that left"])
def test_a_step_that_fails_late_leaves_no_uncomputed_block_in_the_cache(rests_on_it: str) -> None:
    """The second of two steps fails. What the first computed stays cached if nothing else was told of the second."""
    world, runner = late_engine(max_num_batched_tokens=8)
    runner.fail_at = 2
    prompt = list(range(16))
    params = SamplingParams(max_tokens=4 if rests_on_it == "a step behind" else 1, ignore_eos=True, seed=1)
    world.add("goes", prompt, params)
    world.add("waits", prompt[:3], SamplingParams(max_tokens=1)) if rests_on_it == "a step behind" else None
    world.step()  # launches the first 8 tokens
    world.step()  # launches the next 8, reads the first
    if rests_on_it == "blocks of one that left":
        world.engine.abort_request("goes")
    with pytest.raises(EngineError, match="device-side assert"):
        world.step()
    world.engine.check_integrity()
    assert not world.engine.has_unfinished_requests()
    output = world.engine.add_request("again", prompt_of([*prompt, 1]), params)
    world.drain()
    expected = expected_answer([*prompt, 1], params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert output.outputs[0].token_ids == expected[0]
    assert output.num_cached_tokens == (8 if rests_on_it == "nothing" else 0)


def test_a_step_of_many_requests_that_fails_under_another_is_told_as_what_it_is() -> None:
    """So many that their rows are beyond those that a scheduler begins with."""
    world, runner = late_engine(num_blocks=400, max_num_seqs=40, max_num_batched_tokens=400)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    outputs = [world.engine.add_request(str(number), prompt_of([number, 1, number]), params) for number in range(30)]
    world.step()
    runner.fail_at = 1
    with pytest.raises(EngineError, match="device-side assert"):
        world.step()
    world.engine.check_integrity()
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    again = world.engine.add_request("again", prompt_of([1, 2, 3]), params)
    world.drain()
    expected = expected_answer([1, 2, 3], params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert again.outputs[0].token_ids == expected[0]


def test_aborting_a_request_spares_one_that_has_the_id_of_a_continuation_that_ended() -> None:
    world, _ = late_engine()
    params = SamplingParams(n=2, max_tokens=60, seed=0, stop_token_ids=(1, 2, 3, 4))
    first = world.engine.add_request("one", prompt_of([1, 2, 3]), params)
    while not any(completion.finished for completion in first.outputs):
        world.step()
    [ended] = [completion.index for completion in first.outputs if completion.finished]
    second = world.engine.add_request(f"one#{ended}", prompt_of([5, 6]), SamplingParams(max_tokens=5, seed=1))
    world.engine.abort_request("one")
    assert first.finished
    for _ in range(7):
        world.step()
    assert (second.outputs[0].finish_reason, len(second.outputs[0].token_ids)) == ("length", 5)


def test_a_launch_that_fails_behind_a_step_ends_its_requests_alone() -> None:
    """What the step in flight computed is kept, and its tokens are told."""
    world, runner = late_engine()
    output = world.engine.add_request("one", prompt_of(list(range(9))), SamplingParams(max_tokens=4, seed=1))
    world.step()
    runner.refuses = True
    with pytest.raises(EngineError, match="out of memory"):
        world.step()
    runner.refuses = False
    world.engine.check_integrity()
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "abort")
    again = world.engine.add_request("again", prompt_of(list(range(9))), SamplingParams(max_tokens=4, seed=1))
    world.drain()
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("settles", [True, False])
def test_an_interrupt_while_a_step_is_planned_behind_another_ends_all_requests(settles: bool) -> None:
    world, runner = late_engine()
    outputs = [
        world.engine.add_request(str(number), prompt_of([*range(9), number]), SamplingParams(max_tokens=9, seed=1))
        for number in range(3)
    ]
    world.step()
    allocate = world.manager.allocate_running_slots

    def interrupted(*args: Any) -> int:
        allocate(*args)
        raise KeyboardInterrupt

    world.manager.allocate_running_slots = interrupted  # type: ignore[method-assign]
    if not settles:
        runner.fail_at = 1
    with pytest.raises(KeyboardInterrupt if settles else EngineError):
        world.engine.step()
    world.manager.allocate_running_slots = allocate  # type: ignore[method-assign]
    world.engine.check_integrity()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3
    assert {len(output.outputs[0].token_ids) for output in outputs} == {int(settles)}
    again = world.engine.add_request("again", prompt_of([*range(9), 1]), SamplingParams(max_tokens=4, seed=1))
    world.drain()
    expected = expected_answer(
        [*range(9), 1], SamplingParams(max_tokens=4), seed=1, vocab_size=VOCAB_SIZE, max_model_len=512
    )
    assert again.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize(
    ("options", "is_behind"),
    [
        ({}, True),
        ({"logprobs": 2, "min_tokens": 3, "temperature": 0.7}, True),
        ({"allowed_token_ids": (1, 2, 3), "min_tokens": 3}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"open_constraint": lambda: None}, True),
        ({"open_constraint": object}, False),
    ],
)
def test_a_step_waits_for_tokens_that_sampling_looks_at(options: dict[str, Any], is_behind: bool) -> None:
    world, runner = late_engine()
    world.add("one", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=1, **options))
    world.drain()
    assert runner.num_behind == (4 if is_behind else 0)
    assert [len(batch.entries) for batch in world.runner.batches] == [1] * 5


def test_a_request_that_its_token_ends_is_computed_once_too_often_and_its_block_is_not_found() -> None:
    """Six tokens in blocks of 4: the step behind the stop token writes a seventh and eighth that nobody may hit."""
    prompt, params = [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    first, second = expected_answer(prompt, params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)[0][:2]
    assert first != second
    world, runner = late_engine()
    stopping = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, stop_token_ids=(second,))
    output = world.engine.add_request("one", prompt_of(prompt), stopping)
    world.drain()
    assert output.outputs[0].token_ids == [first, second]
    assert runner.log.count("launch") == 3, "one token was computed that nobody asked for"
    assert world.engine.num_cached_tokens(prompt_of([*prompt, first, second, 1])) == 4
    goes_on = world.engine.add_request("two", prompt_of(prompt), params)
    world.drain()
    answer = goes_on.outputs[0].token_ids
    assert world.engine.num_cached_tokens(prompt_of([*prompt, *answer, 1])) == 12, "answers are found"


class StopAtThird:
    """A text stream that has seen its stop string when the third token comes."""

    @dataclass
    class Step:
        new_text: str
        stop: str | None

    def __init__(self, params: SamplingParams, after: Sequence[int]) -> None:
        self._num_tokens, self._stop = 0, params.stop

    def push(self, token_ids: Sequence[int]) -> Step:
        self._num_tokens += len(token_ids)
        return self.Step("x" * len(token_ids), "x" if self._stop and self._num_tokens >= 3 else None)

    def finish(self) -> str:
        return ""

    cut = finish


def stopping_engine() -> tuple[HashEngine, LateRunner]:
    world = HashEngine.build(vocab_size=VOCAB_SIZE)
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits, text=TextTools(StopAtThird))
    return HashEngine(engine, world.runner), runner


def test_no_block_stays_whose_last_token_was_to_be_computed_by_a_launch_that_failed() -> None:
    """The third token fills a block and completes the stop string; the step that computes it is refused."""
    world, runner = stopping_engine()
    prompt = [1, 2, 3, 4, 5]
    output = world.engine.add_request(
        "a", Prompt(np.array(prompt, np.int32)), SamplingParams(max_tokens=20, seed=7, stop=("x",))
    )
    while len(output.outputs[0].token_ids) < 2:
        world.engine.step()
    runner.refuses = True
    with pytest.raises(EngineError, match="out of memory"):
        world.engine.step()
    runner.refuses = False
    assert output.outputs[0].finish_reason == "stop"
    world.engine.check_integrity()
    again = [*prompt, *output.outputs[0].token_ids, 9]
    params = SamplingParams(max_tokens=4, seed=3)
    answer = world.engine.add_request("b", Prompt(np.array(again, np.int32)), params)
    while world.engine.has_unfinished_requests():
        world.engine.step()
    expected, _ = expected_answer(again, params, seed=3, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert answer.outputs[0].token_ids == expected


@pytest.mark.parametrize("ready", [False, True])
def test_no_token_follows_a_stop_string_however_fast_the_device_is(ready: bool) -> None:
    """A penalty keeps steps from being planned behind others; the device may be done at once or not."""
    world, runner = stopping_engine()
    params = SamplingParams(max_tokens=20, seed=7, stop=("x",), presence_penalty=0.1)
    output = world.engine.add_request("a", Prompt(np.array([1, 2, 3, 4, 5], np.int32)), params)
    while world.engine.has_unfinished_requests():
        runner.always_ready = ready and len(output.outputs[0].token_ids) == 2
        world.engine.step()
    assert len(output.outputs[0].token_ids) == 3


def interrupt_a_wait(monkeypatch: pytest.MonkeyPatch, is_due: Callable[[], bool] = lambda: True) -> None:
    """Let an interrupt end the next wait for a step's result at which `is_due`."""
    result = LaunchedStep.result

    def interrupted(step: LaunchedStep) -> BatchResult:
        if not is_due():
            return result(step)
        monkeypatch.setattr(LaunchedStep, "result", result)
        raise KeyboardInterrupt

    monkeypatch.setattr(LaunchedStep, "result", interrupted)


def test_an_interrupt_while_waiting_loses_neither_the_batch_nor_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = late_engine()
    world.add("z", list(range(1, 42)), SamplingParams(max_tokens=1, seed=1))
    world.drain()
    prompt = Prompt(np.arange(1, 42, dtype=np.int32))
    cached = world.engine.num_cached_tokens(prompt)
    params = SamplingParams(max_tokens=20, seed=1)
    output = world.engine.add_request("a", Prompt(np.array([9, 8, 7], np.int32)), params)
    world.engine.step()
    world.engine.step()
    interrupt_a_wait(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        world.engine.step()
    assert world.engine.num_cached_tokens(prompt) == cached > 0
    while world.engine.has_unfinished_requests():
        world.engine.step()
    expected, _ = expected_answer([9, 8, 7], params, seed=1, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert output.outputs[0].token_ids == expected


def test_an_interrupt_while_a_refused_launch_waits_for_the_batch_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused batch has not computed its blocks, whatever ends the wait for the earlier one."""
    world, runner = late_engine()
    prompt, params = [1, 2, 3, 4, 5], SamplingParams(max_tokens=20, seed=7)
    output = world.engine.add_request("a", prompt_of(prompt), params)
    while len(output.outputs[0].token_ids) < 2:
        world.engine.step()
    interrupt_a_wait(monkeypatch)
    runner.refuses = True
    with pytest.raises(KeyboardInterrupt):
        world.engine.step()
    runner.refuses = False
    world.engine.check_integrity()
    assert output.outputs[0].finish_reason == "abort"
    again = [*prompt, *output.outputs[0].token_ids, 9]
    answer = world.engine.add_request("b", prompt_of(again), params)
    world.drain()
    expected, _ = expected_answer(again, params, seed=7, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert answer.outputs[0].token_ids == expected


def test_an_interrupt_while_the_step_after_a_failed_one_is_awaited_ends_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, runner = late_engine()
    prompt, params = [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=20, seed=7)
    output = world.engine.add_request("a", prompt_of(prompt), params)
    world.engine.step()
    runner.fail_at = 1
    interrupt_a_wait(monkeypatch, lambda: runner.num_computed > 0)
    with pytest.raises(KeyboardInterrupt):
        world.engine.step()
    world.engine.check_integrity()
    assert output.outputs[0].finish_reason == "abort"
    runner.num_in_flight = 0
    answer = world.engine.add_request("b", prompt_of(prompt), params)
    world.drain()
    expected, _ = expected_answer(prompt, params, seed=7, vocab_size=VOCAB_SIZE, max_model_len=512)
    assert answer.outputs[0].token_ids == expected


@pytest.mark.parametrize("draft_tokens", [3, "auto"])
def test_drafts_wait_for_known_tokens_and_change_nothing(draft_tokens: Any) -> None:
    """The same prompts again and again, which the cache learns; some are aborted while their drafts are computed."""
    world, runner = late_engine(num_blocks=96, max_num_batched_tokens=64, prefix_index="radix")
    drafting = Drafting([OwnText(), RecentAnswers(), CachedPaths(world.manager)], VOCAB_SIZE, draft_tokens)
    world.scheduler.drafting = drafting
    if draft_tokens == "auto":
        drafting._allowance.note_plain(1, 0.01, 0.0)  # nothing is drafted before a step was timed
    drafting.note_step = lambda entries, seconds: None  # type: ignore[method-assign]  # so that no time decides here
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, 9).tolist() for _ in range(3)]
    for number in range(40):
        prompt, params = prompts[number % 3], SamplingParams(max_tokens=24, seed=number % 3)
        output = world.engine.add_request(str(number), prompt_of(prompt), params)
        for _ in range(int(rng.integers(0, 6))):
            world.step()
        if number % 7 == 6:
            world.engine.abort_request(str(number))
        world.drain()
        [completion] = output.outputs
        expected = expected_answer(prompt, params, seed=number % 3, vocab_size=VOCAB_SIZE, max_model_len=512)
        if completion.finish_reason == "abort":
            assert completion.token_ids == expected[0][: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason) == expected
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks
    assert world.engine.snapshot().drafts.num_accepted > 100
    assert (runner.num_behind > 0) == (draft_tokens == "auto")


def test_a_runner_that_launches_drafts_only_if_it_is_told_how_much(caplog: pytest.LogCaptureFixture) -> None:
    world, _ = late_engine()
    with caplog.at_level("INFO", "foreword"):
        world.engine.draft("auto")
    assert world.scheduler.drafting is None
    assert "on a GPU" in caplog.text
    world.engine.draft(4)
    assert world.scheduler.drafting is not None

"""Which tokens are computed in which step, and for whom. The model is `HashRunner`: real KV, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from doors import num_given_up
from foreword.batch import Batch, Entries
from foreword.cache import TokenSequence
from foreword.engine import Prompt, TierDirector
from foreword.engine.running_rows import RunningRows
from foreword.errors import CacheBusyError, EngineError
from foreword.request import NO_ROW, Request, RequestOutput, SamplingParams
from hash_runner import HashEngine, expected_answer

VOCAB_SIZE = 50
MAX_MODEL_LEN = 512


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()
    return token_ids


def params(max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0)


def assert_right(output: RequestOutput, prompt: Sequence[int], own: SamplingParams) -> None:
    answer, reason = expected_answer(prompt, own, seed=0, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (answer, reason)


def submit(parts: HashEngine, request_id: str, prompt: Sequence[int], own: SamplingParams) -> RequestOutput:
    return parts.engine.add_request(request_id, Prompt(np.array(prompt, np.int32)), own)


# ------------------------------------------------------------------------------------ shared prefixes


@pytest.mark.parametrize("budget", [5, 16, 64, 2048])
@pytest.mark.parametrize("coalesce", [True, False])
def test_cold_requests_with_one_long_prefix_compute_it_once(budget: int, coalesce: bool) -> None:
    """Ten requests, 100 shared tokens, 3 of their own: 100 + 10 * 3 tokens, though prefill may take many steps.

    Coalescing changes nothing here: beside an unfinished prompt only those are admitted that compute all of their own,
    which are few tokens once the shared ones are hit.
    """
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=budget, coalesce_in_flight=coalesce)
    shared = tokens(100)
    prompts = [[*shared, number, number, number] for number in range(10)]
    outputs = [submit(parts, f"{number}", prompt, params()) for number, prompt in enumerate(prompts)]
    parts.drain()
    assert parts.engine.num_computed_tokens == 100 + 10 * 3
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_right(output, prompt, params())


def test_where_a_long_prompt_leaves_room_others_wait_for_its_blocks_instead_of_computing_them() -> None:
    shared = tokens(96)
    prompts = [[*shared, number, number, number] for number in range(8)]
    unrelated = [49, 48, 47, 46, 45]
    computed = {}
    for coalesce in (True, False):
        parts = HashEngine.build(
            num_blocks=512, max_num_batched_tokens=64, long_prefill_token_threshold=8, coalesce_in_flight=coalesce
        )
        outputs = [submit(parts, f"{number}", prompt, params()) for number, prompt in enumerate(prompts)]
        stranger = submit(parts, "stranger", unrelated, params())
        first_step = parts.step()
        if coalesce:
            assert list(first_step) == ["0", "stranger"], "a request with nothing to wait for passes those that wait"
        parts.drain()
        computed[coalesce] = parts.engine.num_computed_tokens
        for output, prompt in zip([*outputs, stranger], [*prompts, unrelated], strict=True):
            assert_right(output, prompt, params())
    assert computed[True] == 96 + 8 * 3 + 5
    assert computed[False] > 2 * computed[True]


def test_no_request_gets_more_of_a_step_than_the_threshold() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=30, long_prefill_token_threshold=12)
    parts.add("long", tokens(40), params())
    parts.add("other", [7, *tokens(20)], params())
    assert parts.step() == {"long": (0, 12), "other": (0, 12)}
    assert parts.step() == {"long": (12, 24), "other": (12, 21)}


def test_without_prefix_caching_every_cold_request_computes_all_of_it() -> None:
    parts = HashEngine.build(num_blocks=512, max_num_batched_tokens=16, enable_prefix_caching=False)
    for number in range(10):
        parts.add(f"{number}", [*tokens(100), number, number, number], params())
    parts.drain()
    assert parts.engine.num_computed_tokens == 10 * 103


@pytest.mark.parametrize("coalesce", [True, False])
def test_blocks_that_a_batch_fills_are_hit_by_later_members_of_the_batch(coalesce: bool) -> None:
    parts = HashEngine.build(coalesce_in_flight=coalesce)
    prompts = {"first": tokens(22), "second": tokens(22), "third": [*tokens(17), 1, 2, 3]}
    outputs = {name: submit(parts, name, prompt, params()) for name, prompt in prompts.items()}
    assert parts.step() == {"first": (0, 22), "second": (20, 22), "third": (16, 20)}
    for name, output in outputs.items():
        assert_right(output, prompts[name], params())


def test_a_request_waits_for_a_prefix_that_another_computes_and_no_longer() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=10)
    long = tokens(100)
    prompts = {"owner": long, "waiter": [*long[:20], 1, 2, 3], "late waiter": [*long[:64], 1, 2]}
    outputs = {name: submit(parts, name, prompt, params()) for name, prompt in prompts.items()}
    spans = [parts.step() for _ in range(9)]
    assert spans[:4] == [
        {"owner": (0, 10)},
        {"owner": (10, 20)},
        {"owner": (20, 27), "waiter": (20, 23)},
        {"owner": (27, 37)},
    ]
    assert [list(step) for step in spans[6:8]] == [["owner"], ["owner", "late waiter"]]
    parts.drain()
    assert parts.engine.num_computed_tokens == 100 + 3 + 2
    for name, output in outputs.items():
        assert_right(output, prompts[name], params())


def test_beside_a_long_prompt_short_ones_run_and_long_ones_wait_for_its_end() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=20)
    parts.add("first", tokens(90), params())
    parts.add("long", [9, *tokens(40)], params())
    parts.add("short", [8, 7, 6], params(4))
    steps = [parts.step() for _ in range(7)]
    assert steps[0] == {"first": (0, 20)}
    assert steps[1] == {"first": (20, 37), "short": (0, 3)}
    assert steps[2] == {"first": (37, 56), "short": (3, 4)}, "an answer goes on beside a long prompt"
    assert [list(step) for step in steps[3:5]] == [["first", "short"], ["first", "short", "long"]]
    assert list(steps[6]) == ["long"]


def test_a_long_prompt_gets_half_of_each_step_whatever_waits() -> None:
    parts = HashEngine.build(num_blocks=512, max_num_batched_tokens=20, max_num_seqs=64)
    parts.add("long", tokens(100), params())
    for number in range(60):
        parts.add(f"{number}", [number % 50, number // 50, 3], params())
    steps = [parts.step() for _ in range(9)]
    spans = [step["long"] for step in steps if "long" in step]
    assert spans[0] == (0, 20)
    assert all(10 <= end - start < 15 for start, end in spans[1:-1])
    assert spans[-1][1] == 100
    assert all(sum(end - start for start, end in step.values()) <= 20 for step in steps)


def test_aborting_the_request_that_computes_a_prefix_lets_the_waiting_one_go_on() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=10)
    shared = tokens(60)
    parts.add("owner", [*shared, 1], params())
    waiter = submit(parts, "waiter", [*shared, 2], params(3))
    parts.step()
    assert parts.step() == {"owner": (10, 20)}
    parts.engine.abort_request("owner")
    parts.engine.check_integrity()
    assert parts.step() == {"waiter": (20, 30)}, "it hits what the other had computed until then"
    parts.drain()
    assert_right(waiter, [*shared, 2], params(3))


def test_aborting_a_request_that_awaits_a_prefix_leaves_nothing_behind() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=10)
    shared = tokens(60)
    owner = submit(parts, "owner", [*shared, 1], params())
    parts.add("waiter", [*shared, 2], params())
    third = submit(parts, "third", [*shared, 3], params())
    parts.step()
    parts.step()
    aborted = parts.engine.abort_request("waiter")
    parts.engine.check_integrity()
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    parts.drain()
    assert_right(owner, [*shared, 1], params())
    assert_right(third, [*shared, 3], params())
    assert parts.engine.num_computed_tokens == 61 + 1


def test_a_request_that_skips_the_cache_waits_for_nobody() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=40)
    prompt = tokens(50)
    parts.add("owner", prompt, params())
    parts.add("skips", prompt, SamplingParams(max_tokens=1, seed=0, skip_reading_prefix_cache=True))
    assert parts.step() == {"owner": (0, 40)}
    assert parts.step() == {"owner": (40, 50), "skips": (0, 30)}
    parts.drain()
    assert parts.engine.num_computed_tokens == 100


def test_continuations_of_one_prompt_compute_it_once() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=16)
    prompt = tokens(41)
    own = SamplingParams(n=4, max_tokens=5, seed=3)
    output = submit(parts, "many", prompt, own)
    parts.drain()
    assert parts.engine.num_computed_tokens == 41 + 3 * 1 + 4 * 4
    answers = [completion.token_ids for completion in output.outputs]
    assert answers == [
        expected_answer(prompt, own, seed=3 + index, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)[0]
        for index in range(4)
    ]
    assert len({tuple(answer) for answer in answers}) == 4


# ---------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_no_step_computes_more_than_the_budget(budget: int) -> None:
    parts = HashEngine.build(num_blocks=40, max_num_batched_tokens=budget)
    prompts = [tokens(length, seed) for seed, length in enumerate((30, 5, 61, 1, 20))]
    outputs = [submit(parts, f"{number}", prompt, params(9)) for number, prompt in enumerate(prompts)]
    parts.drain()
    assert max(batch.num_tokens for batch in parts.runner.batches) == budget
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_right(output, prompt, params(9))


def test_decoding_requests_go_before_prefill_and_prefill_takes_what_is_left() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_batched_tokens=8)
    parts.add("a", tokens(4, 1), params(20))
    parts.add("b", tokens(4, 2), params(20))
    assert parts.step() == {"a": (0, 4), "b": (0, 4)}
    parts.add("c", tokens(13, 3), params(20))
    assert parts.step() == {"a": (4, 5), "b": (4, 5), "c": (0, 6)}
    assert parts.step() == {"a": (5, 6), "b": (5, 6), "c": (6, 12)}
    assert parts.step() == {"a": (6, 7), "b": (6, 7), "c": (12, 13)}
    assert parts.step() == {"a": (7, 8), "b": (7, 8), "c": (13, 14)}


def test_no_more_than_max_num_seqs_run_together() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_seqs=3)
    for number in range(7):
        parts.add(f"{number}", tokens(5, number), params(4))
    while parts.engine.has_unfinished_requests():
        assert len(parts.step()) <= 3
        assert parts.scheduler.num_running <= 3


# ----------------------------------------------------------------------------------------------- order


def admission_order(parts: HashEngine) -> list[str]:
    order: list[str] = []
    while parts.engine.has_unfinished_requests():
        order += [request_id for request_id in parts.step() if request_id not in order]
    return order


def test_first_come_first_served() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_seqs=1)
    for number in range(5):
        parts.add(f"{number}", tokens(6, number), params(2), priority=-number)
    assert admission_order(parts) == ["0", "1", "2", "3", "4"]


def test_the_priority_policy_serves_lower_values_first_and_equal_ones_by_arrival() -> None:
    parts = HashEngine.build(num_blocks=256, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("late", 5), ("first of two", 1), ("second of two", 1), ("urgent", -3)):
        parts.add(name, tokens(6, priority + 10), params(2), priority=priority)
    assert admission_order(parts) == ["urgent", "first of two", "second of two", "late"]


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    """So that none starves: a small request does not overtake a large one."""
    parts = HashEngine.build(num_blocks=10)
    parts.add("running", tokens(24, 1), params(4))
    parts.step()
    parts.add("large", tokens(24, 2), params(4))
    parts.add("small", tokens(2, 3), params(1))
    assert list(parts.step()) == ["running"]
    assert admission_order(parts) == ["running", "large", "small"]


# ------------------------------------------------------------------------------------------- admission


def test_a_request_that_fits_only_because_of_its_hit_is_admitted() -> None:
    """10 blocks of 4. Two requests of 28 tokens each need 7, but share 6: together they hold 8."""
    parts = HashEngine.build(num_blocks=10)
    shared = tokens(24)
    first = submit(parts, "first", [*shared, 1, 1, 1], params(5))
    second = submit(parts, "second", [*shared, 2, 2, 2], params(5))
    assert parts.step() == {"first": (0, 27), "second": (24, 27)}
    assert parts.manager.get_num_free_blocks() == 2
    parts.drain()
    assert parts.scheduler.num_preemptions == 0
    assert_right(first, [*shared, 1, 1, 1], params(5))
    assert_right(second, [*shared, 2, 2, 2], params(5))


def test_without_a_hit_the_same_request_has_to_wait() -> None:
    parts = HashEngine.build(num_blocks=10, enable_prefix_caching=False)
    shared = tokens(24)
    parts.add("first", [*shared, 1, 1, 1], params(5))
    parts.add("second", [*shared, 2, 2, 2], params(5))
    assert parts.step() == {"first": (0, 27)}


def test_free_cached_blocks_of_the_hit_itself_are_not_counted_as_room() -> None:
    """The hit's blocks are free, but touching them takes them out of the free queue."""
    parts = HashEngine.build(num_blocks=8)
    prompt = tokens(16)
    parts.add("earlier", prompt, params())
    parts.drain()
    parts.add("running", tokens(11, 1), params(5))
    parts.step()
    assert parts.manager.get_num_free_blocks() == 5
    # 4 blocks of hit and 2 new ones are one too many.
    parts.add("again", [*prompt, *tokens(7, 2)], params())
    assert list(parts.step()) == ["running"]
    parts.drain()


# ------------------------------------------------------------------------------------------ preemption


def test_the_last_in_order_is_preempted_and_finds_its_own_blocks_again() -> None:
    """8 blocks of 4: both fit with 3 blocks each, but grow to 5."""
    parts = HashEngine.build(num_blocks=8)
    prompts = {"first": tokens(11, 1), "second": tokens(11, 2)}
    outputs = {name: submit(parts, name, prompt, params(9)) for name, prompt in prompts.items()}
    spans = [parts.step()]
    while parts.scheduler.num_preemptions == 0:
        spans.append(parts.step())
    assert list(spans[-1]) == ["first"], "the second one lost its blocks"
    assert spans[-1]["first"][0] == 16
    assert parts.scheduler.num_waiting == 1
    resumed = parts.step()
    while "second" not in resumed:
        resumed = parts.step()
    start, end = resumed["second"]
    assert end == 17, "it goes on with the tokens it had generated"
    assert start > 0, "its own blocks were still cached"
    assert parts.manager.stats.preempted_requests == 1
    assert parts.manager.stats.preempted_hits == start
    assert parts.manager.stats.requests == 2, "resuming is no new request"
    parts.drain()
    for name, output in outputs.items():
        assert_right(output, prompts[name], params(9))


@pytest.mark.parametrize(("is_aborted", "least"), [(False, 4), (True, 1)])
def test_a_preempted_request_of_a_closed_session_gives_up_its_blocks_when_it_ends(is_aborted: bool, least: int) -> None:
    parts = HashEngine.build(num_blocks=8)
    parts.add("first", tokens(11, 1), params(9))
    parts.engine.add_request("second", Prompt(np.array(tokens(11, 2), np.int32), session="s"), params(9))
    parts.step()
    parts.engine.close_session(None, "s")
    while parts.scheduler.num_preemptions == 0:
        parts.step()
    assert num_given_up(parts.manager) == 0
    if is_aborted:
        parts.engine.abort_request("second")
    else:
        parts.drain()
    parts.manager.check_integrity()
    assert num_given_up(parts.manager) >= least


def test_the_least_urgent_is_preempted_under_the_priority_policy() -> None:
    parts = HashEngine.build(num_blocks=8, scheduling_policy="priority")
    parts.add("least", tokens(11, 1), params(9), priority=7)
    parts.add("most", tokens(11, 2), params(9), priority=1)
    while parts.scheduler.num_preemptions == 0:
        spans = parts.step()
    assert list(spans) == ["most"]


def test_a_preempted_request_keeps_the_hit_count_of_its_first_admission() -> None:
    parts = HashEngine.build(num_blocks=8)
    parts.add("first", tokens(11, 1), params(9))
    output = submit(parts, "second", tokens(11, 2), params(9))
    parts.drain()
    assert parts.scheduler.num_preemptions > 0
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_many_requests_in_a_pool_for_one_all_get_their_answers(enable_prefix_caching: bool) -> None:
    parts = HashEngine.build(num_blocks=9, max_num_batched_tokens=6, enable_prefix_caching=enable_prefix_caching)
    prompts = [tokens(length, seed) for seed, length in enumerate((20, 3, 16, 9, 20, 1, 12))]
    outputs = [submit(parts, f"{number}", prompt, params(15)) for number, prompt in enumerate(prompts)]
    parts.drain()
    assert parts.scheduler.num_preemptions > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_right(output, prompt, params(15))


# --------------------------------------------------------------------------------------------- failure


class ModelBrokeError(Exception):
    """What a model's own code may raise."""


def break_next_batch(parts: HashEngine, error: BaseException) -> None:
    def fail(_: Batch) -> None:
        parts.runner.on_execute = lambda _: None
        raise error

    parts.runner.on_execute = fail


def test_a_model_that_raises_ends_the_requests_of_its_batch_and_no_others() -> None:
    parts = HashEngine.build(num_blocks=64, max_num_batched_tokens=20)
    doomed = [submit(parts, f"doomed {number}", tokens(10, number), params(3)) for number in range(2)]
    spared = submit(parts, "spared", tokens(10, 2), params(3))
    break_next_batch(parts, ModelBrokeError("out of patience"))
    with pytest.raises(EngineError, match=r"2 requests \(doomed 0, doomed 1\).*ModelBrokeError: out of patience"):
        parts.step()
    parts.engine.check_integrity()
    assert [output.outputs[0].finish_reason for output in doomed] == ["abort", "abort"]
    assert parts.manager.get_num_free_blocks() == 64
    parts.drain()
    assert_right(spared, tokens(10, 2), params(3))


def test_blocks_that_a_failed_batch_did_not_compute_are_not_hit_later() -> None:
    parts = HashEngine.build(num_blocks=64, max_num_batched_tokens=20)
    prompt = tokens(30)
    parts.add("doomed", prompt, params(3))
    parts.step()
    break_next_batch(parts, ModelBrokeError())
    with pytest.raises(EngineError):
        parts.step()
    assert parts.manager.get_num_cached_blocks() == 5, "the first step's 20 tokens stay cached"
    again = submit(parts, "again", prompt, params(3))
    assert parts.step() == {"again": (20, 30)}
    parts.drain()
    assert_right(again, prompt, params(3))


def test_a_failed_batch_takes_along_those_that_hit_its_blocks() -> None:
    """The second request's hit was filled by the first in the same batch: it is not there either."""
    parts = HashEngine.build(num_blocks=64)
    prompt = tokens(30)
    for name in ("first", "second"):
        parts.add(name, prompt, params(3))
    break_next_batch(parts, ModelBrokeError())
    with pytest.raises(EngineError):
        parts.step()
    assert parts.manager.get_num_cached_blocks() == 0
    again = submit(parts, "again", prompt, params(3))
    parts.drain()
    assert_right(again, prompt, params(3))


def test_a_request_that_awaits_a_failed_one_computes_the_prefix_itself() -> None:
    parts = HashEngine.build(num_blocks=64, max_num_batched_tokens=10)
    prompt = tokens(30)
    parts.add("owner", prompt, params())
    waiter = submit(parts, "waiter", prompt, params(3))
    parts.step()
    break_next_batch(parts, ModelBrokeError())
    with pytest.raises(EngineError):
        parts.step()
    assert parts.step() == {"waiter": (8, 18)}
    parts.drain()
    assert_right(waiter, prompt, params(3))


def test_an_interrupt_leaves_no_uncomputed_blocks_in_the_cache() -> None:
    """Ctrl-C in a notebook goes on to the user, and the next prompt is answered rightly all the same."""
    parts = HashEngine.build(num_blocks=64)
    prompt = tokens(30)
    parts.add("interrupted", prompt, params(3))
    break_next_batch(parts, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        parts.step()
    parts.engine.abort_all()
    parts.engine.check_integrity()
    again = submit(parts, "again", prompt, params(3))
    parts.drain()
    assert_right(again, prompt, params(3))
    assert again.num_cached_tokens == 0


# ------------------------------------------------------------------------------------------ abort, reset


def test_aborting_at_every_stage_frees_the_blocks() -> None:
    """Waiting, half through its prompt, decoding, and preempted."""
    for num_steps in range(8):
        parts = HashEngine.build(num_blocks=8, max_num_batched_tokens=6)
        parts.add("other", tokens(11, 1), params(9))
        parts.add("aborted", tokens(11, 2), params(9))
        for _ in range(num_steps):
            parts.step()
        output = parts.engine.abort_request("aborted")
        assert output is not None
        assert output.finished
        parts.engine.check_integrity()
        parts.drain()
        assert parts.manager.get_num_free_blocks() == 8


def test_aborting_an_unknown_or_finished_request_does_nothing() -> None:
    parts = HashEngine.build()
    parts.add("done", tokens(5), params())
    parts.drain()
    assert parts.engine.abort_request("done") is None
    assert parts.engine.abort_request("never heard of") is None


def test_aborting_a_prompt_ends_all_its_continuations() -> None:
    parts = HashEngine.build(num_blocks=64, max_num_seqs=2)
    parts.add("many", tokens(9), SamplingParams(n=5, max_tokens=9))
    parts.step()
    output = parts.engine.abort_request("many")
    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 5
    parts.engine.check_integrity()
    assert parts.manager.get_num_free_blocks() == 64
    assert not parts.engine.has_unfinished_requests()


def test_the_cache_is_not_reset_under_running_requests() -> None:
    parts = HashEngine.build()
    parts.add("running", tokens(9), params(3))
    parts.step()
    with pytest.raises(CacheBusyError, match=r"'running'.*wait for them or abort them"):
        parts.manager.reset_prefix_cache()
    parts.drain()
    parts.manager.reset_prefix_cache()
    assert parts.manager.get_num_cached_blocks() == 0
    parts.add("again", tokens(9), params())
    assert parts.step() == {"again": (0, 9)}


def test_a_step_without_requests_does_nothing() -> None:
    parts = HashEngine.build()
    assert parts.step() == {}
    assert parts.engine.num_computed_tokens == 0


# ------------------------------------------------------------------------------- errors while scheduling


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_while_a_step_is_put_together_leaves_nothing_uncomputed_behind(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = HashEngine.build(num_blocks=64, max_num_batched_tokens=40)
    prompt = tokens(60)
    first = submit(parts, "first", prompt, params(3))
    waiting = submit(parts, "waiting", tokens(30, seed=1), params(3))
    parts.step()

    def interrupted(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("foreword.engine.scheduler.build_batch", interrupted)
        with pytest.raises(error):
            parts.engine.step()
    assert first.outputs[0].finish_reason == waiting.outputs[0].finish_reason == "abort"
    parts.engine.check_integrity()
    assert parts.manager.get_num_free_blocks() == 64

    again = submit(parts, "again", prompt, params(3))
    parts.drain()
    assert_right(again, prompt, params(3))
    assert again.num_cached_tokens == 40, "what was computed before is still there"


def test_an_interrupt_while_a_step_is_put_together_leaves_no_copy_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step would copy into a block that by then may be another's."""
    parts = HashEngine.build(prefix_index="radix")
    submit(parts, "first", tokens(8), params())
    parts.drain()
    submit(parts, "second", [*tokens(8)[:6], 1, 2, 3, 4], params())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TierDirector, "note_planned", interrupted)
        with pytest.raises(KeyboardInterrupt):
            parts.engine.step()
    assert len(parts.manager.take_copies()) == 0


def request(name: str, num_tokens: int, arrival: int, max_tokens: int = 5) -> Request:
    sequence = TokenSequence(name, list(range(1, num_tokens + 1)), block_size=4)
    made = Request(sequence, SamplingParams(), max_tokens=max_tokens, stop_token_ids=frozenset({99}))
    made.service_key = (0, arrival)
    return made


def whole(rows: RunningRows) -> Entries:
    """A step that computes everything known of everybody."""
    progress = rows.progress[rows.order]
    return rows.entries(rows.order, progress["num_computed"], progress["num_tokens"])


def test_rows_are_listed_in_service_order_and_grow_with_their_number() -> None:
    rows = RunningRows()
    requests = [request(str(row), row + 1, arrival=-row) for row in range(40)]
    for row, own in enumerate(requests):
        rows.add(row, own, 0, 0)
    assert [own.row for own in requests] == list(range(40))
    assert [own.request_id for own in rows] == [str(row) for row in reversed(range(40))]
    assert rows.last().request_id == "0"
    assert rows.progress["num_tokens"][:40].tolist() == list(range(1, 41))
    rows.remove(requests[39])
    assert rows.order.tolist() == list(reversed(range(39)))
    assert requests[39].row == NO_ROW
    rows.clear()
    assert {own.row for own in requests} == {NO_ROW}


def test_an_expected_token_counts_and_can_be_taken_back() -> None:
    rows = RunningRows()
    rows.add(0, request("goes on", 6, arrival=0), 2, 0)
    rows.add(1, request("ends", 3, arrival=1, max_tokens=1), 0, 0)
    before = whole(rows)
    rows.expect(before)
    assert rows.progress["num_computed"][:2].tolist() == [6, 3]
    assert rows.progress["num_tokens"][:2].tolist() == [7, 3], "who ends with its token for its length expects none"
    assert rows.progress["source"][:2].tolist() == [0, -1]
    rows.stop_expecting(before)
    assert rows.progress["num_computed"][:2].tolist() == [2, 0]
    assert rows.progress["num_tokens"][:2].tolist() == [6, 3]
    assert (rows.progress["source"] == -1)[:2].all()


def test_who_has_left_is_known_though_another_has_its_row() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 4, arrival=1)
    rows.add(3, first, 0, 0)
    rows.add(5, second, 0, 0)
    step = whole(rows)
    rows.remove(first)
    rows.add(3, request("third", 4, arrival=2), 0, 0)
    assert rows.still_run(step).tolist() == [False, True]
    rows.remove(second)
    rows.add(5, second, 0, 0)
    assert rows.still_run(step).tolist() == [False, False], "a second stay is another one"


def test_tokens_are_recorded_where_they_belong_and_those_to_stop_at_are_told() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 7, arrival=1)
    rows.add(1, first, 0, 0)
    rows.add(0, second, 0, 0)
    assert rows.record(np.array([1, 0]), np.array([5, 8]), np.array([99, 7])).tolist() == [True, False]
    assert (first.output_token_ids, second.output_token_ids) == ([99], [7])
    assert second.sequence.token_ids.tolist() == [*range(1, 8), 7]
    assert rows.progress["num_tokens"][:2].tolist() == [len(second), len(first)]
    assert whole(rows).progress["last_token"].tolist() == [99, 7]


def test_a_token_ends_only_whom_it_ends() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 4, arrival=1)
    second.stop_token_ids = frozenset({7})
    for row, own in enumerate((first, second)):
        rows.add(row, own, 0, 0)
    both, lengths = np.array([0, 1]), np.array([5, 5])
    assert rows.record(both, lengths, np.array([7, 99])).tolist() == [False, False], "each got the other's"
    assert rows.record(both, lengths + 1, np.array([99, 7])).tolist() == [True, True]
    rows.remove(second)
    assert rows.record(both[:1], lengths[:1] + 2, np.array([7])).tolist() == [False]


def test_a_request_that_comes_back_stands_at_its_old_place() -> None:
    rows = RunningRows()
    requests = [request(str(arrival), 4, arrival) for arrival in range(5)]
    for row, own in enumerate(requests):
        rows.add(row, own, 0, 0)
    rows.remove(requests[1])
    rows.add(7, requests[1], 0, 0)
    assert rows.order.tolist() == [0, 7, 2, 3, 4]
    assert list(rows) == requests

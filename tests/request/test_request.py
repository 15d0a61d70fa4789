"""Requests: facts by name, and tokens that nobody else can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from foreword.cache import TokenSequence
from foreword.errors import InvalidRequestError
from foreword.request import FACTS, NO_REPORT, Request, SamplingParams, TokenLimits
from foreword.request.request import DistinctTokens, named_record


def request_of(params: SamplingParams, limits: TokenLimits | None = None) -> Request:
    return Request(TokenSequence("r", [1, 2, 3], block_size=2), params, max_tokens=9, seed=-1, limits=limits)


def test_facts_carry_the_names_of_what_was_asked_for() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, logprobs=1)
    [facts] = np.array([request_of(params).facts], FACTS)
    assert {name: facts[name] for name in ("num_prompt_tokens", "max_length", "temperature", "top_k")} == {
        "num_prompt_tokens": 3,
        "max_length": 12,
        "temperature": 0.5,
        "top_k": 7,
    }
    assert (facts["top_p"], facts["min_p"], facts["seed"]) == (0.9, 0.1, 2**64 - 1)
    assert (facts["reports"], facts["reports_prompt_from"], facts["changes_logits"]) == (True, NO_REPORT, False)


def test_a_record_is_refused_that_lacks_a_field_or_has_one_too_many() -> None:
    pair = np.dtype([("a", np.int64), ("b", np.int64)])
    assert named_record(pair, b=2, a=1) == (1, 2)
    for values in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(AssertionError, match="the fields are"):
            named_record(pair, **values)
    with pytest.raises(KeyError):
        named_record(pair, a=1, c=2)


class Meddler:
    """A constraint that changes the list it is given."""

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        assert isinstance(output_token_ids, list)
        output_token_ids.clear()
        return np.ones(10, np.bool_)


def test_a_constraint_that_edits_its_list_does_not_change_the_sequence() -> None:
    request = request_of(SamplingParams(open_constraint=Meddler))
    keys = []
    for token_id in (4, 5, 6):
        request.sequence.append(token_id)
        request.allowed_tokens(request.num_output_tokens, 10)
        keys = request.sequence.block_hashes()
    assert request.sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert keys == TokenSequence("same", [1, 2, 3, 4, 5, 6], block_size=2).block_hashes()


class Alternating:
    """Allows the token after the last one, over a vocabulary of ten; it can look ahead."""

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        mask = np.zeros(10, np.bool_)
        mask[[(output_token_ids[-1] + 1) % 10 if output_token_ids else 0, 9]] = True
        return mask

    def fork(self) -> Alternating:
        return Alternating()


class Blind(Alternating):
    """A constraint that cannot look ahead just now."""

    def fork(self) -> None:  # type: ignore[override]
        return None


def allowed_after(request: Request, num_tokens: int) -> list[int]:
    mask = request.allowed_tokens(num_tokens, 10)
    assert mask is not None
    return np.flatnonzero(mask).tolist()  # type: ignore[no-any-return]


def test_a_draft_is_cut_at_the_first_token_that_may_not_come() -> None:
    request = request_of(SamplingParams(open_constraint=Alternating))
    assert request.cut_drafts([0, 1, 5, 6], 10) == 2
    assert [allowed_after(request, count) for count in range(3)] == [[0, 9], [1, 9], [2, 9]]
    assert request.cut_drafts([4, 5], 10) == 0
    assert request_of(SamplingParams(open_constraint=Meddler)).cut_drafts([0, 1], 10) == 0
    assert request_of(SamplingParams(open_constraint=Blind)).cut_drafts([0, 1], 10) == 0
    assert request_of(SamplingParams()).cut_drafts([4, 5], 10) == 2


def test_masks_of_drafts_that_were_never_checked_are_not_used_later() -> None:
    request = request_of(SamplingParams(open_constraint=Alternating))
    assert request.cut_drafts([0, 1, 2], 10) == 3
    request.sequence.append(9)
    assert allowed_after(request, 1) == [0, 9]
    request.sequence.append(9)
    assert allowed_after(request, 2) == [0, 9]


def test_a_request_has_run_dry_only_where_its_last_token_was_sampled() -> None:
    """After a wrong draft nothing may be allowed; after what came instead something is."""
    limits = TokenLimits(10, [8], end_token_ids=[8], allowed=[1, 2], bad_words=[(1, 1), (1, 2)])
    request = request_of(SamplingParams(bad_words=("x",)), limits=limits)
    assert request.cut_drafts([2, 1, 1], 10) == 2
    assert [allowed_after(request, count) for count in range(3)] == [[1, 2], [1, 2], [8]]
    request.sequence.extend([2, 2])
    assert not request.has_run_dry
    assert allowed_after(request, 2) == [1, 2]
    request.sequence.append(1)
    assert not request.has_run_dry
    assert allowed_after(request, 3) == [8]
    request.sequence.append(8)
    assert request.has_run_dry


def test_distinct_tokens_of_a_growing_text_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for vocab in (2, 30, 5000):
        text = rng.integers(0, vocab, 400).astype(np.int32)
        distinct, length = DistinctTokens(), 0
        while length < len(text):
            length = min(len(text), length + int(rng.integers(0, 60)))
            assert distinct.of(text[:length]).tolist() == sorted(set(text[:length].tolist()))


VOCAB = 6
END = 5


def limits(*, words: list[list[int]] | None = None, end: bool = True, **params: Any) -> TokenLimits | None:
    own = SamplingParams(**params)
    stop = {END, *own.stop_token_ids} if end else set(own.stop_token_ids)
    return TokenLimits.of(own, VOCAB, stop, end_token_ids=[END] if end else [], bad_words=words or [])


def left(own: TokenLimits | None, *answer: int, mask: list[int] | None = None, needs_more: bool = False) -> list[int]:
    assert own is not None
    allowed = None if mask is None else np.isin(np.arange(VOCAB), mask)
    found = own.narrow(allowed, answer, needs_more=needs_more)
    return [] if found is None else np.flatnonzero(found).tolist()


def test_parameters_that_forbid_little_need_no_mask():
    assert limits(logit_bias={0: -np.inf, 1: 2.0}, min_tokens=4) is None


def test_only_allowed_tokens_are_left_and_a_bias_may_forbid_some_of_them():
    assert left(limits(allowed_token_ids=(1, 3, 4), logit_bias={3: -np.inf})) == [1, 4]


def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others():
    own = limits(words=[[1, 2, 3], [4]])
    assert left(own, 1, 2) == [0, 1, 2, 5]
    assert left(own, 2) == left(own) == left(own, 1, 2, 0) == [0, 1, 2, 3, 5]


def test_a_constraint_narrows_what_is_left():
    assert left(limits(allowed_token_ids=(1, 2, 3)), mask=[2, 3, 4]) == [2, 3]


def test_an_answer_that_needs_more_tokens_does_not_end_unless_nothing_else_may_follow():
    own = limits(allowed_token_ids=(1, 2, END), min_tokens=3)
    assert left(own, needs_more=True) == [1, 2]
    assert left(own, mask=[0, END], needs_more=True) == [END]


def test_an_answer_that_nothing_may_follow_can_only_end():
    own = limits(allowed_token_ids=(1, 2))
    assert left(own, mask=[3, 4]) == []
    assert own is not None
    assert np.flatnonzero(own.only_end()).tolist() == [END]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"allowed_token_ids": (1,), "logit_bias": {1: -np.inf}},
            "no token is left by allowed_token_ids and logit_bias",
        ),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -np.inf)}, "no token is left by logit_bias; allow at least one"),
        ({"bad_words": ("a",), "allowed_token_ids": (4,)}, "no token is left by allowed_token_ids and bad_words"),
        ({"allowed_token_ids": (END,), "min_tokens": 1}, "min_tokens=1 forbids the end, and .*lower min_tokens"),
        ({"stop_token_ids": tuple(range(VOCAB)), "min_tokens": 1}, "min_tokens=1 forbids the end"),
    ],
    ids=str,
)
def test_parameters_that_leave_no_first_token_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        limits(words=[[4]] if "bad_words" in given else [], **given)


def test_without_an_end_token_something_must_be_allowed_after_any_answer():
    with pytest.raises(InvalidRequestError, match="every token that is allowed ends one of the bad_words"):
        limits(end=False, allowed_token_ids=(1,), words=[[1, 1]])
    assert left(limits(allowed_token_ids=(1,), words=[[1, 1]]), 1) == []

"""Which tokens parameters leave, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foreword.errors import InvalidRequestError
from foreword.request import SamplingParams, TokenLimits

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

"""Requests: facts by name, and tokens that nobody else can change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from foreword.cache import TokenSequence
from foreword.request import FACTS, NO_REPORT, Request, SamplingParams, TokenLimits
from foreword.request.request import named_record


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

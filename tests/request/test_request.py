"""Requests: facts by name, and tokens that nobody else can change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from foreword.cache import TokenSequence
from foreword.request import FACTS, Request, SamplingParams
from foreword.request.request import named_record


def request_of(params: SamplingParams) -> Request:
    return Request(TokenSequence("r", [1, 2, 3], block_size=2), params, max_tokens=9, seed=-1)


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
    assert (facts["reports"], facts["reports_prompt"], facts["changes_logits"]) == (True, False, False)


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

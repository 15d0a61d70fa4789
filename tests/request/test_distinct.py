"""Distinct tokens of a growing text are those of the whole text."""

from __future__ import annotations

import numpy as np

from foreword.request.request import DistinctTokens


def test_distinct_tokens_of_a_growing_text_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for vocab in (2, 30, 5000):
        text = rng.integers(0, vocab, 400).astype(np.int32)
        distinct, length = DistinctTokens(), 0
        while length < len(text):
            length = min(len(text), length + int(rng.integers(0, 60)))
            assert distinct.of(text[:length]).tolist() == sorted(set(text[:length].tolist()))

"""Drafters for tests: they draft what a test says, right or wrong.

Knows requests; an answer that was computed without drafts is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreword.engine import Engine
from foreword.engine.drafts.drafting import Drafting
from foreword.engine.drafts.sources import Proposal
from foreword.request import Request

Guess = Callable[[Request, int], Sequence[int]]
"""A request, and the most tokens of a draft -> the draft."""


class Told:
    """Drafts what a function says."""

    name = "told"

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.num_left = 0

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        token_ids = np.array(self._guess(request, max_tokens)[:max_tokens], np.int32)
        return Proposal(token_ids, self.name, 2) if len(token_ids) else None

    def leave(self, request: Request) -> None:
        self.num_left += 1

    def forget(self) -> None:
        self.num_left = 0


def draft_as_told(engine: Engine, guess: Guess, draft_tokens: int = 5) -> Drafting:
    """Let an engine draft what a function says, up to `draft_tokens` tokens at a time, whatever it costs."""
    drafting = Drafting([Told(guess)], engine.limits.vocab_size, draft_tokens)
    engine.scheduler.drafting = drafting
    return drafting


def random_guess(rng: np.random.Generator, vocab_size: int) -> Guess:
    """Tokens at random: over a small vocabulary, some of them are right."""
    return lambda request, most: rng.integers(0, vocab_size, int(rng.integers(0, most + 1))).tolist()

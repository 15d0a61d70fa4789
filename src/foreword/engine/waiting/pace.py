"""Pace: the seconds that a request takes from others, estimated from the steps so far.

All tokens of a step share its time equally, so decoding in a large batch takes little from others, and decoding alone
takes all.
"""

from __future__ import annotations

from collections.abc import Callable

from foreword.batch import Entries
from foreword.request import Request

KEPT = 0.9
"""Weight of what is known after each step, and each answer."""


class Mean:
    """A mean in which older values count less."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def note(self, total: float, count: float) -> None:
        """Note `count` values that add up to `total`."""
        self._sum, self._weight = KEPT * self._sum + total, KEPT * self._weight + count

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._sum / self._weight if self._weight else None


class Pace:
    """Seconds of a step's tokens, and the length of answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._began = clock()
        self._prompt_token_s, self._answer_token_s, self._answer_tokens = Mean(), Mean(), Mean()

    def begin_step(self) -> None:
        """A step is planned while no other is computed."""
        self._began = self._clock()

    def note_step(self, entries: Entries) -> None:
        """The step that was planned first was computed."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        num_tokens = int((entries.ends - entries.starts).sum())
        mean = self._prompt_token_s if entries.progress["is_new"].any() else self._answer_token_s
        mean.note(seconds, num_tokens)

    def note_answer(self, num_tokens: int) -> None:
        """An answer has ended after this number of tokens."""
        self._answer_tokens.note(num_tokens, 1)

    def seconds(self, request: Request, num_tokens: int) -> float:
        """Seconds of a request that computes `num_tokens` tokens before its first new one.

        Its answer is expected to be as long as others were, or as long as it may be if none has ended. Infinite before
        the first step that computed prompts.
        """
        prompt_token_s = self._prompt_token_s.value
        if prompt_token_s is None:
            return float("inf")
        left = request.max_tokens - request.num_output_tokens
        answer_token_s = self._answer_token_s.value or prompt_token_s
        return num_tokens * prompt_token_s + min(left, self._answer_tokens.value or left) * answer_token_s

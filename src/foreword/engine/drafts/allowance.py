"""The time that drafts may lose: a share of what steps take, and what they won before."""

from __future__ import annotations

from collections import deque

SHARE = 0.01
"""Of the time of steps: what drafts may lose in the long run, with guessing."""
MOST_S = 0.05
"""Seconds that may be lost at once. With SHARE, at most 2% of any 5 s are lost, and what one step takes too long."""
NEWEST = 7
"""Steps without drafts of one number of rows, of which the fastest counts: others waited for something."""


class Allowance:
    """An account of seconds. Steps without drafts earn a little, steps with drafts what they save, or cost it.

    What a step saves is measured: its tokens would have taken that number of steps without drafts.
    """

    def __init__(self) -> None:
        self.left_s = MOST_S
        self._plain_s: dict[int, deque[float]] = {}
        """Seconds of the newest steps without drafts, by their number of rows."""

    @property
    def is_open(self) -> bool:
        """Whether a step may draft: something is left, and it is known what steps take without drafts."""
        return self.left_s > 0 and bool(self._plain_s)

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds of a step of `num_rows` rows without drafts, by the nearest number that was timed; None: none was."""
        if not self._plain_s:
            return None
        return min(self._plain_s[min(self._plain_s, key=lambda known: abs(known - num_rows))])

    def note_plain(self, num_rows: int, seconds: float, guessing_s: float) -> None:
        """A step without drafts, in which each row gave a token; `guessing_s`: seconds of guessing before it."""
        self._plain_s.setdefault(num_rows, deque(maxlen=NEWEST)).append(seconds)
        self._add(SHARE * seconds - guessing_s, seconds)

    def note_drafted(self, num_requests: int, num_tokens: int, seconds: float, guessing_s: float) -> None:
        """A step with drafts that brought `num_tokens` to its requests."""
        plain_s = self.plain_s(num_requests)
        if plain_s is not None:
            self._add(SHARE * seconds + plain_s * num_tokens / num_requests - seconds - guessing_s, plain_s)

    def _add(self, seconds: float, plain_s: float) -> None:
        """Keep what was won up to the time of one step, so that one wrong draft of a slow model ends nothing.

        One step costs no more than that either: a process that was stopped for seconds says nothing about drafts.
        """
        most = max(MOST_S, plain_s)
        self.left_s = min(most, self.left_s + max(seconds, -most))

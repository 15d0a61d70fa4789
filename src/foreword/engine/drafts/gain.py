"""How many tokens to draft: what is likely to be accepted, against what a longer step costs.

Knows counts and seconds; knows nothing of requests. Everything here only decides how many tokens are drafted, never
which tokens are answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SIZES = np.array([1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256])
"""Numbers of rows whose steps are timed apart."""
FREE_ROWS, COST_OF_MORE = 8, 0.06
"""What is assumed before steps were timed: this many rows cost what one does, each further row this share of it."""
KEPT_TIMES = 7
FORGOTTEN_AFTER = 512
"""Steps after which a time that was not measured again is forgotten, so that it is tried again."""


class StepTimes:
    """The seconds of a step by its number of rows, as measured lately."""

    def __init__(self) -> None:
        self._times: list[deque[float]] = [deque(maxlen=KEPT_TIMES) for _ in SIZES]
        self._noted_at: list[int] = [0] * len(SIZES)
        self._num_steps = 0
        self._curve: Floats | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step was timed."""
        return self._num_steps > 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Note what a step took."""
        self._num_steps += 1
        at = int(SIZES.searchsorted(num_rows))
        if at == len(SIZES) or seconds <= 0.0:
            return
        if self._num_steps - self._noted_at[at] > FORGOTTEN_AFTER:
            self._times[at].clear()
        self._times[at].append(seconds)
        self._noted_at[at] = self._num_steps
        self._curve = None

    def seconds(self, num_rows: npt.NDArray[np.int64]) -> Floats:
        """Seconds of steps with these numbers of rows, in any unit before something was measured; they never fall."""
        if self._curve is None:
            self._curve = self._measured()
        sizes = SIZES.astype(np.float64)
        seconds: Floats = np.interp(num_rows, sizes, self._curve)
        return seconds * np.maximum(1.0, _assumed(num_rows) / _assumed(SIZES[-1:]))

    def _measured(self) -> Floats:
        """Seconds at each of SIZES: medians, and in between and beyond them the assumed shape."""
        known = [
            at
            for at, times in enumerate(self._times)
            if times and self._num_steps - self._noted_at[at] <= FORGOTTEN_AFTER
        ]
        assumed = _assumed(SIZES)
        if not known:
            return assumed
        medians = np.array([sorted(self._times[at])[len(self._times[at]) // 2] for at in known])
        ratios = np.interp(np.log(SIZES), np.log(SIZES[known]), medians / assumed[known])
        curve: Floats = np.maximum.accumulate(assumed * ratios)
        return curve


def _assumed(num_rows: npt.NDArray[np.int64]) -> Floats:
    seconds: Floats = 1.0 + COST_OF_MORE * np.maximum(0, num_rows - FREE_ROWS)
    return seconds


class Acceptance:
    """How likely a drafted token is right if those before it are, by source and length of match."""

    ASSUMED = 0.6
    WEIGHT = 4.0
    """Trials that the assumption, or what is known of other requests, counts as."""
    KEPT = 0.98
    """Weight of older trials at each new one."""
    KEPT_OF_REQUEST = 0.9
    """The same for the trials of one request."""

    def __init__(self) -> None:
        self._trials: dict[tuple[str, int], list[float]] = {}
        """Weight of the trials and of the right ones, by source and class of match."""

    def chance(self, source: str, num_matched: int, own: Sequence[float]) -> float:
        """The chance of each next token; `own`: the weight of the request's trials, and of the right ones."""
        trials, right = self._trials.get((source, _class(num_matched)), (0.0, 0.0))
        general = (right + self.ASSUMED * self.WEIGHT) / (trials + self.WEIGHT)
        return min(0.995, (own[1] + general * self.WEIGHT) / (own[0] + self.WEIGHT))

    def note(self, source: str, num_matched: int, num_right: int, *, one_was_wrong: bool, own: list[float]) -> None:
        """Note a checked guess: `num_right` tokens were right, and then perhaps one was wrong."""
        general = self._trials.setdefault((source, _class(num_matched)), [0.0, 0.0])
        num_trials = num_right + one_was_wrong
        for counts, kept in ((general, self.KEPT), (own, self.KEPT_OF_REQUEST)):
            counts[0] = counts[0] * kept**num_trials + num_trials
            counts[1] = counts[1] * kept**num_trials + num_right


def _class(num_matched: int) -> int:
    """2, 3, 4 to 7, 8 to 15, 16 and more tokens."""
    return min(num_matched, 3) if num_matched < 4 else min(16, 1 << num_matched.bit_length() - 1)


def best_lengths(
    chances: Sequence[float], longest: Sequence[int], num_rows: int, num_samples: int, times: StepTimes, room: int
) -> list[int]:
    """The number of tokens to draft for each request, so that the step gives the most tokens for each second.

    A request's draft is right up to its i-th token with `chances[r] ** i`, and has at most `longest[r]` tokens. All of
    them share the rows that cost little: the likeliest tokens of all requests come first. The step has `num_rows` rows
    and gives `num_samples` tokens without drafts; at most `room` rows are added.
    """
    owners = np.repeat(np.arange(len(longest)), longest)
    if not len(owners) or room <= 0:
        return [0] * len(longest)
    gains = np.concatenate([chance ** np.arange(1, most + 1) for chance, most in zip(chances, longest, strict=True)])
    order = (-gains).argsort(kind="stable")[:room]
    tokens = num_samples + np.append(0.0, gains[order].cumsum())
    rates = tokens / times.seconds(num_rows + np.arange(len(tokens)))
    count = int(rates.argmax())
    lengths: list[int] = np.bincount(owners[order[:count]], minlength=len(longest)).tolist()
    return lengths

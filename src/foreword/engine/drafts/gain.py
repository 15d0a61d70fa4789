"""How many tokens to draft: weighs the chance that drafts are accepted against the cost of a longer step.

Everything here only decides how many tokens are drafted, never which tokens are answered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SHARE = 0.01
"""The share of all steps' time that guessing and wrong drafts may cost in the long run."""
MOST_S = 0.03
"""The seconds that drafting may lose before it stops. Together with SHARE, this limits the loss to 1.6% of any 5 s,
plus the loss of one step."""
NEWEST = 7
"""For each number of rows, the times of this many newest steps without drafts are kept. The shortest time counts,
because longer steps waited for something."""
Floats = npt.NDArray[np.float64]
SIZES = np.array([*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256])
"""Steps of these numbers of rows are timed. Drafts fill a step up to one of these sizes, so that the step's time is
known. Longer steps, such as those that compute prompts, are not timed: drafts may add any number of rows to them."""
FREE_ROWS, COST_OF_MORE = 8, 0.06
"""The assumed cost of rows before steps are timed: FREE_ROWS rows cost as much as one row, and each further row adds
COST_OF_MORE times that cost."""
KEPT_TIMES, TRIES = 7, 3
"""KEPT_TIMES: the number of measured times that are kept for each size. TRIES: a size's times are trusted if there are
at least this many."""
ASSUMED_CHANCE, ASSUMED_TRIALS = 0.7, 4.0
"""ASSUMED_CHANCE: the chance that a guessed token is right, as long as no guess was judged. ASSUMED_TRIALS: a prior
chance weighs as much as this number of trials. The prior of the record of all requests is ASSUMED_CHANCE. The prior of
the record of one request is the chance from the record of all requests."""
LEAST_GAIN = 1.1
"""The least ratio of tokens per second with drafts to those without. A smaller gain may be an error: chances and times
are estimates, and times grow as contexts get longer."""
FORGOTTEN_AFTER = 512
"""If a size gets no new time for this number of steps, its old times are forgotten. Then drafts try the size again."""


class Allowance:
    """An account of the seconds that drafts may lose.

    Each step adds SHARE of its time, and guessing subtracts its time. A step with drafts also adds the time that it
    saved, or subtracts the time that it lost, compared with the steps that its tokens would have taken without drafts.
    """

    def __init__(self) -> None:
        self.left_s = MOST_S
        self._plain_s: dict[int, deque[float]] = {}
        """Seconds of the newest steps without drafts, by their number of rows."""

    @property
    def is_open(self) -> bool:
        """Whether a step may draft: seconds are left, and a step without drafts was timed."""
        return self.left_s > 0 and bool(self._plain_s)

    def plain_s(self, num_rows: int) -> float | None:
        """The seconds of a step without drafts. Of the numbers of rows that were timed, the nearest to `num_rows` is
        taken.

        None if no step without drafts was timed.
        """
        if not self._plain_s:
            return None
        return min(self._plain_s[min(self._plain_s, key=lambda size: abs(size - num_rows))])

    def note_plain(self, num_rows: int, seconds: float, guessing_s: float) -> None:
        """Record a step without drafts, in which each row gave a token. `guessing_s`: the seconds of guessing before
        the step.
        """
        self._plain_s.setdefault(num_rows, deque(maxlen=NEWEST)).append(seconds)
        self._add(SHARE * seconds - guessing_s, seconds)

    def note_drafted(self, num_requests: int, num_tokens: int, seconds: float, guessing_s: float) -> None:
        """Record a step with drafts that gave `num_tokens` tokens. `guessing_s`: the seconds of guessing before the
        step.
        """
        plain_s = self.plain_s(num_requests)
        if plain_s is not None:
            self._add(SHARE * seconds + plain_s * num_tokens / num_requests - seconds - guessing_s, plain_s)

    def note_guessing(self, guessing_s: float) -> None:
        """Record the seconds of guessing before a step that also computed prompts; its drafts' gain is unknown."""
        self._add(-guessing_s, 0.0)

    def _add(self, seconds: float, plain_s: float) -> None:
        """Add seconds, which may be negative. The account holds at most one step's time, or MOST_S if that is more.

        This limit is high enough that one wrong draft of a slow model does not end drafting. One call also subtracts at
        most this limit: if the process was stopped for seconds, drafts are not the cause.
        """
        limit_s = max(MOST_S, plain_s)
        self.left_s = min(limit_s, self.left_s + max(seconds, -limit_s))


class StepTimes:
    """How many seconds a step takes, by its number of rows, from recent measurements."""

    def __init__(self) -> None:
        self._times: list[deque[float]] = [deque(maxlen=KEPT_TIMES) for _ in SIZES]
        self._noted_at: list[int] = [0] * len(SIZES)
        self._num_steps = 0
        self._last_slowness = 1.0
        """The last step's seconds, as a multiple of the assumed cost of its rows."""
        self._curve: Floats | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step was timed."""
        return self._num_steps > 0

    def note(self, num_rows: int, seconds: float) -> None:
        self._num_steps += 1
        self._curve = None  # with each step, a time may become too old
        if seconds <= 0.0:
            return
        self._last_slowness = seconds / float(_assumed(np.array(num_rows)))
        at = int(SIZES.searchsorted(num_rows))
        if at == len(SIZES) or SIZES[at] != num_rows:
            return
        if self._num_steps - self._noted_at[at] > FORGOTTEN_AFTER:
            self._times[at].clear()
        self._times[at].append(seconds)
        self._noted_at[at] = self._num_steps

    def learnt(self) -> dict[str, float]:
        """Size -> its shortest time in seconds, for sizes with at least TRIES times.

        A later process on the same machine can begin with these times.
        """
        sure = (at for at in self._fresh() if len(self._times[at]) >= TRIES)
        return {str(SIZES[at]): min(self._times[at]) for at in sure}

    def begin_with(self, learnt: object) -> None:
        """Begin with the times that an earlier process learnt, as `learnt` returns them; any other value is ignored.

        The times count as if they were measured now: a time that is not measured again is forgotten like any other.
        """
        if not isinstance(learnt, dict):
            return
        for at, size in enumerate(SIZES):
            seconds = learnt.get(str(size))
            if isinstance(seconds, float) and 0.0 < seconds < math.inf:
                self._times[at].extend([seconds] * TRIES)
        self._curve = None

    def seconds(self, num_rows: npt.NDArray[np.int64]) -> Floats:
        """Estimate the seconds that steps with these numbers of rows take; more rows never take less time.

        Until a step is timed, the result is not in seconds: its unit is the time of a step with one row.
        """
        if self._curve is None:
            self._curve = self._measured()
        sizes = SIZES.astype(np.float64)
        seconds: Floats = np.interp(num_rows, sizes, self._curve)
        return seconds * np.maximum(1.0, _assumed(num_rows) / _assumed(SIZES[-1:]))

    def _measured(self) -> Floats:
        """Estimate the seconds of a step for each of SIZES from the shortest of the size's last times.

        Other work on the machine only adds to a time, so the shortest is the nearest to the truth. Slowness is the
        ratio of this time to the assumed cost. If a size has fewer than TRIES times, its slowness is mixed with that of
        the next smaller size that has enough times, so that drafts try the size again. If a size has no times, its
        slowness lies between its neighbours'. If no size has times, all sizes have the slowness of the last step.
        """
        timed = self._fresh()
        assumed = _assumed(SIZES)
        if not timed:
            return assumed * self._last_slowness
        counts = np.array([len(self._times[at]) for at in timed])
        slowness = np.array([min(self._times[at]) for at in timed]) / assumed[timed]
        sure_below = np.maximum.accumulate(np.where(counts >= TRIES, np.arange(len(timed)), 0))
        trust = np.minimum(1.0, counts / TRIES)
        slowness = trust * slowness + (1.0 - trust) * slowness[sure_below]
        ratios = np.interp(np.log(SIZES), np.log(SIZES[timed]), slowness)
        curve: Floats = np.maximum.accumulate(assumed * ratios)
        return curve

    def _fresh(self) -> list[int]:
        """The sizes whose times are not forgotten, as indices into SIZES."""
        return [
            at
            for at, times in enumerate(self._times)
            if times and self._num_steps - self._noted_at[at] <= FORGOTTEN_AFTER
        ]


def _assumed(num_rows: npt.NDArray[np.int64]) -> Floats:
    seconds: Floats = 1.0 + COST_OF_MORE * np.maximum(0, num_rows - FREE_ROWS)
    return seconds


@dataclass(slots=True)
class Trials:
    """Weighted counts: of the guessed tokens that were compared with the model's tokens, and of those that were right.
    Older tokens count less.
    """

    weight: float = 0.0
    right: float = 0.0

    def note(self, num_trials: int, num_right: int, decay: float) -> None:
        """Record some trials. Each of them multiplies the weight of all earlier trials by `decay`."""
        self.weight = self.weight * decay**num_trials + num_trials
        self.right = self.right * decay**num_trials + num_right

    def mixed_with(self, chance: float) -> float:
        """The share of right tokens, mixed with a prior chance that weighs `ASSUMED_TRIALS` trials."""
        return (self.right + chance * ASSUMED_TRIALS) / (self.weight + ASSUMED_TRIALS)


@dataclass(slots=True)
class Record:
    """Trials of guesses: of first tokens, and of later tokens, which count only if all tokens before were right."""

    first: Trials = field(default_factory=Trials)
    later: Trials = field(default_factory=Trials)

    def note(self, num_right: int, *, one_was_wrong: bool, decay: float) -> None:
        """Record a guess whose first `num_right` tokens were right; the next token was wrong if `one_was_wrong`."""
        if num_right or one_was_wrong:
            self.first.note(1, min(num_right, 1), decay)
        if num_right:
            self.later.note(num_right - 1 + one_was_wrong, num_right - 1, decay)


class Acceptance:
    """The chances that guessed tokens are right, by source and length of match.

    If the first token of a guess is right, the later tokens mostly are, too. So first tokens and later tokens have
    separate chances.
    """

    KEPT, KEPT_OF_REQUEST = 0.98, 0.9
    """At each new trial, the weight of each earlier trial is multiplied by KEPT in the record of all requests, and by
    KEPT_OF_REQUEST in the record of one request."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], Record] = {}
        """(Source, class of the match's length) -> record of all requests."""

    def chances(self, source: str, num_matched: int, record: Record) -> tuple[float, float]:
        """The chance that the first token of a guess is right, and that a later token is right if all before it are.

        `record`: the trials of this request alone.
        """
        general = self._records.get((source, _class(num_matched)), _NOTHING_KNOWN)
        first = record.first.mixed_with(general.first.mixed_with(ASSUMED_CHANCE))
        later = record.later.mixed_with(general.later.mixed_with(ASSUMED_CHANCE))
        return first, min(0.995, later)

    def note(self, source: str, num_matched: int, num_right: int, *, one_was_wrong: bool, record: Record) -> None:
        general = self._records.setdefault((source, _class(num_matched)), Record())
        general.note(num_right, one_was_wrong=one_was_wrong, decay=self.KEPT)
        record.note(num_right, one_was_wrong=one_was_wrong, decay=self.KEPT_OF_REQUEST)


_NOTHING_KNOWN = Record()


def _class(num_matched: int) -> int:
    """The class of a length of match, named by its least length: 2, 3, 4 to 7, 8 to 15, or 16 and more tokens."""
    return min(num_matched, 3) if num_matched < 4 else min(16, 1 << num_matched.bit_length() - 1)


def best_count(rates: Floats) -> int:
    """The index of the highest rate if it is more than LEAST_GAIN times the first rate; otherwise 0."""
    at = int(rates.argmax())
    return at if rates[at] > LEAST_GAIN * rates[0] else 0


def best_lengths(
    chances: Sequence[tuple[float, float]],
    longest: Sequence[int],
    num_rows: int,
    num_samples: int,
    times: StepTimes,
    room: int,
) -> list[int]:
    """The number of tokens to draft for each request, so that the step gives the most tokens per second.

    Request r's draft has at most `longest[r]` tokens. `chances[r]` are the probabilities that its first token is
    right, and that a later token is right if all tokens before it are. The requests share the added rows: the likeliest
    tokens of all requests come first. Without drafts, the step has `num_rows` rows and gives `num_samples` tokens; at
    most `room` rows are added.
    """
    owners = np.repeat(np.arange(len(longest)), longest)
    if not len(owners) or room <= 0:
        return [0] * len(longest)
    gains = np.concatenate(
        [first * later ** np.arange(limit) for (first, later), limit in zip(chances, longest, strict=True)]
    )
    order = (-gains).argsort(kind="stable")[:room]
    tokens = num_samples + np.append(0.0, gains[order].cumsum())
    sizes = num_rows + np.arange(len(tokens))
    rates = tokens / times.seconds(sizes)
    may_end = np.isin(sizes, SIZES) | (sizes > SIZES[-1])
    may_end[[0, -1]] = True
    count = best_count(np.where(may_end, rates, 0.0))
    lengths: list[int] = np.bincount(owners[order[:count]], minlength=len(longest)).tolist()
    return lengths

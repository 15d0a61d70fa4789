"""Drafting: guesses the next tokens of requests, and chooses the guesses that the next step checks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from foreword.batch import Entries, Int64Array, IntArray
from foreword.cache import KVCacheManager, MambaSpec
from foreword.config import DraftTokens
from foreword.engine.drafts.gain import Acceptance, Allowance, Record, StepTimes, best_count, best_lengths
from foreword.engine.drafts.sources import CachedPaths, Drafter, OwnText, Predicted, Proposal, RecentAnswers
from foreword.request import DraftCounts, Request

MOST_DRAFTED = 31
"""The most tokens to draft for one request in a step."""
PAUSE_EVERY = 16
"""If a step is planned before the last tokens are known, it has no drafts. After this number of such steps, a step
waits for the tokens."""
SHARE_OF_RIGHT, SHARE_OF_WRONG = 0.1, 0.01
"""The most time for guesses, as a share of a step's time. SHARE_OF_RIGHT: for requests whose last guess was right.
SHARE_OF_WRONG: for the others."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _History:
    """The guesses about a running request, and the results of earlier guesses."""

    records: dict[str, Record] = field(default_factory=dict)
    guesses: list[tuple[Proposal, int]] = field(default_factory=list)
    """Proposals that were not judged yet, each with the length of the text that it continues."""
    was_right: bool = True
    """Whether one of the last judged guesses was right; True before the first guess was judged."""

    def of(self, source: str) -> Record:
        return self.records.setdefault(source, Record())


_Judged = tuple[Proposal, tuple[float, float]]
"""A proposal, and the chances that its first token is right, and that a later token is right."""


@dataclass(slots=True)
class _Turns:
    """Chooses in turn the requests for which tokens are guessed, as many as a share of a step's time allows."""

    share: float
    credit: float = 0.0
    at: int = 0

    def turns(self, count: int, num_in_step: float) -> Int64Array:
        """Choose some of `count` requests; returns the indices. A step takes as long as `num_in_step` guesses."""
        self.credit = min(float(count), self.credit + self.share * num_in_step)
        num_asked = int(self.credit)
        self.credit -= num_asked
        chosen: Int64Array = (self.at + np.arange(num_asked)) % max(1, count)
        self.at += num_asked
        return chosen


class Drafting:
    """Asks drafters for guesses, and drafts as many of the guessed tokens as save time.

    Every guess is compared with the tokens that the model gave, even if the guess was not drafted. So a source whose
    guesses are not drafted is judged, too.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, draft_tokens: DraftTokens = "auto") -> None:
        """`draft_tokens`: the most tokens to draft for a request, whatever they cost; "auto": as many as save time."""
        self._drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._fixed = None if draft_tokens == "auto" else int(draft_tokens)
        self._acceptance, self.times = Acceptance(), StepTimes()
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._allowance = Allowance()
        self._seconds_of_guess = self._guessing_s = 0.0
        """_seconds_of_guess: the seconds per guess, a moving average. _guessing_s: the seconds that planning the next
        step's drafts has taken so far."""
        self._num_accepted = 0
        """The number of accepted drafts in the step that is being recorded."""
        self._for_lucky, self._for_others = _Turns(SHARE_OF_RIGHT), _Turns(SHARE_OF_WRONG)
        self._num_ahead = 0
        """The number of steps that were planned ahead since a step waited for the tokens of the step before."""
        self._drafted_from: dict[Request, str] = {}
        """Request -> the source of its draft in the planned step."""
        self.counts = DraftCounts()
        """Accepted and rejected drafts of all requests since the start."""

    def plan(self, requests: Sequence[Request], num_rows: int, room: int) -> dict[int, IntArray]:
        """Choose the drafts for the next step: row of a request -> token ids.

        `requests` decode one token each. Without drafts the step computes `num_rows` tokens; at most `room` tokens can
        be added.
        """
        self._drafted_from.clear()
        started = time.perf_counter()
        drafts = self._plan(requests, num_rows, room) if self._may_pay(len(requests), num_rows, room) else {}
        self._guessing_s += time.perf_counter() - started
        return drafts

    def _plan(self, requests: Sequence[Request], num_rows: int, room: int) -> dict[int, IntArray]:
        guesses = self._guesses(requests, num_rows)
        longest = [0 if guess is None else len(guess[0].token_ids) for guess in guesses]
        if self._fixed is not None:
            lengths = self._fixed_lengths(longest, room)
        else:
            chances = [(0.0, 0.0) if guess is None else guess[1] for guess in guesses]
            lengths = best_lengths(chances, longest, num_rows, len(requests), self.times, room)
        drafts = {}
        for request, guess, length in zip(requests, guesses, lengths, strict=True):
            if guess is not None and length:
                token_ids = guess[0].token_ids[:length]
                length = request.cut_drafts(token_ids.tolist(), self._vocab_size)
                if length:
                    drafts[request.row] = token_ids[:length]
                    self._drafted_from[request] = guess[0].source
        return drafts

    def wants_pause(self, requests: Sequence[Request]) -> bool:
        """Whether the next step should wait until the present step's tokens are known, so that it can draft.

        `requests` are those of the present step. A step that is planned ahead drafts nothing, but the device does not
        wait for it. So the next step waits for the tokens if a request's last guess was right, or else once in
        PAUSE_EVERY steps.
        """
        if self._fixed is not None:
            return True
        self._num_ahead += 1
        if not self._allowance.is_open:
            return False
        histories = (self._histories.get(request) for request in requests)
        is_lucky = any(history is not None and history.was_right and history.guesses for history in histories)
        if not is_lucky and self._num_ahead < PAUSE_EVERY:
            return False
        self._num_ahead = 0
        return self._may_pay(len(requests), len(requests), MOST_DRAFTED)

    def _may_pay(self, num_requests: int, num_rows: int, room: int) -> bool:
        """Whether drafts would save time if all drafted tokens were right."""
        if room <= 0 or self._fixed is not None:
            return room > 0
        if not self._allowance.is_open:
            return False
        more = np.arange(1 + min(room, num_requests * MOST_DRAFTED))
        rates = (num_requests + more) / self.times.seconds(num_rows + more)
        return best_count(rates) > 0

    def _fixed_lengths(self, longest: Sequence[int], room: int) -> list[int]:
        assert self._fixed is not None
        lengths = []
        for limit in longest:
            lengths.append(min(limit, self._fixed, room))
            room -= lengths[-1]
        return lengths

    def _guesses(self, requests: Sequence[Request], num_rows: int) -> list[_Judged | None]:
        """Guess for some of the requests, as many as SHARE_OF_RIGHT and SHARE_OF_WRONG of a step's time allow; None for
        the others.
        """
        lucky = np.array([self._histories.setdefault(request, _History()).was_right for request in requests])
        is_asked = np.zeros(len(requests), np.bool_)
        for mask, pool in ((lucky, self._for_lucky), (~lucky, self._for_others)):
            places = np.flatnonzero(mask)
            is_asked[places[pool.turns(len(places), self._guesses_in_step(num_rows))]] = True
        started = time.perf_counter()
        guesses = [self._guess(request) if ask else None for request, ask in zip(requests, is_asked, strict=True)]
        if is_asked.any():
            seconds = (time.perf_counter() - started) / int(is_asked.sum())
            self._seconds_of_guess += (seconds - self._seconds_of_guess) / 16
        return guesses

    def _guesses_in_step(self, num_rows: int) -> float:
        """The number of guesses that take as long as a step of `num_rows` rows."""
        if self._fixed is not None or not self._seconds_of_guess or not self.times.is_known:
            return math.inf
        return float(self.times.seconds(np.array([num_rows]))[0]) / self._seconds_of_guess

    def _guess(self, request: Request) -> _Judged | None:
        """Ask all drafters, and return the proposal whose expected number of right tokens is the highest."""
        history = self._histories[request]
        self._judge(request, history)
        max_tokens = min(MOST_DRAFTED, request.max_tokens - request.num_output_tokens - 1)
        if max_tokens <= 0:
            return None
        best: _Judged | None = None
        most_likely = 0.0
        for drafter in self._drafters:
            proposal = drafter.propose(request, max_tokens)
            if proposal is None:
                continue
            history.guesses.append((proposal, len(request)))
            first, later = self._acceptance.chances(proposal.source, proposal.num_matched, history.of(proposal.source))
            likely = first * (1.0 - later ** len(proposal.token_ids)) / (1.0 - later)
            if likely > most_likely:
                best, most_likely = (proposal, (first, later)), likely
        return best

    def _judge(self, request: Request, history: _History) -> None:
        """Compare the last guesses with the tokens that the model gave."""
        history.was_right = False
        for proposal, length in history.guesses:
            actual = request.sequence.token_ids[length:]
            guessed = proposal.token_ids[: len(actual)]
            wrong = np.flatnonzero(guessed != actual[: len(guessed)])
            num_right = int(wrong[0]) if len(wrong) else len(guessed)
            self._acceptance.note(
                proposal.source,
                proposal.num_matched,
                num_right,
                one_was_wrong=len(wrong) > 0,
                record=history.of(proposal.source),
            )
            history.was_right |= num_right > 0
        history.guesses.clear()

    def note_checked(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record that a step checked a request's draft, and that `num_accepted` drafted tokens are in the answer."""
        source = self._drafted_from.pop(request)
        self._num_accepted += num_accepted
        for counts in (self.counts, request.drafts):
            counts.count(source, num_accepted, num_drafted - num_accepted)

    def note_step(self, entries: Entries, seconds: float | None) -> None:
        """Record a computed step and its time; `seconds`: None if the time is unknown."""
        if seconds is not None:
            num_rows, num_requests = int((entries.ends - entries.starts).sum()), len(entries)
            self.times.note(num_rows, seconds)
            num_drafts = sum(map(len, entries.drafts.values()))
            if num_drafts and num_rows - num_drafts == num_requests:  # otherwise the step computes prompts, too
                num_tokens = num_requests + self._num_accepted
                self._allowance.note_drafted(num_requests, num_tokens, seconds, self._guessing_s)
            elif num_rows == num_requests:
                self._allowance.note_plain(num_rows, seconds, self._guessing_s)
            else:
                self._allowance.note_guessing(self._guessing_s)
        self._guessing_s, self._num_accepted = 0.0, 0

    def forget(self) -> None:
        """Forget the texts that ended requests left behind, but keep the measured speeds."""
        for drafter in self._drafters:
            drafter.forget()

    def leave(self, request: Request) -> None:
        self._histories.pop(request, None)
        for drafter in self._drafters:
            drafter.leave(request)


def choose_drafting(
    draft_tokens: DraftTokens, manager: KVCacheManager, vocab_size: int, *, launches: bool, inexactness: str | None
) -> Drafting | None:
    """Make an engine's drafting. Returns None if `draft_tokens` is 0, or if tokens cannot be drafted, which is logged.

    `launches`: whether the runner computes while the host goes on. `inexactness`: why results are not bit-exact on this
    machine, where drafts would change answers; None if results are exact.
    """
    if draft_tokens == 0:
        return None
    reason = None
    if any(isinstance(group, MambaSpec) for group in manager.groups):
        reason = "its recurrent layers cannot go back behind a wrong token"
    elif launches and draft_tokens == "auto":
        reason = "on a GPU, steps with drafts were never timed; draft_tokens=N drafts there"
    elif inexactness is not None and draft_tokens == "auto":
        reason = f"results are not bit-exact here ({inexactness}); draft_tokens=N drafts all the same"
    if reason is not None:
        logger.info("no tokens are drafted with this model: %s", reason)
        return None
    drafters: list[Drafter] = [Predicted(), OwnText(), RecentAnswers()]
    if manager.enable_prefix_caching:
        drafters.append(CachedPaths(manager))
    return Drafting(drafters, vocab_size, draft_tokens)

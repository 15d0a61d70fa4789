"""The asking thread: which blocks the store has, and whether a server that was left alone answers again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from foreword.errors import ConfigError
from foreword.tiers.job_thread import JobThread
from foreword.tiers.store.client import Link, ServerGoneError, ServerRefusedError
from foreword.tiers.store.state import StoreState
from foreword.tiers.store.value import server_key
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BoolArray, DoneCallback

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Blocks in one EXISTS, which counts them: most often all or none are there."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which of these blocks are there? The ticket's block `at[i]` is `names[i]`; nobody may wait for it."""

    names: list[bytes]
    ticket: Ticket
    at: list[int]


class StoreAsker:
    """Questions in the order in which they came. `greet` is the first, by the thread that makes the tier."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self.thread: JobThread[Question] = JobThread(
            "foreword-store-ask", self._ask, state.options.max_asked, self._try_again
        )
        self._asked: set[bytes] = set()
        """Blocks that were asked for without a ticket and have no answer yet."""

    def probe(self, names: list[bytes], deadline_s: float, on_done: DoneCallback | None) -> Ticket:
        """PRESENT or MISSING for each block, from memory where the answer is known."""
        ticket = Ticket(len(names), deadline_s=deadline_s, on_done=on_done)
        if not self._state.closing.is_set() and self._state.breaker.is_closed:
            present, unknown = self._state.view.look(names)
            ticket.settle(np.flatnonzero(present), Outcome.PRESENT)
            ticket.settle(np.flatnonzero(~present & ~unknown), Outcome.MISSING)
            at = np.flatnonzero(unknown).tolist()
            if at:
                self.thread.add(Question([names[index] for index in at], ticket, at), len(at))
                return ticket
        ticket.finish(Outcome.CANCELLED if self._state.closing.is_set() else Outcome.IO_ERROR)
        return ticket

    def ask(self, names: list[bytes]) -> None:
        """Ask for blocks whose answers `StoreView` will have; no more of them than may wait."""
        names = [name for name in names if name not in self._asked]
        if names and self.thread.amount + len(names) <= self._state.options.max_asked:
            self._asked.update(names)
            ticket = Ticket(0, before_done=lambda _: self._asked.difference_update(names))
            self.thread.add(Question(names, ticket, []), len(names))

    def greet(self) -> None:
        """See at the start whether the server answers. Raises ConfigError if it refuses us."""
        state = self._state
        url = state.server.shown_url
        try:
            with state.session(self.link) as link:
                exist(link, [bytes(50)])
                state.read_memory(link)
        except ServerRefusedError as error:
            raise ConfigError(
                f"the store {url!r} refuses: {error}; check user, password and database, "
                "and give the user the rights `+exists +getrange +set +del +ping +info ~fw1:*`"
            ) from error
        except ServerGoneError as error:
            state.breaker.trip()
            logger.warning("the store %s does not answer: %s; blocks are computed until it does", url, error)

    def _ask(self, question: Question) -> None:
        state, names = self._state, question.names
        try:
            if not state.breaker.is_closed:
                return
            with state.session(self.link) as link:
                here = exist(link, names)
                state.read_memory(link)
            state.view.note_answers(names, here, state.options.present_s, state.options.absent_s)
            at = np.array(question.at, np.int64)
            for outcome, chosen in ((Outcome.PRESENT, here), (Outcome.MISSING, ~here)):
                question.ticket.settle(at[chosen[: len(at)]], outcome)
        except ServerGoneError:
            pass
        finally:
            question.ticket.finish(Outcome.IO_ERROR)

    def _try_again(self) -> float | None:
        """Without questions: if the breaker is open and its pause is over, try; returns when to come back."""
        state = self._state
        if state.breaker.is_closed:
            return None
        if state.breaker.may_try():
            try:
                with state.session(self.link) as link:
                    link.send([("PING",)])
                    link.reply()
            except ServerGoneError as error:
                logger.debug("the store %s still does not answer: %s", state.server.shown_url, error)
        return None if state.breaker.is_closed else state.breaker.seconds_to_try


def exist(link: Link, names: list[bytes]) -> BoolArray:
    """Which blocks the server has, [blocks]. Raises ServerGoneError."""
    here = np.zeros(len(names), bool)
    keys = [server_key(name) for name in names]
    batches = [slice(begin, begin + AT_ONCE) for begin in range(0, len(keys), AT_ONCE)]
    link.send([("EXISTS", *keys[batch]) for batch in batches])
    counts = [link.number() for _ in batches]
    mixed: list[int] = []
    for batch, count in zip(batches, counts, strict=True):
        here[batch] = count == len(keys[batch])
        if 0 < count < len(keys[batch]):
            mixed += range(batch.start, batch.start + len(keys[batch]))
    link.send([("EXISTS", keys[index]) for index in mixed])
    for index in mixed:
        here[index] = link.number() == 1
    return here

"""The state that the store tier's threads share: options, server, counts, a view of the blocks, and breakers.

Other processes write, and the server evicts, so an answer in the view counts only for some seconds. A circuit breaker
opens after some failures in a row. Then the server is left alone for a pause, which doubles with each try that fails.
The idea is Nygard's, from "Release It!".
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.store.client import Link, ServerGoneError, StoreServer
from foreword.tiers.store.value import ValueFormat
from foreword.tiers.tier import BoolArray, TierCounts

REFUSED = float("-inf")
logger = logging.getLogger(__name__)
INFO_EVERY_S = 10.0
MOST_DIGITS = 18
"""The most digits of a number in an answer to INFO; longer numbers are ignored."""
INFO_BYTES = 64 << 10
"""The most bytes to read of an answer to INFO; Valkey 9 sends 2,000."""


class CircuitBreaker:
    """Closed: use the server. Open: leave it alone. Half open: one caller is trying. Any thread may call any method."""

    def __init__(
        self,
        max_failures: int,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self.state = "closed"
        """`closed`, `open` or `half-open`."""
        self._failures = 0
        self._pause_s = first_pause_s
        self._try_at = 0.0
        self.num_trips = 0
        """The number of times that the breaker went from closed to open."""

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    @property
    def seconds_to_try(self) -> float:
        """Seconds until `may_try` allows the next try; 0 if it allows a try now."""
        return max(0.0, self._try_at - self._monotonic())

    def may_try(self) -> bool:
        """Whether the caller may use the server. If the breaker is not closed, one caller may after each pause."""
        with self._lock:
            if self.state == "closed":
                return True
            if self._monotonic() < self._try_at:
                return False
            self.state = "half-open"
            # If the caller never reports how its try ended, another caller may try after the pause.
            self._try_at = self._monotonic() + self._pause_s
            return True

    def succeeded(self) -> bool:
        """Close the breaker. True if it was open or half-open before."""
        with self._lock:
            was_closed = self.state == "closed"
            self.state, self._failures, self._pause_s = "closed", 0, self._first_pause_s
            return not was_closed

    def failed(self) -> bool:
        """Count a failure. True if this failure opens the closed breaker."""
        with self._lock:
            if self.state == "half-open":
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
                self._open()
            elif self.state == "closed":
                self._failures += 1
                if self._failures >= self._max_failures:
                    self.num_trips += 1
                    self._open()
                    return True
            return False

    def trip(self) -> None:
        with self._lock:
            self.num_trips += self.state == "closed"
            self._open()

    def _open(self) -> None:
        self.state = "open"
        self._try_at = self._monotonic() + self._pause_s


class StoreView:
    """The server's answers by block name. The oldest are dropped if there are too many. Any thread may call methods."""

    def __init__(self, max_blocks: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks = max_blocks
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}
        """Block name -> the time until which it counts as present, or minus the time until which it counts as absent.
        The oldest answer comes first."""

    def __len__(self) -> int:
        """The number of blocks that are present."""
        with self._lock:
            return int(np.count_nonzero(np.fromiter(self._until.values(), float) > self._monotonic()))

    def look(self, names: Sequence[bytes]) -> tuple[BoolArray, BoolArray]:
        """Which blocks are present, and which blocks are unknown, [blocks] each."""
        until, now = self._moments(names), self._monotonic()
        return until > now, (until <= now) & (until >= -now)

    def is_refused(self, names: Sequence[bytes]) -> BoolArray:
        """Which blocks must not be found until we store them again, [blocks]."""
        refused: BoolArray = self._moments(names) == REFUSED
        return refused

    def note_stored(self, names: Iterable[bytes], seconds: float) -> None:
        """Record that we have stored these blocks. Refused blocks can then be found again."""
        self._note(names, self._monotonic() + seconds, keep_refused=False)

    def note_present(self, names: Iterable[bytes], seconds: float) -> None:
        """Record that the server has these blocks. Refused blocks stay refused."""
        self._note(names, self._monotonic() + seconds, keep_refused=True)

    def note_absent(self, names: Iterable[bytes], seconds: float) -> None:
        """Record for `seconds` that the server does not have these blocks, or could not give them."""
        self._note(names, -self._monotonic() - seconds, keep_refused=True)

    def note_answers(self, names: Sequence[bytes], here: BoolArray, present_s: float, absent_s: float) -> None:
        """Record which of these blocks the server has, except those that became known while the server answered."""
        _, unknown = self.look(names)
        self.note_present([names[at] for at in np.flatnonzero(unknown & here).tolist()], present_s)
        self.note_absent([names[at] for at in np.flatnonzero(unknown & ~here).tolist()], absent_s)

    def refuse(self, names: Iterable[bytes]) -> None:
        """Let no lookup find these blocks until we have stored them again, whatever the server has."""
        self._note(names, REFUSED, keep_refused=True)

    def _moments(self, names: Sequence[bytes]) -> npt.NDArray[np.float64]:
        with self._lock:
            return np.fromiter((self._until.get(name, 0.0) for name in names), float, len(names))

    def _note(self, names: Iterable[bytes], until: float, *, keep_refused: bool) -> None:
        with self._lock:
            for name in names:
                if self._until.pop(name, 0.0) == REFUSED and keep_refused:
                    self._until[name] = REFUSED
                else:
                    self._until[name] = until
            while len(self._until) > self._max_blocks:
                del self._until[next(iter(self._until))]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store tier. The defaults suit most uses."""

    ttl_s: float = 86_400.0
    """Seconds after which the server forgets a block, unless `BlockRun.ttl_s` is given."""
    mac_key_file: Path | None = None
    """File with a secret of 32 bytes that signs values, for stores that others can write to: values without a right MAC
    are deleted. None: values are only checked for damage."""
    io_timeout_s: float = 0.5
    """The longest wait, in seconds, for the next bytes from the server, or for a connection."""
    session_s: float = 2.0
    """The longest time, in seconds, of a session that neither loads nor stores, such as the first login."""
    store_session_s: float = 30.0
    """The longest time, in seconds, to write one run."""
    max_failures: int = 3
    """Failures in a row after which the server is left alone."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    """The longest pause, in seconds, in which the server is left alone; each try that fails doubles the pause."""
    present_s: float = 30.0
    """The seconds for which a block counts as present after the server had it."""
    absent_s: float = 5.0
    """The seconds for which a block counts as absent after the server did not have it, or could not give it."""
    max_known: int = 1 << 18
    """The most blocks in the `StoreView`, which takes some 200 bytes for each block."""
    max_asked: int = 1 << 16
    """The most blocks that may wait until the server is asked for them."""
    max_queued_load_bytes: int = 1 << 30
    max_queued_store_bytes: int = 256 << 20
    """The most payload bytes of waiting jobs: one limit for loads, one for stores. Beyond it, new jobs are dropped."""
    window_bytes: int = 4 << 20
    """The payload bytes to send or ask for before replies are awaited."""

    def check(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "mac_key_file" and not value > 0:
                raise ConfigError(f"{name}={value} is not positive; give a larger number, or leave it out")


@dataclass(slots=True)
class StoreState(TierCounts):
    """Parts that questions, loads and stores of one store tier share."""

    options: StoreOptions
    server: StoreServer
    format: ValueFormat
    view: StoreView
    breaker: CircuitBreaker
    """The breaker of the server."""
    room: CircuitBreaker
    """The breaker of stores: open while the server refuses to write."""
    on_trip: Callable[[], None] = lambda: None
    """Called when `breaker` opens."""
    closing: threading.Event = field(default_factory=threading.Event)
    next_info: float = 0.0
    is_outage_told: bool = False
    """Whether a line of the log says that the server does not answer now."""
    left_alone: RareWarning = field(
        default_factory=lambda: RareWarning(logger, "the store %s is left alone for a while: %s")
    )
    refused: RareWarning = field(
        default_factory=lambda: RareWarning(logger, "the store %s takes no blocks for now: %s")
    )

    @contextlib.contextmanager
    def session(self, link: Link, *, longest_s: float | None = None, deadline: float | None = None) -> Iterator[Link]:
        """Open a link's session of at most `longest_s` (None: `session_s`), and report its result to the breaker.

        `deadline`: if given, the session ends at this time instead, because then its caller no longer waits. Raises
        ServerGoneError.
        """
        last = time.monotonic() + (self.options.session_s if longest_s is None else longest_s)
        try:
            with link.session(last if deadline is None else deadline):
                yield link
        except ServerGoneError as error:
            # If a part of a load came before the deadline, the server is only slow, so the breaker counts no failure.
            is_slow = deadline is not None and error.is_deadline and link.num_replies
            has_tripped = not is_slow and self.breaker.failed()
            # An outage soon after another one is told by a later try that fails, since the warning is rare.
            if not (self.breaker.is_closed or self.is_outage_told):
                self.is_outage_told = self.left_alone.note(self.server.shown_url, error)
            if has_tripped:
                self.on_trip()
            raise
        if link.num_replies and self.breaker.succeeded():
            self.is_outage_told = False
            logger.info("the store %s answers again", self.server.shown_url)

    def read_memory(self, link: Link) -> None:
        """Ask for the server's used memory and limit, at most every 10 s. If INFO is refused, no number changes."""
        if time.monotonic() < self.next_info:
            return
        self.next_info = time.monotonic() + INFO_EVERY_S
        link.send([("INFO", "memory")])
        reply = link.reply(INFO_BYTES)
        if isinstance(reply, memoryview):
            pairs = (line.split(b":", 1) for line in bytes(reply).splitlines() if b":" in line)
            numbers = {name: int(value) for name, value in pairs if value.isdigit() and len(value) <= MOST_DIGITS}
            limit = numbers.get(b"maxmemory", 0) or numbers.get(b"total_system_memory", 0)
            with self.stats_lock:
                self.stats.shared_bytes, self.stats.budget_bytes = numbers.get(b"used_memory", 0), limit

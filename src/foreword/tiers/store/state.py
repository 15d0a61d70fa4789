"""What the store tier's threads share: options, server, view, breakers and counts.

Knows which parts there are, and what a success or a failure means for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from foreword.errors import ConfigError
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.store.circuit_breaker import CircuitBreaker
from foreword.tiers.store.client import Link, Refusal, ServerGoneError, StoreServer
from foreword.tiers.store.value import ValueFormat
from foreword.tiers.store.view import StoreView
from foreword.tiers.tier_counts import TierCounts

logger = logging.getLogger(__name__)

INFO_EVERY_S = 10.0
MOST_DIGITS = 18
"""Of a number that is believed."""
INFO_BYTES = 64 << 10
"""Of the longest answer to INFO that is read; Valkey 9 sends 2,000."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store tier behaves. The defaults need no thought."""

    ttl_s: float = 86_400.0
    """Seconds after which the server forgets a block, unless its run says otherwise."""
    mac_key_file: Path | None = None
    """File with a secret of 32 bytes that signs values, for stores that others can write to: values without a right MAC
    are deleted. None: values are only checked for damage."""
    io_timeout_s: float = 0.5
    """The longest wait for the server to go on, within a job's deadline; also for connecting."""
    session_s: float = 2.0
    """The longest time for what is no load or store, login and greeting at the start included."""
    store_session_s: float = 30.0
    """The longest time to write one run."""
    max_failures: int = 3
    """Failures in a row after which the server is left alone."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    """For how long it is left alone; each try that fails doubles the pause."""
    present_s: float = 30.0
    """For how long a block counts as present after the server had it."""
    absent_s: float = 5.0
    """For how long a block counts as absent after the server did not have it, or could not give it."""
    max_known: int = 1 << 18
    """Blocks of which it is known whether they are there; some 200 bytes each."""
    max_asked: int = 1 << 16
    """Blocks that wait to be asked for."""
    max_queued_load_bytes: int = 1 << 30
    max_queued_store_bytes: int = 256 << 20
    """Payload bytes that wait; beyond them jobs are dropped."""
    window_bytes: int = 4 << 20
    """Payload bytes in flight before replies are awaited."""

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
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
    """Of the server."""
    room: CircuitBreaker
    """Of stores: open while the server refuses to write."""
    on_trip: Callable[[], None] = lambda: None
    """Called when `breaker` opens."""
    closing: threading.Event = field(default_factory=threading.Event)
    next_info: float = 0.0
    left_alone: RareWarning = field(
        default_factory=lambda: RareWarning(logger, "the store %s is left alone for a while: %s")
    )
    refused: RareWarning = field(
        default_factory=lambda: RareWarning(logger, "the store %s takes no blocks for now: %s")
    )

    @contextlib.contextmanager
    def session(self, link: Link, *, longest_s: float | None = None, deadline: float | None = None) -> Iterator[Link]:
        """A link's session of at most `longest_s` (None: `session_s`), whose end the breaker notes.

        `deadline`: the moment when it ends instead, because its caller wants no more. Raises ServerGoneError.
        """
        last = time.monotonic() + (self.options.session_s if longest_s is None else longest_s)
        try:
            with link.session(last if deadline is None else deadline):
                yield link
        except ServerGoneError as error:
            # A load that came in part until its deadline is a slow one: no reason to leave the server alone.
            is_slow = deadline is not None and error.is_deadline and link.num_replies
            if not is_slow and self.breaker.failed():
                self.left_alone.note(self.server.shown_url, error)
                self.on_trip()
            raise
        if link.num_replies and self.breaker.succeeded():
            logger.info("the store %s answers again", self.server.shown_url)

    def note_refused_store(self, refusal: Refusal) -> None:
        """The server does not write; stores rest for a while."""
        if self.room.failed():
            self.refused.note(self.server.shown_url, refusal)

    def read_memory(self, link: Link) -> None:
        """Learn the server's memory and its limit, every 10 s at the most; without the right to, nothing."""
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

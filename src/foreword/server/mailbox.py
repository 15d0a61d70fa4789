"""What the engine's thread has to tell the event loop, handed over one piece at a time.

Knows streams and their events. While the loop still tells what it was given, the next piece grows: under load it writes
fewer and larger pieces, instead of taking the interpreter from the engine for one token at a time. A reader that
sleeps holds nothing up: a piece is told when every reader has been woken.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping

from foreword.server.answer_stream import AnswerStream, Event

logger = logging.getLogger(__name__)


class Mailbox:
    """Filled by the engine's thread, emptied by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._held: dict[AnswerStream, list[Event]] = {}
        self._is_being_told = False

    def post(self, events: Mapping[AnswerStream, list[Event]]) -> None:
        """Tell these, behind what was posted before. For the engine's thread."""
        with self._lock:
            for stream, more in events.items():
                self._held.setdefault(stream, []).extend(more)
            if self._is_being_told:
                return
            self._is_being_told = True
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            logger.debug("the event loop has ended before the engine")

    def _tell(self) -> None:
        """On the event loop, until nothing is held."""
        with self._lock:
            events, self._held = self._held, {}
            self._is_being_told = bool(events)
        if events:
            for stream, own in events.items():
                stream.put(own)
            self._loop.call_soon(self._tell)  # behind all readers that were woken just now

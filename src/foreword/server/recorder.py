"""Recorder: what clients asked for, as a trace that `foreword replay` reads.

Knows finished records and the writer of traces; writes lengths, times and hashed ids, no text and no token.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from pathlib import Path

from foreword.replay.trace import TraceWriter
from foreword.server.records import RequestRecord


class Recorder:
    """Writes each request when it and all that arrived before it have ended, so that the file is in order of arrival.

    Requests that were refused before they ran are left out. Tenants' prompts have no ids in common, as they have no
    blocks in common. Called on the engine's thread, `close` from any thread after it.
    """

    def __init__(self, file: Path, running: Callable[[], list[RequestRecord]]) -> None:
        """Begins `file` anew; `running` lists the records that are still open. Raises TraceError."""
        self._writer = TraceWriter(file)
        self._running = running
        self._start = time.monotonic()
        self._waiting: list[tuple[float, str, RequestRecord]] = []

    def record(self, record: RequestRecord) -> None:
        """A request ended."""
        if record.first_scheduled_time is not None:
            heapq.heappush(self._waiting, (record.arrival_time, record.request_id, record))
        earliest = min((other.arrival_time for other in self._running()), default=float("inf"))
        while self._waiting and self._waiting[0][0] < earliest:
            self._write(heapq.heappop(self._waiting)[2])

    def _write(self, record: RequestRecord) -> None:
        self._writer.write(
            timestamp_ms=round(1e3 * max(0.0, record.arrival_time - self._start), 3),
            prompt_token_ids=record.prompt_token_ids,
            num_output_tokens=record.num_output_tokens,
            namespace=record.salt or "",
        )

    def close(self) -> None:
        """Write what is left, and finish the file; a second call does nothing."""
        while self._waiting:
            self._write(heapq.heappop(self._waiting)[2])
        self._writer.close()

"""Recorder: writes clients' requests as a trace that `foreword replay` reads.

A trace has lengths, times and hashed ids, but no text and no tokens. A separate thread writes it, so that a slow or
full disk delays nobody.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreword.errors import TraceError
from foreword.replay.trace import TraceWriter
from foreword.server.records import ListenerHealth, RequestRecord

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20
"""Limit of the bytes of requests that wait to be written. Beyond this limit, further requests are left out."""

RECORD_BYTES = 1024
"""Estimated bytes of a waiting record without its prompt."""

RETRY_S = 1.0
"""Seconds between a failure and the next attempt."""


class Recorder:
    """Writes a request after the end of all requests that arrived before it, so the file is in order of arrival.

    Requests that were refused before they ran are left out. Prompts of different tenants share no blocks, so they have
    no ids in common. For a linked request, only the tokens before the first link are written, because no prefix lookup
    finds later tokens, and hit rates do not count them. While the file cannot be written, requests wait.
    """

    def __init__(self, file: Path, running: Callable[[], list[RequestRecord]]) -> None:
        """Begin an empty `file`. `running` returns the records that are still open. Raises TraceError."""
        self.health = ListenerHealth("record")
        self._writer = TraceWriter(file)
        self._running = running
        self._start = time.monotonic()
        self._ended: queue.SimpleQueue[tuple[RequestRecord, float] | None] = queue.SimpleQueue()
        self._waiting: list[tuple[float, str, RequestRecord]] = []
        self._lock = threading.Lock()
        self.num_waiting_bytes = 0
        """The estimated bytes of requests that wait to be written."""
        self._may_write_at = 0.0
        self._thread = threading.Thread(target=self._run, name="foreword-recorder", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        """Queue a request that has ended. Called on the engine's thread."""
        with self._lock:
            if self.num_waiting_bytes > MAX_WAITING_BYTES:
                self.health.num_lost += 1
                return
            self.num_waiting_bytes += _num_bytes(record)
        earliest = min((other.arrival_time for other in self._running()), default=float("inf"))
        self._ended.put((record, earliest))

    def close(self) -> None:
        """Write the waiting requests and close the file. Waits at most 10 s. May be called twice."""
        if self._thread.is_alive():
            self._ended.put(None)
            self._thread.join(timeout=10.0)

    # ------------------------------------------------------------- its own thread

    def _run(self) -> None:
        earliest = float("inf")
        while True:
            try:
                ended = self._ended.get(timeout=RETRY_S if self.health.failure is not None else None)
            except queue.Empty:
                pass
            else:
                if ended is None:
                    break
                record, earliest = ended
                if record.first_scheduled_time is None:
                    self._let_go(record)
                else:  # wait until the requests that arrived before it have ended
                    heapq.heappush(self._waiting, (record.arrival_time, record.request_id, record))
            if time.monotonic() >= self._may_write_at:
                self._write_those_before(earliest)
        self._write_those_before(float("inf"))
        self._finish()

    def _let_go(self, record: RequestRecord) -> None:
        with self._lock:
            self.num_waiting_bytes -= _num_bytes(record)

    def _write_those_before(self, moment: float) -> None:
        """Write the waiting requests that arrived before `moment`, up to the first failure."""
        while self._waiting and self._waiting[0][0] < moment:
            try:
                self._write(self._waiting[0][2])
            except Exception as error:
                self.health.failed(error)
                self._may_write_at = time.monotonic() + RETRY_S
                return
            self._let_go(heapq.heappop(self._waiting)[2])
            self.health.worked()

    def _write(self, record: RequestRecord) -> None:
        self._writer.write(
            timestamp_ms=round(1e3 * max(0.0, record.arrival_time - self._start), 3),
            prompt_token_ids=record.prompt_token_ids[: max(1, record.num_queried_tokens)],  # each line needs a token
            num_output_tokens=record.num_output_tokens,
            namespace=record.namespace,
            jumps=record.jumps,
            spans=record.spans,
            linked=None if record.link_method is None else _linked(record),
        )

    def _finish(self) -> None:
        if self._waiting:
            logger.error("%d requests are missing in the recording", len(self._waiting))
        try:
            self._writer.close()
        except TraceError as error:
            logger.error("%s", error)


def _linked(record: RequestRecord) -> dict[str, Any]:
    num_linked = 0 if record.link is None else record.link.linked_tokens
    return {"method": record.link_method, "prompt_tokens": record.num_prompt_tokens, "linked_tokens": num_linked}


def _num_bytes(record: RequestRecord) -> int:
    return RECORD_BYTES + record.prompt_token_ids.nbytes

"""Log lines while a model loads, so that a long load does not look like a server that hangs."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class LoadingLog:
    """Logs each stage of a load, and every few seconds that the stage still runs. Use it as a context manager."""

    def __init__(self, model: str, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> None:
        self._model = model
        self._interval_s = seconds_between_lines
        self._stage = "loading"
        self._started = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="foreword-loading", daemon=True)

    def enter(self, stage: str) -> None:
        self._stage = stage
        logger.info("%s: %s", self._model, stage, extra={"fields": {"event": "loading", "stage": stage}})

    def _repeat(self) -> None:
        while not self._over.wait(self._interval_s):
            seconds = time.monotonic() - self._started
            fields = {"event": "loading", "stage": self._stage, "seconds": round(seconds, 1)}
            logger.info("%s: still %s, after %.0f s", self._model, self._stage, seconds, extra={"fields": fields})

    def __enter__(self) -> LoadingLog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            seconds = time.monotonic() - self._started
            fields = {"event": "loaded", "seconds": round(seconds, 1)}
            logger.info("%s: loaded in %.1f s", self._model, seconds, extra={"fields": fields})

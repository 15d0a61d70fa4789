"""Log lines: text for people or JSON for programs. A separate thread writes them, and may wait for the reader."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, get_args

from foreword.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Options of the log on standard error."""

    log_level: LogLevel | None = None
    """Lowest level that is logged. None: FOREWORD_LOG_LEVEL, else info for `serve` and warning for other commands."""
    log_format: LogFormat = "text"
    """Lines for people, or one JSON object per line for programs."""

    def __post_init__(self) -> None:
        if self.log_level is not None:
            object.__setattr__(self, "log_level", self.log_level.lower())
        for name, allowed in (("log_level", (None, *get_args(LogLevel))), ("log_format", get_args(LogFormat))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(choice for choice in allowed if choice is not None)
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {choices}")


class TextLines(logging.Formatter):
    """Writes lines for people: `20:15:03 INFO foreword.server.run: ...`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., ...}`: `extra={"fields": {...}}` adds more keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PatientHandler(logging.Handler):
    """Writes lines to a stream in a separate thread, so that loggers never wait for the stream's reader.

    At most `max_lines` lines wait. If the queue is full, further lines are lost, and a later line says so.
    """

    def __init__(self, stream: TextIO, *, max_lines: int = 10_000, close_timeout_s: float = 2.0) -> None:
        super().__init__()
        self.num_lost = 0
        self._stream = stream
        self._close_timeout_s = close_timeout_s
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._write, name="foreword-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record now and queue it. The caller holds the handler's lock."""
        try:
            line = self.format(record)
            if self.num_lost:
                message = f"{self.num_lost} lines were lost: nobody reads the log fast enough"
                lost = logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None)
                line = f"{self.format(lost)}\n{line}"
        except Exception:
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
            self.num_lost = 0
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Write the waiting lines, but wait only `close_timeout_s` for the reader. May be called twice."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=self._close_timeout_s)
            self._thread.join(self._close_timeout_s)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads the stream any more
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

"""Log lines: for people, or one JSON object per line for programs.

Knows how a record is written; where it goes is configured in cli.py.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from foreword.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written to standard error."""

    log_level: LogLevel | None = None
    """Least level of what is logged. None: FOREWORD_LOG_LEVEL, else info for `serve` and warning for other commands."""
    log_format: LogFormat = "text"
    """Lines for people, or one JSON object per line for programs."""

    def __post_init__(self) -> None:
        if self.log_level is not None:
            object.__setattr__(self, "log_level", self.log_level.lower())
        for name, allowed in (("log_level", (None, *get_args(LogLevel))), ("log_format", get_args(LogFormat))):
            if getattr(self, name) not in allowed:
                known = ", ".join(one for one in allowed if one is not None)
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")


class TextLines(logging.Formatter):
    """`20:15:03 INFO foreword.server.run: ...`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., ...}`: `extra={"fields": {...}}` brings more keys."""

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

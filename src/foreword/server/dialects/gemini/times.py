"""Google's durations and timestamps, as JSON writes them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_DURATION = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?s", re.ASCII)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
LATEST_US = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
"""The last moment that a timestamp can name, to the second."""


def read_duration(text: str) -> int | None:
    """The microseconds of a duration such as "3.5s"; None if it is none, or negative."""
    found = _DURATION.fullmatch(text)
    return None if found is None else int(found[1]) * 10**6 + _microseconds(found[2])


def read_timestamp(text: str) -> int | None:
    """The microseconds of a timestamp such as "2026-12-01T00:00:00.5Z", since 1970; None if it is none."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        return None
    try:
        second = datetime.fromisoformat(found[1].upper() + found[3].upper())
        return (second - _EPOCH) // _MICROSECOND + _microseconds(found[2])
    except (ValueError, OverflowError):
        return None


def timestamp(time_us: int) -> str:
    """A moment, in UTC."""
    moment = _EPOCH + timedelta(microseconds=time_us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _microseconds(fraction: str | None) -> int:
    return int((fraction or "0").ljust(6, "0")[:6])

"""The memory of this machine, or of this container if that is less."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_cpu_bytes() -> int:
    """The bytes of memory that are still free."""
    kib = re.search(r"^MemAvailable:\s+(\d+)", _text("/proc/meminfo"), re.MULTILINE)
    limits = [(int(kib[1]) * 1024 if kib else 0) or _physical_bytes()]
    maximum, current = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if maximum.isdecimal() and current.isdecimal():
        limits.append(max(0, int(maximum) - int(current)))
    return min(limits)


def total_cpu_bytes() -> int:
    """The bytes of memory in all, free or in use."""
    maximum = _text("/sys/fs/cgroup/memory.max")
    return min(_physical_bytes(), int(maximum)) if maximum.isdecimal() else _physical_bytes()


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""

"""The memory of this machine, or of this process's cgroups (such as a container) if that is less."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from foreword.config.processors import cgroup_folders

_ROOT = Path("/")


def available_cpu_bytes(root: Path = _ROOT) -> int:
    """The bytes of memory that are still free. `root`: the folder in which /proc and the cgroups' folders lie."""
    kib = re.search(r"^MemAvailable:\s+(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    free = (int(kib[1]) * 1024 if kib else 0) or _physical_bytes()
    return min([free, *(max(0, limit - _used_bytes(folder)) for folder, limit in _limits(root))])


def total_cpu_bytes(root: Path = _ROOT) -> int:
    """The bytes of memory, whatever uses them now."""
    return min([_physical_bytes(), *(limit for _, limit in _limits(root))])


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of cgroups with a limit on memory, and their limits in bytes."""
    for folder in cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(ValueError):  # "max": no limit
                yield folder, int(_text(folder / name))


def _used_bytes(folder: Path) -> int:
    """The bytes that a cgroup uses, without copies of files, which the system drops when memory is needed."""
    used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
    copies = re.findall(r"^(?:in)?active_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
    return int(used or 0) - sum(map(int, copies))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""The memory that KV blocks may take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from foreword.config import ModelConfig
from foreword.model.gpu.memory_use import GIB, MemoryUse

CPU_DEFAULT_SHARE = 0.25
CPU_DEFAULT_LIMIT_BYTES = 4 * GIB
CPU_DEFAULT_LEAST_BYTES = GIB
"""Room for old prefixes, however little the requests that run together can hold."""
GPU_DEFAULT_SHARE = 0.9


def kv_cache_bytes(
    options: ModelConfig, measure: Callable[[], MemoryUse] | None, most_running_bytes: int | None = None
) -> int:
    """Decide on the memory for KV blocks, after the weights were loaded. Raises ConfigError if nothing is left.

    `measure` finds out what takes a GPU's memory; None on a CPU. `most_running_bytes`: what the largest number of
    requests that run together hold if all are as long as can be.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    share = options.gpu_memory_utilization
    if measure is not None:
        return measure().pool_bytes(share or GPU_DEFAULT_SHARE)
    available = available_cpu_bytes()
    if share is not None:
        return int(share * available)
    limit = CPU_DEFAULT_LIMIT_BYTES
    if most_running_bytes is not None:  # as much again keeps what they leave
        limit = min(limit, max(CPU_DEFAULT_LEAST_BYTES, 2 * most_running_bytes))
    return min(int(CPU_DEFAULT_SHARE * available), limit)


def available_cpu_bytes() -> int:
    """The memory that is still free: the system's, or the container's if that is less."""
    kib = re.search(r"^MemAvailable:\s+(\d+)", _text("/proc/meminfo"), re.MULTILINE)
    limits = [(int(kib[1]) * 1024 if kib else 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    maximum, current = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if maximum.isdecimal() and current.isdecimal():
        limits.append(max(0, int(maximum) - int(current)))
    return min(limits)


def _text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""

"""The memory that KV blocks may take.

Knows devices and bytes; knows nothing of blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from foreword.config import ModelConfig
from foreword.model.gpu.memory_use import GIB, MemoryUse

CPU_DEFAULT_SHARE = 0.25
CPU_DEFAULT_LIMIT_BYTES = 4 * GIB
GPU_DEFAULT_SHARE = 0.9


def kv_cache_bytes(options: ModelConfig, measure: Callable[[], MemoryUse] | None) -> int:
    """Decide on the memory for KV blocks, after the weights were loaded. Raises ConfigError if nothing is left.

    `measure` finds out what takes a GPU's memory; None on a CPU.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    share = options.gpu_memory_utilization
    if measure is not None:
        return measure().pool_bytes(share or GPU_DEFAULT_SHARE)
    available = available_cpu_bytes()
    if share is not None:
        return int(share * available)
    return min(int(CPU_DEFAULT_SHARE * available), CPU_DEFAULT_LIMIT_BYTES)


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

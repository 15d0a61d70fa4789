"""The memory that KV blocks may take.

Knows devices and bytes; knows nothing of blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from foreword.config import ModelConfig
from foreword.model.gpu.memory_use import MemoryUse

GIB = 2**30
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
    limits = [_meminfo_available() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    maximum, current = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if maximum is not None and current is not None:
        limits.append(max(0, maximum - current))
    return min(limits)


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None

"""The threads that compute: how many there are, how they wait, and how they share processors with other programs."""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import platform
import struct
import sys
import threading
from contextlib import suppress
from typing import Any

import torch

from foreword.config import has_thread_count, has_wait_policy
from foreword.config.processors import read_processors

logger = logging.getLogger(__name__)

TURN_NS = 300_000
"""Nanoseconds after which another program may have a thread's processor; Linux chooses 1.4 ms or more."""
MOST_IDLE = 64
"""Processors beyond which no team of idle threads is started: containers bound threads, too."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Linux' sched_attr: size, policy, flags, nice, priority, runtime (here: the turn), deadline, period."""
_GET_AND_SET = {"x86_64": (315, 314), "aarch64": (275, 274)}.get(platform.machine() if sys.platform == "linux" else "")
"""Linux' numbers of the calls sched_getattr and sched_setattr."""


def prepare_threads(num_threads: int | None) -> None:
    """Set the number of threads for numerical code, let them rest while they wait, and log both.

    None: torch's choice (its processors, which follow the affinity, or OMP_NUM_THREADS), at most the cgroup's quota.
    """
    processors = read_processors()
    if num_threads is None and processors.quota is not None and not has_thread_count():
        num_threads = min(torch.get_num_threads(), processors.usable)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if not has_wait_policy() and not _rest():
        logger.warning(
            "torch was imported before foreword, so its threads spin while they wait, which makes answers many times "
            "slower beside other programs; set OMP_WAIT_POLICY=PASSIVE, or import foreword before torch"
        )
    take_short_turns()
    logger.info("%d threads compute; this process may use %s", torch.get_num_threads(), processors)


@functools.cache
def _rest() -> bool:
    """Let the threads of an OpenMP that is loaded already rest; whether that is possible.

    GNU's OpenMP read once how long threads spin before they sleep: 300,000 turns, many milliseconds. If it has more
    threads than processors they spin for 100. So here is a team that is one larger than that, and sleeps for good.
    """
    openmp = gnu_openmp()
    if openmp is None or openmp.omp_get_num_procs() > MOST_IDLE:
        return False  # a system that gives fewer threads would end the process
    begun, never = threading.Event(), threading.Event()

    def hold() -> None:
        openmp.GOMP_parallel(address_of(ctypes.CDLL(None).getpid), None, openmp.omp_get_num_procs() + 1, 0)
        begun.set()
        never.wait()  # the team belongs to this thread, and ends with it

    threading.Thread(target=hold, name="foreword-idle-team", daemon=True).start()
    begun.wait()
    return True


def take_short_turns() -> None:
    """Ask Linux (6.12 and newer) for short turns for this process's threads, and those that they will start.

    Threads that compute together meet hundreds of times in a step. Where other programs run too, each meeting waits
    for a thread that is not running, and with the usual turns of 1.4 to 3 ms that is most of a step. Short turns give
    no larger share of a processor: a thread that has slept gets its share sooner, and loses the processor sooner.
    """
    if _GET_AND_SET is None:
        return
    get, set_ = _GET_AND_SET
    call = ctypes.CDLL(None).syscall
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    with suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            if call(get, thread, attributes, _ATTRIBUTES.size, 0):
                continue  # it has ended
            size, policy, flags, nice, priority, _, *rest = _ATTRIBUTES.unpack(attributes.raw)
            if policy in (os.SCHED_OTHER, os.SCHED_BATCH):
                call(set_, thread, _ATTRIBUTES.pack(size, policy, flags, nice, priority, TURN_NS, *rest), 0)


@functools.cache
def gnu_openmp() -> ctypes.CDLL | None:
    """The copy of GNU's OpenMP that torch has loaded; None if torch has another OpenMP."""
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            _ = library.omp_get_num_threads, library.omp_get_num_procs
        except (OSError, AttributeError):
            continue
        return library
    return None


def address_of(function: Any) -> int:
    """Address of a C function's machine code."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0

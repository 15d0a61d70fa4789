"""Memory in huge pages, for weights and KV, which every step reads from end to end.

A processor looks up the address of each page that it reads. With pages of 4 KiB that is one look-up for 64 cache lines,
or two on a virtual machine. Linux gives pages of 2 MiB on request (`madvise`), if it has room. On other systems, and
for less than 2 MiB, pages stay ordinary.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE = 1 << 21
CACHE_LINE = 64
REGION_BYTES = 1 << 26
TOUCHED_BYTES = 1 << 24
"""Bytes that a thread touches before it checks whether to stop."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which Python's mmap has no name for."""


def allocate(num_bytes: int) -> Bytes:
    """Memory [num_bytes] that begins where a huge page can begin; the system provides it at the first write.

    The last bytes lie in small pages, so a few bytes do not take 2 MiB. Raises MemoryError if the system refuses.
    """
    memory, start = _reserve(num_bytes)
    return memory[start : start + num_bytes]


def provide(memory: Bytes) -> bool:
    """Let the system provide memory now, not at its first write. The content stays, even if other threads write to it.

    Returns False if the system cannot do this (before Linux 5.14). Other Python threads run meanwhile.
    """
    if sys.platform != "linux" or not len(memory):
        return False
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.ctypes.data + len(memory) - start
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return int(madvise(start, length, _POPULATE_WRITE)) == 0


def _reserve(num_bytes: int) -> tuple[Bytes, int]:
    """Reserve memory with room for `num_bytes`. Returns the memory, and the position in it where these bytes begin."""
    room = num_bytes + HUGE_PAGE
    try:
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"the system refused {room} bytes of memory: {error}") from error
    whole = np.frombuffer(memory, np.uint8)
    start, whole_pages = -whole.ctypes.data % HUGE_PAGE, (num_bytes - 1) // HUGE_PAGE
    if sys.platform == "linux" and whole_pages > 0:
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole_pages * HUGE_PAGE)
    return whole, start


class HugePages:
    """Gives out pieces of large regions, so that pieces share huge pages. A region is freed with its last piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[Bytes] | None = None
        self._next = 0
        self._toucher: _Toucher | None = None
        self._is_touched = False

    def allocate(self, num_bytes: int) -> Bytes:
        """A piece of memory, [num_bytes], that begins at a cache line. Raises MemoryError if the system refuses."""
        with self._lock:
            self._stop_touching()
            region = None if self._region is None else self._region()
            if region is None or len(region) < self._next + num_bytes:
                self._leave_region()
                region, self._next = _reserve(max(REGION_BYTES, num_bytes))
                self._region = weakref.ref(region)
            piece = region[self._next : self._next + num_bytes]
            self._next += -(-num_bytes // CACHE_LINE) * CACHE_LINE
            return piece

    @contextlib.contextmanager
    def touched_ahead(self, num_bytes: int) -> Iterator[None]:
        """While the caller does something else, a thread touches `num_bytes` of memory. The first `allocate` stops it.

        The first write to a page takes time: 0.1 s a GB if the system has free memory, and 2 s a GB if a virtual
        machine must ask its host. At the end, memory that was not allocated goes back to the system. Otherwise a single
        later piece could keep a region of this size in memory.
        """
        try:
            region, start = _reserve(num_bytes)
        except MemoryError:  # `allocate` reports it
            yield
            return
        with self._lock:
            self._stop_touching()
            self._leave_region()
            self._region, self._next, self._is_touched = weakref.ref(region), start, True
            self._toucher = _Toucher(region[start : start + num_bytes])
        try:
            yield
        finally:
            with self._lock:
                self._stop_touching()
                if self._region is not None and self._region() is region:
                    self._leave_region()

    def _leave_region(self) -> None:
        """End the region. If it was touched ahead, give the memory after its last piece back to the system."""
        region = None if self._region is None else self._region()
        if region is not None and self._is_touched:
            _give_back(region, self._next)
        self._region, self._is_touched = None, False

    def _stop_touching(self) -> None:
        if self._toucher is not None:
            self._toucher.stop()
            self._toucher = None


class _Toucher:
    """A thread that writes to every page of memory that is not in use yet."""

    def __init__(self, memory: Bytes) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._touch, args=(memory,), name="touch-memory", daemon=True)
        self._thread.start()

    def _touch(self, memory: Bytes) -> None:
        for at in range(0, len(memory), TOUCHED_BYTES):
            if self._stopped:
                return
            memory[at : at + TOUCHED_BYTES : mmap.PAGESIZE] = 0  # enough elements for numpy to let other threads run

    def stop(self) -> None:
        """Stop the thread; returns after at most some tens of milliseconds."""
        self._stopped = True
        self._thread.join()


def _give_back(region: Bytes, start: int) -> None:
    """Give the huge pages from `start` to the region's end, which no piece uses, back to the system."""
    first = start + -(region.ctypes.data + start) % HUGE_PAGE
    if sys.platform == "linux" and first < len(region):
        memory: mmap.mmap = region.base.obj  # type: ignore[union-attr]
        with contextlib.suppress(OSError):  # memory is locked
            memory.madvise(mmap.MADV_DONTNEED, first, len(region) - first)

"""Memory in huge pages: where it begins, who keeps it, what is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from foreword.kernels.runtime.huge_pages import (
    CACHE_LINE,
    HUGE_PAGE,
    REGION_BYTES,
    TOUCHED_BYTES,
    Bytes,
    HugePages,
    allocate,
    provide,
)
from foreword.model.layout import LayoutOptions
from foreword.model.storage import KVStorage
from tiny_models import TinyModels


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_begins_at_a_huge_page_and_can_be_written(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.ctypes.data % HUGE_PAGE == 0
    memory[:] = 255
    assert int(memory.sum(dtype=int)) == 255 * num_bytes


def test_memory_is_asked_for_in_huge_pages_but_for_its_end() -> None:
    """What is at the end of KV is scrap, and seldom written."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this system has no huge pages to ask for")
    memory, small = allocate(4 * HUGE_PAGE), allocate(HUGE_PAGE)
    assert "hg" in flags_of(memory.ctypes.data)
    assert "hg" in flags_of(memory.ctypes.data + 3 * HUGE_PAGE - 1)
    assert "hg" not in flags_of(memory.ctypes.data + 4 * HUGE_PAGE - 1)
    assert "hg" not in flags_of(small.ctypes.data)


def flags_of(address: int) -> list[str]:
    """Of the mapping that an address lies in."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                start, end = (int(number, 16) for number in first.split("-"))
                inside = start <= address < end
            elif inside and first == "VmFlags:":
                return rest
    pytest.skip("this system does not say")


def test_pieces_share_a_region_and_do_not_overlap() -> None:
    pages = HugePages()
    pieces = [pages.allocate(num_bytes) for num_bytes in (100, 64, 1, 5000)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % CACHE_LINE == 0
        piece[:] = number
    assert [set(piece.tolist()) for piece in pieces] == [{0}, {1}, {2}, {3}]
    assert len({id(piece.base) for piece in pieces}) == 1


def test_what_a_region_does_not_hold_gets_its_own() -> None:
    pages = HugePages()
    small, large = pages.allocate(10), pages.allocate(2 * REGION_BYTES)
    assert len(large) == 2 * REGION_BYTES
    assert small.base is not large.base


def test_a_region_is_freed_with_its_last_piece() -> None:
    pages = HugePages()
    pieces = [pages.allocate(10), pages.allocate(10)]
    region = weakref.ref(pieces[0].base)
    del pieces[0]
    gc.collect()
    assert region() is not None
    pieces.clear()
    gc.collect()
    assert region() is None
    assert len(pages.allocate(10)) == 10


def test_memory_touched_ahead_is_there_when_it_is_asked_for_and_the_rest_is_given_back() -> None:
    pages, num_bytes = HugePages(), 8 * HUGE_PAGE
    with pages.touched_ahead(num_bytes):
        for thread in threading.enumerate():
            if thread.name == "touch-memory":
                thread.join(60)
        piece = pages.allocate(HUGE_PAGE)
        assert piece.ctypes.data % HUGE_PAGE == 0
        assert resident_bytes(piece.ctypes.data, num_bytes) == num_bytes
        piece[:] = 7
    assert resident_bytes(piece.ctypes.data, num_bytes) == HUGE_PAGE
    assert set(piece.tolist()) == {7}
    assert pages.allocate(HUGE_PAGE).base is not piece.base


def resident_bytes(address: int, num_bytes: int) -> int:
    """How much of it is in memory, in whole pages."""
    if sys.platform != "linux":
        pytest.skip("only Linux is asked")
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_who_touches_ahead_stops_before_memory_is_handed_out() -> None:
    pages = HugePages()
    with pages.touched_ahead(4 * TOUCHED_BYTES):
        pieces = [pages.allocate(TOUCHED_BYTES) for _ in range(5)]  # the last: in a region of its own
        for number, piece in enumerate(pieces, 1):
            piece[:] = number
    assert [set(piece[:: HUGE_PAGE // 8].tolist()) for piece in pieces] == [{1}, {2}, {3}, {4}, {5}]
    assert pieces[4].base is not pieces[3].base


def test_of_two_who_touch_ahead_the_first_keeps_what_it_has_only() -> None:
    pages, num_bytes = HugePages(), 4 * HUGE_PAGE
    with pages.touched_ahead(num_bytes):
        piece = pages.allocate(HUGE_PAGE)
        piece[:] = 5
        whole = piece.base[piece.ctypes.data - piece.base.ctypes.data :][:num_bytes]
        whole[HUGE_PAGE:] = 1
        with pages.touched_ahead(num_bytes):
            assert pages.allocate(1).base is not piece.base
        assert resident_bytes(piece.ctypes.data, num_bytes) == HUGE_PAGE
    assert set(piece.tolist()) == {5}


def test_what_cannot_be_had_is_not_touched_ahead() -> None:
    pages = HugePages()
    with pages.touched_ahead(2**61):
        assert len(pages.allocate(10)) == 10


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match=f"refused {2**61 + HUGE_PAGE} bytes"):
        allocate(2**61)


def test_memory_that_is_provided_is_resident_and_keeps_its_content() -> None:
    memory = allocate(8 * HUGE_PAGE)
    memory[HUGE_PAGE + 7] = 255
    if not provide(memory[HUGE_PAGE + 5 : 3 * HUGE_PAGE]):
        pytest.skip("this system does not provide memory before it is written")
    assert memory[HUGE_PAGE + 7] == 255
    assert is_resident(memory, HUGE_PAGE + 5, 3 * HUGE_PAGE) == {True}
    assert is_resident(memory, 4 * HUGE_PAGE, 8 * HUGE_PAGE) == {False}
    assert not provide(memory[:0])


def is_resident(memory: Bytes, start: int, stop: int) -> set[bool]:
    """Whether pages of memory are in RAM."""
    address = memory.ctypes.data
    first, end = (address + start) // mmap.PAGESIZE, -(-(address + stop) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (end - first)), np.uint64)
    return set((entries >> np.uint64(63)).astype(bool).tolist())


def test_kv_begins_at_huge_pages(tiny_models: TinyModels) -> None:
    layout = tiny_models.loaded("llama").plan_layout(LayoutOptions(16))
    storage = KVStorage(layout, 3, torch.device("cpu"))
    for blocks in storage.blocks.values():
        assert blocks.keys.data_ptr() % HUGE_PAGE == blocks.values.data_ptr() % HUGE_PAGE == 0

"""Memory in huge pages: where it begins, who keeps it, what is refused."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from foreword.model.kernels.huge_pages import CACHE_LINE, CHUNK_BYTES, HUGE_PAGE, HugePages, allocate


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_begins_at_a_huge_page_and_can_be_written(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.ctypes.data % HUGE_PAGE == 0
    memory[:] = 255
    assert int(memory.sum(dtype=int)) == 255 * num_bytes


def test_memory_is_asked_for_in_huge_pages() -> None:
    if sys.platform != "linux":
        pytest.skip("huge pages are asked for on Linux")
    memory = allocate(4 * HUGE_PAGE)
    address, flags, inside = memory.ctypes.data, "", False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                start, end = (int(number, 16) for number in first.split("-"))
                inside = start <= address < end
            elif inside and first == "VmFlags:":
                flags = rest
    if not flags:
        pytest.skip("this system does not say")
    assert "hg" in flags.split()


def test_pieces_share_a_chunk_and_do_not_overlap() -> None:
    pages = HugePages()
    pieces = [pages.allocate(num_bytes) for num_bytes in (100, 64, 1, 5000)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % CACHE_LINE == 0
        piece[:] = number
    assert [set(piece.tolist()) for piece in pieces] == [{0}, {1}, {2}, {3}]
    assert len({id(piece.base) for piece in pieces}) == 1


def test_what_a_chunk_does_not_hold_gets_its_own() -> None:
    pages = HugePages()
    small, large = pages.allocate(10), pages.allocate(2 * CHUNK_BYTES)
    assert len(large) == 2 * CHUNK_BYTES
    assert small.base is not large.base


def test_a_chunk_is_freed_with_its_last_piece() -> None:
    pages = HugePages()
    pieces = [pages.allocate(10), pages.allocate(10)]
    chunk = weakref.ref(pieces[0].base)
    del pieces[0]
    gc.collect()
    assert chunk() is not None
    pieces.clear()
    gc.collect()
    assert chunk() is None
    assert len(pages.allocate(10)) == 10


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match=f"refused {2**61 + HUGE_PAGE} bytes"):
        allocate(2**61)

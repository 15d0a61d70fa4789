"""Lines of a recording are whole, whatever happens to the disk."""

from __future__ import annotations

import gzip
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foreword.replay.trace import LineFile


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_a_line_that_finds_no_room_leaves_nothing_and_can_be_written_later(tmp_path: Path, name: str) -> None:
    file = LineFile(tmp_path / name)
    lines = [str(hash(number)) * 50 for number in range(3, 9)]
    for line in lines[:3]:
        file.write(line)
    size = (tmp_path / name).stat().st_size
    with room_for(size + 5):
        for _ in range(2):
            with pytest.raises(OSError, match="large"):
                file.write("lost" * 20)
            assert (tmp_path / name).stat().st_size == size
    for line in lines[3:]:
        file.write(line)
    file.close()
    file.close()
    data = (tmp_path / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    assert text.decode().splitlines() == lines

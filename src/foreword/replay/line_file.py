"""A file that grows by whole lines, even if the disk is full or the process is killed.

Knows bytes and gzip. A line is in the file when `write` returns, and no part of it is there when `write` raises: after
a failed write the file is cut back to its last whole line, and the next line follows that.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path

_AS_GZIP = 31


class LineFile:
    """Lines of text, gzipped if the file's name ends in .gz. `close` may be called twice."""

    def __init__(self, file: Path) -> None:
        """Start `file` from empty. Raises OSError."""
        self._file = file.open("wb", buffering=0)
        self._packer = zlib.compressobj(wbits=_AS_GZIP) if file.suffix == ".gz" else None
        self._num_bytes = 0
        """Number of bytes that are certainly whole lines."""

    def write(self, line: str) -> None:
        """Append a line. Raises OSError; then the file is as it was, and the line may be tried again."""
        data = f"{line}\n".encode()
        packer = None if self._packer is None else self._packer.copy()  # the old packer continues if this write fails
        if packer is not None:
            data = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
        self._append(data)
        self._packer = packer

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):  # a pipe cannot be cut back
                self._file.truncate(self._num_bytes)
                self._file.seek(0, os.SEEK_END)
            raise
        self._num_bytes += len(data)

    def close(self) -> None:
        """Finish the file. Raises OSError; the file is closed all the same."""
        if self._file.closed:
            return
        with self._file:
            if self._packer is not None:
                self._append(self._packer.flush())

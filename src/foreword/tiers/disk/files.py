"""The file layer: every call of the disk tier to the operating system.

Tests derive layers from it that fail, tear or lose written data. So the tier does all of its I/O through this layer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

RWF_DONTCACHE = 0x80
"""Flag of preadv2 and pwritev2 since Linux 6.14: leave the page cache as it is."""

FOLDER_MODE = 0o700
FILE_MODE = 0o600


class Space(NamedTuple):
    """A file system's size and the space that is left for us, in bytes."""

    total_bytes: int
    free_bytes: int
    is_read_only: bool


class RealFiles:
    """The disk tier's calls of the operating system. Every method raises OSError as `os` does."""

    def make_folder(self, path: Path) -> None:
        """Make one folder with mode 0700 whatever the umask. Its parent must be there."""
        os.mkdir(path, FOLDER_MODE)
        os.chmod(path, FOLDER_MODE)

    def list_folder(self, path: Path) -> list[str]:
        return os.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """The status of the path itself: a symbolic link is not followed."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing, mode 0600 whatever the umask; it must not exist."""
        return self._private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_for_reading(self, path: Path) -> int:
        """Open a file; a symbolic link is refused."""
        # Without O_NONBLOCK, a FIFO in the file's place would hold up the thread forever.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def open_lock(self, path: Path) -> int:
        """Open a lock file, and make it if it is not there, mode 0600."""
        return self._private(path, os.O_RDWR | os.O_CREAT)

    def try_lock(self, fd: int) -> bool:
        """Take the lock of an open lock file; False if another process holds it. Closing the file releases it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
        """Read up to `len(out)` bytes; 0 at the end of the file."""
        return os.preadv(fd, [out], offset, RWF_DONTCACHE if uncached else 0)

    def write(self, fd: int, data: memoryview, offset: int, *, uncached: bool) -> int:
        """Write up to `len(data)` bytes; returns the number written."""
        return os.pwritev(fd, [data], offset, RWF_DONTCACHE if uncached else 0)

    def sync(self, fd: int) -> None:
        """Wait until the file's content would survive a loss of power."""
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def space(self, path: Path) -> Space:
        status = os.statvfs(path)
        is_read_only = bool(status.f_flag & os.ST_RDONLY)
        return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, is_read_only)

    def _private(self, path: Path, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)  # the umask may have taken away our own right to read
        except OSError:
            os.close(fd)
            raise
        return fd


def read_fully(files: RealFiles, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
    """Read until `out` is full or the file ends; returns the number of bytes read."""
    done = 0
    while done < len(out):
        count = files.read(fd, out[done:], offset + done, uncached=uncached)
        if count == 0:
            break
        done += count
    return done


def write_fully(files: RealFiles, fd: int, data: memoryview, offset: int, *, uncached: bool) -> None:
    """Write all of `data`. Raises OSError; then any part of `data` may be in the file."""
    done = 0
    while done < len(data):
        count = files.write(fd, data[done:], offset + done, uncached=uncached)
        if count <= 0:
            raise OSError(errno.ENOSPC, "the system wrote nothing")
        done += count


def replace_file(files: RealFiles, path: Path, unfinished: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a file, which then replaces the old file in one step; returns the number of bytes written.

    `unfinished`: the path of the new file until it is complete. Raises OSError, and errors of `parts`; then only the
    old file stays. A part must be valid until the next part is asked for.
    """
    with contextlib.suppress(FileNotFoundError):
        files.unlink(unfinished)
    fd = files.create(unfinished)
    try:
        try:
            offset = 0
            for part in parts:
                write_fully(files, fd, memoryview(part), offset, uncached=False)
                offset += len(part)
            files.sync(fd)
        finally:
            files.close(fd)
        files.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):  # half a file would take up room that the disk may lack
            files.unlink(unfinished)
        raise
    return offset


def close_quietly(files: RealFiles, fd: int) -> None:
    """Close a file that was only read, or whose content no longer matters. Errors are ignored."""
    with contextlib.suppress(OSError):
        files.close(fd)


@contextlib.contextmanager
def opened(files: RealFiles, path: Path) -> Iterator[int]:
    """Open a file that is only read. Raises OSError."""
    fd = files.open_for_reading(path)
    try:
        yield fd
    finally:
        close_quietly(files, fd)


def can_leave_cache(files: RealFiles, fd: int) -> bool:
    """Whether the kernel and the file system of an open file know RWF_DONTCACHE."""
    try:
        files.read(fd, memoryview(bytearray(4096)), 0, uncached=True)
    except OSError:
        return False
    return True


def physical_bytes(status: os.stat_result) -> int:
    """The bytes that a file occupies on its disk, without its holes."""
    return status.st_blocks * 512

"""File layers that fail, hang or record, over the real one."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from foreword.tiers.disk.files import RealFiles

CALLS = (
    "make_folder list_folder stat fstat create open_for_reading open_lock try_lock close read write sync truncate "
    "rename unlink remove_folder space"
).split()


class FailingFiles(RealFiles):
    """Calls from number `first` on fail with an error, for `num_calls` calls; `kinds` are the calls that count."""

    def __init__(self, error: int, first: int, *, num_calls: int = 1, kinds: tuple[str, ...] = tuple(CALLS)) -> None:
        self.error, self.first, self.last = error, first, first + num_calls
        self.num_calls = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()
        for kind in kinds:
            setattr(self, kind, self._counted(kind, getattr(super(), kind)))

    def _counted(self, kind: str, call):
        def counted(*args, **options):
            with self._lock:
                number = self.num_calls
                self.num_calls += 1
                fails = self.first <= number < self.last
                if fails:
                    self.failed.append(kind)
            if fails:
                if kind == "close":  # as in Linux: the descriptor is gone all the same
                    call(*args, **options)
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **options)

        return counted


class HangingFiles(RealFiles):
    """Reads and writes hang until the test lets them go on."""

    def __init__(self) -> None:
        self.hangs = False
        self.reached, self.go_on = threading.Event(), threading.Event()

    def read(self, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
        if self.hangs:
            self.reached.set()
            assert self.go_on.wait(60)
        return super().read(fd, out, offset, uncached=uncached)

    def write(self, fd: int, data: memoryview, offset: int, *, uncached: bool) -> int:
        if self.hangs:
            self.reached.set()
            assert self.go_on.wait(60)
        return super().write(fd, data, offset, uncached=uncached)


class StuckSource:
    """Memory of a run whose blocks cannot be copied until the test lets them."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def take(self, index: int, out: memoryview) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


class SmallDisk(RealFiles):
    """A disk with room for a number of bytes of segments; a write beyond it writes what fits, then fails."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def write(self, fd: int, data: memoryview, offset: int, *, uncached: bool) -> int:
        import errno

        folder = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
        used = sum(path.stat().st_size for path in folder.iterdir())
        left = self.num_bytes - used
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data[:left], offset, uncached=uncached)


@dataclass(frozen=True)
class Change:
    """One call that changes what is on disk."""

    kind: str
    path: Path
    data: bytes = b""
    offset: int = 0
    target: Path | None = None


class RecordingFiles(RealFiles):
    """Keeps every change in order, so that a test can build what a crash leaves behind at any point."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._paths: dict[int, Path] = {}

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.changes.append(Change("make_folder", path))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._paths[fd] = path
        self.changes.append(Change("create", path))
        return fd

    def open_lock(self, path: Path) -> int:
        is_there = path.exists()
        fd = super().open_lock(path)
        self._paths[fd] = path
        if not is_there:
            self.changes.append(Change("create", path))
        return fd

    def open_for_reading(self, path: Path) -> int:
        fd = super().open_for_reading(path)
        self._paths[fd] = path
        return fd

    def write(self, fd: int, data: memoryview, offset: int, *, uncached: bool) -> int:
        count = super().write(fd, data, offset, uncached=uncached)
        self.changes.append(Change("write", self._paths[fd], bytes(data[:count]), offset))
        return count

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.changes.append(Change("sync", self._paths[fd]))

    def truncate(self, fd: int, num_bytes: int) -> None:
        super().truncate(fd, num_bytes)
        self.changes.append(Change("truncate", self._paths[fd], offset=num_bytes))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.changes.append(Change("rename", source, target=target))
        for fd, path in self._paths.items():
            if source == path or source in path.parents:
                self._paths[fd] = target / path.relative_to(source)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.changes.append(Change("unlink", path))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.changes.append(Change("remove_folder", path))

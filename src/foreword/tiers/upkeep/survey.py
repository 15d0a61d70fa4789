"""A survey of a cache directory: processes, segment files, manifests and free space.

Knows the directory's layout and who lives; `foreword.tiers.disk.segments` knows what a segment holds. It takes no part
in the cache, and makes nothing but the lock file of `held`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from foreword.errors import ConfigError
from foreword.tiers.disk.directory import (
    JANITOR_NAME,
    LOCK_NAME,
    SNAPSHOT_NAME,
    VERSION,
    check_private,
    check_top,
    homes_in,
    segments_in,
    unusable,
)
from foreword.tiers.disk.files import FileLayer, Space, close_quietly, physical_bytes
from foreword.tiers.disk.manifest import Manifests, read_manifests
from foreword.tiers.disk.run_format import RunHeader
from foreword.tiers.disk.segments import Damage, scan_runs

QUIET_S = 60.0
"""After which a segment of a live process that is not its last one counts as sealed."""
JANITOR_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a process."""

    path: Path
    is_live: bool
    process_id: int | None
    """Of a live process, if the system tells."""

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        return f"process {self.process_id}" if self.process_id else "a live process"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file as it was when it was looked at."""

    path: Path
    home: Home
    num_bytes: int
    physical_bytes: int
    modified_s: float
    may_grow: bool
    """A live process may be writing it."""


@dataclass(slots=True)
class Survey:
    """What lies in a cache directory."""

    files: FileLayer
    path: Path
    space: Space
    manifests: Manifests
    homes: list[Home] = field(default_factory=list)
    segments: list[SegmentFile] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)
    """Files that could not be looked at, and why."""
    snapshot_bytes: int = 0
    """Physical bytes of the snapshots of indexes."""

    @property
    def physical_bytes(self) -> int:
        """Of everything that the budget counts."""
        return self.snapshot_bytes + sum(segment.physical_bytes for segment in self.segments)

    def name(self, path: Path) -> str:
        """A file's path below the cache directory."""
        return str(path.relative_to(self.path))

    def runs(self, segment: SegmentFile) -> Iterator[RunHeader | Damage]:
        """The runs of a segment. One that cannot be read ends early and goes to `unreadable`, unless it is gone."""
        try:
            fd = self.files.open_for_reading(segment.path)
        except OSError as error:
            self.note_unreadable(segment.path, error)
            return
        try:
            yield from scan_runs(self.files, fd, 0, segment.num_bytes, uncached=False)
        except OSError as error:
            self.note_unreadable(segment.path, error)
        finally:
            close_quietly(self.files, fd)

    def note_unreadable(self, path: Path, error: OSError) -> None:
        """Keep the reason, unless the file is gone: its process may evict it at any moment."""
        if not isinstance(error, FileNotFoundError):
            self.unreadable[path] = f"cannot be read: {error.strerror}"


def survey(files: FileLayer, path: Path) -> Survey:
    """Look at a cache directory. Raises ConfigError if it is none, or is not safe or readable."""
    try:
        return _survey(files, _checked(files, path))
    except OSError as error:
        raise unusable(path, error) from error


@contextmanager
def held(files: FileLayer, path: Path) -> Iterator[Survey]:
    """Look at a cache directory while nobody takes over a dead process's folder. Raises ConfigError."""
    janitor = -1
    try:
        checked = _checked(files, path)
        janitor = files.open_lock(checked / VERSION / JANITOR_NAME)
        give_up = time.monotonic() + JANITOR_PATIENCE_S
        while not files.try_lock(janitor):
            if time.monotonic() > give_up:
                raise ConfigError(f"another process is tidying {str(path)!r}; run the command again in a moment")
            time.sleep(0.02)
        yield _survey(files, checked)
    except OSError as error:
        raise unusable(path, error) from error
    finally:
        if janitor >= 0:
            close_quietly(files, janitor)


def _checked(files: FileLayer, path: Path) -> Path:
    """The real path of a cache directory. Raises ConfigError and OSError."""
    real = Path(os.path.realpath(path.expanduser()))
    try:
        check_top(real, files.stat(real))
        check_private(real / VERSION, files.stat(real / VERSION))
    except FileNotFoundError as error:
        missing = "holds no cache" if real.exists() else "does not exist"
        raise ConfigError(
            f"the directory {str(path)!r} {missing}; give the directory in which a server or an LLM keeps its cache"
        ) from error
    return real


def _survey(files: FileLayer, path: Path) -> Survey:
    root = path / VERSION
    found = Survey(files, path, files.space(path), read_manifests(files, root))
    for folder in homes_in(files, root):
        try:
            check_private(folder, files.stat(folder))
            home = _home(files, folder)
            paths = segments_in(files, folder)
        except ConfigError as error:  # a link, perhaps, to a folder that is not the cache's
            found.unreadable[folder] = str(error)
            continue
        except OSError as error:
            found.note_unreadable(folder, error)
            continue
        found.homes.append(home)
        with suppress(OSError):
            found.snapshot_bytes += physical_bytes(files.stat(folder / SNAPSHOT_NAME))
        for segment in paths:
            try:
                status = files.stat(segment)
            except OSError as error:
                found.note_unreadable(segment, error)
                continue
            # Segments of the dead get higher numbers than the one that a process writes, so the last is not all.
            may_grow = home.is_live and (segment == paths[-1] or time.time() - status.st_mtime < QUIET_S)
            sizes = status.st_size, physical_bytes(status)
            found.segments.append(SegmentFile(segment, home, *sizes, status.st_mtime, may_grow))
    return found


def _home(files: FileLayer, folder: Path) -> Home:
    try:
        lock = files.open_for_reading(folder / LOCK_NAME)
    except FileNotFoundError:
        return Home(folder, False, None)
    try:
        # Whoever looks for a dead process's folder at this moment makes a new one.
        is_live = not files.try_lock(lock)
        return Home(folder, is_live, _holder(files.fstat(lock)) if is_live else None)
    finally:
        close_quietly(files, lock)


def _holder(status: os.stat_result) -> int | None:
    """The process that holds the lock of a file, as Linux lists it; None if it does not."""
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == where and words[4].isdigit():
            return int(words[4]) or None
    return None

"""A survey of a cache directory: processes, segment files, manifests and free space.

A survey only reads the cache. The only file that it may make is the lock file of `held`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.config import user_path
from foreword.errors import ConfigError
from foreword.tiers.cipher import NO_CIPHER_ID
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
from foreword.tiers.disk.files import RealFiles, Space, close_quietly, opened, physical_bytes
from foreword.tiers.disk.manifest import Manifests, read_manifests
from foreword.tiers.disk.segments import Damage, RunHeader, scan_runs
from foreword.tiers.identity import Facts
from foreword.tiers.tier import GROUP_APART, PINNED

QUIET_S = 60.0
"""A live process's segment, except its last, counts as sealed after this number of seconds without a write."""
JANITOR_PATIENCE_S = 5.0
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a process."""

    path: Path
    is_live: bool
    process_id: int | None
    """The process's id; None if the process is dead, or if the system does not give the id."""

    @property
    def owner(self) -> str:
        return f"process {self.process_id}" if self.process_id else "a live process"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file as it was at the time of the survey."""

    path: Path
    home: Home
    num_bytes: int
    physical_bytes: int
    modified_s: float
    may_grow: bool
    """Whether a live process may still be writing to this segment."""


@dataclass(slots=True)
class Survey:
    """The contents of a cache directory."""

    files: RealFiles
    path: Path
    space: Space
    manifests: Manifests
    homes: list[Home] = field(default_factory=list)
    segments: list[SegmentFile] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)
    """Path of each file that could not be read -> why."""
    snapshot_bytes: int = 0
    """Physical bytes of the snapshots of indexes."""

    @property
    def physical_bytes(self) -> int:
        """The bytes of everything that the budget counts."""
        return self.snapshot_bytes + sum(segment.physical_bytes for segment in self.segments)

    def name(self, path: Path) -> str:
        """A file's path below the cache directory."""
        return str(path.relative_to(self.path))

    def runs(self, segment: SegmentFile) -> Iterator[RunHeader | Damage]:
        """Yield the runs of a segment, as far as it can be read. `unreadable` gets errors unless the file is gone."""
        try:
            with opened(self.files, segment.path) as fd:
                yield from scan_runs(self.files, fd, 0, segment.num_bytes, uncached=False)
        except OSError as error:
            self.note_unreadable(segment.path, error)

    def note_unreadable(self, path: Path, error: OSError) -> None:
        """Record why a file was not read, unless the file is gone because a process has evicted it."""
        if not isinstance(error, FileNotFoundError):
            self.unreadable[path] = f"cannot be read: {error.strerror}"


def survey(files: RealFiles, path: Path) -> Survey:
    """Look at a cache directory. Raises ConfigError if it is no cache directory, or is not safe or readable."""
    try:
        return _survey(files, _checked(files, path))
    except OSError as error:
        raise unusable(path, error) from error


@contextmanager
def held(files: RealFiles, path: Path) -> Iterator[Survey]:
    """Survey a cache directory; inside the context, nobody takes over a dead process's folder. Raises ConfigError."""
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


def _checked(files: RealFiles, path: Path) -> Path:
    """The real path of a cache directory. Raises ConfigError and OSError."""
    real = Path(os.path.realpath(user_path(path)))
    try:
        check_top(real, files.stat(real))
        check_private(real / VERSION, files.stat(real / VERSION))
    except FileNotFoundError as error:
        missing = "holds no cache" if real.exists() else "does not exist"
        raise ConfigError(
            f"the directory {str(path)!r} {missing}; give the directory in which a server or an LLM keeps its cache"
        ) from error
    return real


def _survey(files: RealFiles, path: Path) -> Survey:
    root = path / VERSION
    cache = Survey(files, path, files.space(path), read_manifests(files, root))
    for folder in homes_in(files, root):
        try:
            check_private(folder, files.stat(folder))
            home = _home(files, folder)
            paths = segments_in(files, folder)
        except ConfigError as error:  # a link, perhaps, to a folder that is not the cache's
            cache.unreadable[folder] = str(error)
            continue
        except OSError as error:
            cache.note_unreadable(folder, error)
            continue
        cache.homes.append(home)
        with suppress(OSError):
            cache.snapshot_bytes += physical_bytes(files.stat(folder / SNAPSHOT_NAME))
        for segment in paths:
            try:
                status = files.stat(segment)
            except OSError as error:
                cache.note_unreadable(segment, error)
                continue
            # A dead process's segments, once taken over, may have higher numbers than the segment being written.
            may_grow = home.is_live and (segment == paths[-1] or time.time() - status.st_mtime < QUIET_S)
            sizes = status.st_size, physical_bytes(status)
            cache.segments.append(SegmentFile(segment, home, *sizes, status.st_mtime, may_grow))
    return cache


def _home(files: RealFiles, folder: Path) -> Home:
    try:
        with opened(files, folder / LOCK_NAME) as lock:
            # This test holds a dead process's lock for a moment. A process that starts at that moment cannot take the
            # folder: it takes another, or makes a new one.
            is_live = not files.try_lock(lock)
            return Home(folder, is_live, _holder(files.fstat(lock)) if is_live else None)
    except FileNotFoundError:
        return Home(folder, False, None)


def _holder(status: os.stat_result) -> int | None:
    """The process that holds the lock of a file, as Linux lists it; None if it is not listed."""
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


@dataclass(slots=True)
class GroupTally:
    """Blocks of one group of layers."""

    num_blocks: int = 0
    payload_bytes: int = 0
    num_distinct: int = 0
    """The number of different blocks: several processes may have written the same block."""


@dataclass(slots=True)
class Tally:
    """Blocks of one namespace."""

    namespace: bytes
    facts: Facts
    """The facts of the manifest; empty without a manifest."""
    num_blocks: int = 0
    num_pinned: int = 0
    num_encrypted: int = 0
    num_expired: int = 0
    payload_bytes: int = 0
    """Stored bytes of the payloads, including what encryption adds."""
    disk_bytes: int = 0
    """Bytes on disk, including headers and padding."""
    oldest_s: int = 0
    newest_s: int = 0
    groups: dict[int, GroupTally] = field(default_factory=dict)
    bytes_by_day: Counter[str] = field(default_factory=Counter)
    """`payload_bytes` by the day of the write (UTC)."""

    @property
    def model(self) -> str:
        return str(self.facts.get("model_name", UNKNOWN))

    @property
    def kind(self) -> str:
        """`exact` if all blocks of the namespace have one arithmetic, `shared` if several may have, or `unknown`."""
        exact = self.facts.get("exact")
        return "exact" if exact is True else "shared" if exact is False else UNKNOWN

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in the blocks of the group of layers with the most blocks; None without a manifest."""
        block_size = self.facts.get("block_size")
        if not isinstance(block_size, int):
            return None
        of_layers = (group.num_distinct for group_id, group in self.groups.items() if group_id != GROUP_APART)
        return block_size * max(of_layers, default=0)

    @property
    def arithmetic(self) -> str:
        """Device, attention and versions, in short."""
        at = self.facts.get("arithmetic", {})
        path, libraries, processor = (_folder(at, name) for name in ("path", "libraries", "processor"))
        attention, device = path.get("attention"), (path.get("device"), processor.get("kind") or processor.get("name"))
        parts = [
            " ".join(str(part) for part in device if part),
            " ".join(map(str, attention)) if isinstance(attention, list) else "",
            f"torch {libraries['torch']}" if "torch" in libraries else "",
            f"foreword {self.facts['foreword_version']}" if "foreword_version" in self.facts else "",
        ]
        return ", ".join(part for part in parts if part) or UNKNOWN

    def add(self, header: RunHeader, now_s: float) -> None:
        entries = header.entries
        if not len(entries):
            return
        payload_bytes = int(entries["stored_bytes"].sum())
        self.num_blocks += len(entries)
        self.num_pinned += int(np.count_nonzero(entries["flags"] & PINNED))
        self.num_encrypted += len(entries) if header.cipher_id != NO_CIPHER_ID else 0
        self.num_expired += len(entries) if 0 < header.expires_s <= now_s else 0
        self.payload_bytes += payload_bytes
        self.disk_bytes += header.run_bytes
        self.oldest_s = min(self.oldest_s or header.created_s, header.created_s)
        self.newest_s = max(self.newest_s, header.created_s)
        self.bytes_by_day[day(header.created_s)] += payload_bytes
        for group_id in np.unique(entries["group"]).tolist():
            in_group = entries["group"] == group_id
            group = self.groups.setdefault(group_id, GroupTally())
            group.num_blocks += int(np.count_nonzero(in_group))
            group.payload_bytes += int(entries["stored_bytes"][in_group].sum())

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "namespace": self.namespace.hex(),
            "model": self.facts.get("model_name"),
            "arithmetic": None if self.arithmetic == UNKNOWN else self.arithmetic,
            "exact": self.facts.get("exact"),
            "num_blocks": self.num_blocks,
            "num_distinct_blocks": sum(group.num_distinct for group in self.groups.values()),
            "num_pinned": self.num_pinned,
            "num_encrypted": self.num_encrypted,
            "num_expired": self.num_expired,
            "num_tokens": self.num_tokens,
            "payload_bytes": self.payload_bytes,
            "disk_bytes": self.disk_bytes,
            "oldest_s": self.oldest_s or None,
            "newest_s": self.newest_s or None,
            "groups": {
                str(group_id): {"num_blocks": group.num_blocks, "payload_bytes": group.payload_bytes}
                for group_id, group in sorted(self.groups.items())
            },
            "bytes_by_day": dict(sorted(self.bytes_by_day.items())),
        }


def tallies(cache: Survey) -> list[Tally]:
    """The blocks of every namespace that has blocks or a manifest, most bytes first. Reads all headers."""
    now_s = time.time()
    by_namespace = {name: Tally(name, facts) for name, facts in cache.manifests.facts.items()}
    keys: dict[tuple[bytes, int], list[npt.NDArray[np.uint8]]] = {}
    for segment in cache.segments:
        for header in cache.runs(segment):
            if isinstance(header, Damage):
                continue
            header = header.within(segment.num_bytes)
            by_namespace.setdefault(header.namespace, Tally(header.namespace, {})).add(header, now_s)
            entries = header.entries
            for group_id in np.unique(entries["group"]).tolist():
                group_keys = entries["key"][entries["group"] == group_id]
                keys.setdefault((header.namespace, group_id), []).append(group_keys)
    for (namespace, group_id), parts in keys.items():
        joined = np.ascontiguousarray(np.concatenate(parts))
        distinct = len(np.unique(joined.view(f"V{joined.shape[1]}")))
        by_namespace[namespace].groups[group_id].num_distinct = distinct
    return sorted(by_namespace.values(), key=lambda tally: (-tally.disk_bytes, tally.namespace))


def day(seconds: float) -> str:
    """The date, in UTC, of a time in seconds since 1970."""
    return _utc("%Y-%m-%d", seconds)


def moment(seconds: float) -> str:
    """Date and time, in UTC, of a time in seconds since 1970; `-` for 0."""
    return _utc("%Y-%m-%d %H:%M", seconds) if seconds else "-"


def _utc(pattern: str, seconds: float) -> str:
    try:
        return time.strftime(pattern, time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock that had jumped
        return UNKNOWN


def _folder(facts: object, name: str) -> dict[str, Any]:
    """The dict of facts that has this name in `facts`; empty if there is none."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, dict) else {}

"""The adapters of one model that are in memory: read when they are asked for, the least recently used dropped first.

A folder whose files have changed is read again. Requests that run or wait hold adapters, too, so all that are alive
share one limit in bytes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path
from weakref import WeakValueDictionary

from foreword.errors import AdaptersBusyError
from foreword.model.adapters.folder import CONFIG, WEIGHTS, read_adapter
from foreword.model.adapters.weights import AdapterWeights, most_bytes
from foreword.model.spec import DecoderSpec

SETTLED_S = 2.0
"""A file that changed less than this before it was read may change again without a new date."""
HELD = 2
"""All that are alive take at most this many times what those take that stay: requests may hold as many again."""
Stamp = tuple[tuple[int, ...], ...]


class LoadedAdapters:
    """Reads and keeps adapters. Any thread may call it."""

    def __init__(self, spec: DecoderSpec, most: int, max_rank: int) -> None:
        """Keep at most `most` of them, besides those that requests hold, with ranks up to `max_rank`."""
        self._spec, self._most, self._max_rank = spec, most, max_rank
        self._most_bytes = HELD * most * most_bytes(spec, max_rank)
        self._kept: OrderedDict[str, tuple[Stamp | None, AdapterWeights]] = OrderedDict()
        """By folder, the one used last at the end, with the state of its files; None: read it again."""
        self._alive: WeakValueDictionary[str, AdapterWeights] = WeakValueDictionary()
        """By digest, as long as anybody holds it: equal ones are in memory once."""
        self._lock = threading.Lock()
        """For the tables alone: files may take long to read."""

    def get(self, folder: str) -> AdapterWeights:
        """The adapter that is in a folder now. Raises InvalidRequestError or AdaptersBusyError."""
        stamp = _stamp(Path(folder))
        with self._lock:
            stamp_before, adapter = self._kept.get(folder, (None, None))
        if adapter is None or stamp is None or stamp_before != stamp:
            adapter = read_adapter(folder, self._spec, self._max_rank)
        with self._lock:
            adapter = self._alive.get(adapter.digest) or self._admit(adapter)
            self._kept[folder] = stamp, adapter
            self._kept.move_to_end(folder)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return adapter

    def _admit(self, read: AdapterWeights) -> AdapterWeights:
        """Make room for one more; those that nobody holds leave memory with the tables' entry."""
        dropped: list[tuple[str, Stamp | None, str]] = []
        while self._kept and self.num_bytes + read.num_bytes > self._most_bytes:
            folder, (stamp, adapter) = self._kept.popitem(last=False)
            dropped.append((folder, stamp, adapter.digest))
            del adapter
        for folder, stamp, digest in reversed(dropped):  # those that requests hold take no less memory without
            held = self._alive.get(digest)
            if held is not None:
                self._kept[folder] = stamp, held
                self._kept.move_to_end(folder, last=False)
        if self.num_bytes + read.num_bytes > self._most_bytes:
            raise AdaptersBusyError(
                f"requests hold adapters of {self.num_bytes} bytes, and {self._most_bytes} is the limit; try again "
                "when they have ended, name fewer in one call, or raise max_loras"
            )
        self._alive[read.digest] = read
        return read

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that are alive."""
        return sum(adapter.num_bytes for adapter in list(self._alive.values()))


def _stamp(folder: Path) -> Stamp | None:
    """The state of an adapter's files, taken before they are read; None if it tells nothing."""
    try:
        found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    # A program may set st_mtime, as `cp -p` does; st_ctime logs every change, that one too.
    if max(file.st_ctime for file in found) > time.time() - SETTLED_S:
        return None
    return tuple((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns) for file in found)

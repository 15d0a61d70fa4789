"""The adapters of one model that are in memory: read when they are asked for, the least recently used dropped first.

Knows folders and their contents; knows no name and no request. A folder whose files have changed is read again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path
from weakref import WeakValueDictionary

from foreword.model.adapters.folder import CONFIG, WEIGHTS, read_adapter
from foreword.model.adapters.weights import AdapterWeights
from foreword.model.spec import DecoderSpec

SETTLED_S = 2.0
"""A file that changed less than this before it was read may change again without a new date."""
Stamp = tuple[tuple[int, int, int], ...]


class LoadedAdapters:
    """Reads and keeps adapters. Any thread may call it."""

    def __init__(self, spec: DecoderSpec, most: int, max_rank: int) -> None:
        """Keep at most `most` of them, besides those that requests hold, with ranks up to `max_rank`."""
        self._spec, self._most, self._max_rank = spec, most, max_rank
        self._kept: OrderedDict[str, tuple[Stamp | None, AdapterWeights]] = OrderedDict()
        """By folder, the one used last at the end, with the state of its files; None: read it again."""
        self._alive: WeakValueDictionary[str, AdapterWeights] = WeakValueDictionary()
        """By digest, as long as anybody holds it: equal ones are in memory once."""
        self._lock = threading.Lock()

    def get(self, folder: str) -> AdapterWeights:
        """The adapter that is in a folder now. Raises InvalidRequestError."""
        with self._lock:
            stamp = _stamp(Path(folder))
            kept = self._kept.get(folder)
            if kept is None or stamp is None or kept[0] != stamp:
                read = read_adapter(folder, self._spec, self._max_rank)
                kept = stamp, self._alive.setdefault(read.digest, read)
            self._kept[folder] = kept
            self._kept.move_to_end(folder)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return kept[1]

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
    if max(file.st_mtime for file in found) > time.time() - SETTLED_S:
        return None
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in found)

"""PayloadCache: objects that an engine keeps for sequences, found by the longest prefix.

For engines without blocks, whose cache is an object for a whole sequence: MLX's prompt caches, `past_key_values` of
transformers, a recurrent state. PayloadCache knows each object's tokens and size in bytes, and never looks inside.

    found = cache.find(prompt[:-1])                        None, or a payload for its first found.num_tokens tokens
    ... the engine copies the payload, cuts it, and computes the rest of the prompt ...
    cache.put(tokens, payload, num_bytes)                  keeps the computed payload for the next turn
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.account.stats import PrefixCacheStats
from foreword.cache.index.radix import RadixIndex
from foreword.cache.keys.hashing import MAX_TOKEN_ID, NO_EXTRA_KEYS, ExtraKeys
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:  # only a spill imports these at run time, so that the package imports quickly
    from pathlib import Path
    from tempfile import TemporaryDirectory

logger = logging.getLogger(__name__)

Payload = TypeVar("Payload")
ONE_BLOCK = MAX_TOKEN_ID
"""The index's block size. No sequence fills such a block, so the index stores each payload as a tail."""


@dataclass(frozen=True)  # with slots, Spill[str](...) fails in Python 3.11
class Spill(Generic[Payload]):
    """Where to write payloads for which memory has no room. The payloads that were written first are removed first."""

    folder: Path
    """An existing folder. The cache makes a subfolder, and removes the subfolder when the cache is closed or Python
    ends. A killed process leaves the subfolder behind."""
    max_bytes: int
    """The most bytes of all files together, except the file that is being written."""
    dump: Callable[[Payload, Path], None]
    """Writes a payload to a new file with exactly this path."""
    load: Callable[[Path], Payload]
    """Reads such a file, and returns a payload that is equal to the written one."""


@dataclass(frozen=True)
class PayloadHit(Generic[Payload]):
    """A payload that holds the beginning of a sequence. The cache keeps it, so copy it before you change it."""

    payload: Payload
    num_tokens: int
    """The number of the sequence's leading tokens that the payload holds."""
    num_payload_tokens: int
    """The number of tokens that the payload holds. If this exceeds `num_tokens`, cut the payload to `num_tokens`."""
    entry_id: int
    """The number of the payload's entry, for `take_out`."""


@dataclass(slots=True)
class _Entry(Generic[Payload]):
    entry_id: int
    payload: Payload | None
    num_tokens: int
    num_bytes: int
    file: Path | None = None
    """The file to which the payload was written last."""
    num_file_bytes: int = 0


class PayloadCache(Generic[Payload]):
    """Keeps payloads in at most `max_bytes` of memory. The least recently found or put payload is removed first.

    `can_cut` says whether a payload can be cut to serve a beginning of its tokens: True for attention's keys and
    values, False for recurrent states and sliding windows. If True, `find` returns the payload that shares the most
    tokens, and a longer payload replaces the payloads for its beginnings. If False, payloads are checkpoints: `find`
    returns the longest payload whose tokens are all in the sequence, and shorter payloads stay.

    At the end of a call, `on_evict` gets each payload that has left memory, except payloads that `take_out` took.
    `on_evict` must not call the cache. While a payload is read from disk, memory may hold more than `max_bytes`.
    `max_entries` limits the payloads in memory and on disk together. Only one thread may use the cache at a time.
    Raises ConfigError for limits below 1.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        can_cut: bool,
        max_entries: int = 4096,
        on_evict: Callable[[Payload], None] | None = None,
        spill: Spill[Payload] | None = None,
    ) -> None:
        if max_bytes < 1 or max_entries < 1 or (spill is not None and spill.max_bytes < 1):
            raise ConfigError(
                f"max_bytes={max_bytes}, max_entries={max_entries} and the bytes of a spill must all be at least 1"
            )
        self.max_bytes, self.can_cut = max_bytes, can_cut
        self.num_bytes = self.num_file_bytes = 0
        """The bytes of all payloads in memory, and of all files."""
        self.stats = PrefixCacheStats()
        """Counts of lookups, and of evictions: payloads that were lost, for lack of room or because a file failed."""
        self._on_evict, self._spill = on_evict, spill
        self._folder: TemporaryDirectory[str] | None = None
        if spill is not None:
            from tempfile import TemporaryDirectory

            self._folder = TemporaryDirectory(prefix="payloads-", dir=spill.folder)
        self._index = RadixIndex(max_entries, ONE_BLOCK, cut_tails=can_cut)
        self._memory: dict[int, _Entry[Payload]] = {}
        """Entry number -> entry in memory. The first entry of the dict is evicted next."""
        self._disk: dict[int, _Entry[Payload]] = {}
        """Entry number -> entry on disk. The first entry of the dict is removed next."""
        self._gone: list[Payload] = []
        """Payloads that left memory during a call; `on_evict` gets them at the end of the call."""
        self._unused = list(range(max_entries))
        self._num_written = 0

    def __len__(self) -> int:
        """The number of payloads, in memory and on disk."""
        return len(self._memory) + len(self._disk)

    def find(self, token_ids: npt.ArrayLike, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> PayloadHit[Payload] | None:
        """The payload for the longest beginning of these tokens; None if there is none. Counts as a use of the payload.

        Leave out a prompt's last token: it is computed for its logits. To find the nearest checkpoint at or before n,
        pass `token_ids[:n]`; no span of `extra_keys` may end after these tokens. A payload that cannot be read from
        disk is logged and forgotten, and the next best payload is returned.
        """
        sequence = TokenSequence("", token_ids, block_size=ONE_BLOCK, extra_keys=extra_keys)
        try:
            return self._find(sequence)
        finally:
            self._report()

    def _find(self, sequence: TokenSequence) -> PayloadHit[Payload] | None:
        while (match := self._index.match(sequence).partial) is not None:
            entry = self._memory.get(match.block_id) or self._read(self._disk[match.block_id])
            if entry is not None and entry.payload is not None:
                self._memory[entry.entry_id] = self._memory.pop(entry.entry_id)
                self.stats.count_lookup("", len(sequence), match.num_tokens)
                return PayloadHit(entry.payload, match.num_tokens, entry.num_tokens, entry.entry_id)
        self.stats.count_lookup("", len(sequence), 0)
        return None

    def put(
        self, token_ids: npt.ArrayLike, payload: Payload, num_bytes: int, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> bool:
        """Keep a payload for all of these tokens, and evict other payloads until it fits.

        Returns False, and changes nothing, if the payload alone exceeds `max_bytes`, or if another payload holds the
        same tokens. Raises InvalidRequestError for an empty `token_ids`, a size below 1, or a payload that is None.
        """
        sequence = TokenSequence("", token_ids, block_size=ONE_BLOCK, extra_keys=extra_keys)
        if not len(sequence) or not num_bytes >= 1 or payload is None:
            raise InvalidRequestError(
                f"a payload of {num_bytes} bytes for {len(sequence)} tokens cannot be kept; give at least one of each, "
                "and a payload that is not None"
            )
        match = self._index.match(sequence).partial
        if num_bytes > self.max_bytes or (match is not None and match.num_tokens == len(sequence)):
            return False
        try:
            if not self._unused:
                self._lose(next(iter((self._disk or self._memory).values())))
            entry = _Entry(self._unused.pop(), payload, len(sequence), num_bytes)
            self._index.insert_tail(sequence, len(sequence), entry.entry_id)
            self._keep(entry)
            for superseded in self._index.superseded_tails().tolist():
                self._drop(self._memory.get(superseded) or self._disk[superseded])
            self._make_room()
        finally:
            self._report()
        return True

    def take_out(self, hit: PayloadHit[Payload]) -> bool:
        """Forget a payload that was found. From now on it belongs to the caller, who may change it in place.

        Returns False if the payload has left the cache already. The caller must not change it then.
        """
        entry = self._memory.get(hit.entry_id)
        if entry is None or entry.payload is not hit.payload:
            return False
        self._forget(entry)
        return True

    def close(self) -> None:
        """Forget all payloads and remove the folder on disk. A second call does nothing."""
        for entry in [*self._memory.values(), *self._disk.values()]:
            self._drop(entry)
        if self._folder is not None:
            self._folder.cleanup()
        self._report()

    def check_integrity(self) -> None:
        """Raise AssertionError if index, order, sizes and files contradict each other."""
        self._index.check_integrity()
        memory, disk, numbers = self._memory, self._disk, [*self._memory, *self._disk]
        assert sorted(self._index.tail_block_ids().tolist()) == sorted(numbers), "the index has other entries"
        assert sorted(numbers + self._unused) == list(range(len(numbers) + len(self._unused))), "a number is lost"
        assert self.num_bytes == sum(entry.num_bytes for entry in memory.values()) <= self.max_bytes
        assert self.num_file_bytes == sum(entry.num_file_bytes for entry in disk.values())
        files = {os.path.basename(entry.file) for entry in disk.values() if entry.file is not None}
        assert files == set([] if self._folder is None else os.listdir(self._folder.name)), "a file is lost, or left"

    # ------------------------------------------------------------------ memory

    def _keep(self, entry: _Entry[Payload]) -> None:
        """Add an entry to memory, as the most recently used entry."""
        self._memory[entry.entry_id] = entry
        self.num_bytes += entry.num_bytes

    def _make_room(self) -> None:
        """Evict payloads until the rest fits. The newest payload stays, because it fits alone."""
        try:
            while self.num_bytes > self.max_bytes:
                self._evict()
        finally:  # after an interrupted write, too, memory must hold only what fits
            while self.num_bytes > self.max_bytes:
                self._lose(next(iter(self._memory.values())))

    def _report(self) -> None:
        """Call `on_evict` with each payload that left memory. Raises the first error of these calls at the end."""
        gone, self._gone, first = self._gone, [], None
        for payload in gone if self._on_evict is not None else ():
            try:
                self._on_evict(payload)  # type: ignore[misc]
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _evict(self) -> None:
        """Move the least recently used payload to disk, or lose it if that fails."""
        entry = next(iter(self._memory.values()))
        payload, is_on_disk = entry.payload, False
        assert payload is not None
        try:
            is_on_disk = self._write(entry, payload)
        finally:
            if not is_on_disk:
                self._lose(entry)
        if is_on_disk:
            self._gone.append(payload)

    def _lose(self, entry: _Entry[Payload]) -> None:
        self.stats.evictions += 1
        self._drop(entry)

    def _drop(self, entry: _Entry[Payload]) -> None:
        """Forget an entry, and report its payload."""
        self._forget(entry)
        if entry.payload is not None:
            self._gone.append(entry.payload)

    def _forget(self, entry: _Entry[Payload]) -> None:
        """Forget an entry and all that is counted for it, in memory or on disk."""
        self._index.remove(np.array([entry.entry_id], np.int32))
        self._leave(entry)
        self._unused.append(entry.entry_id)

    def _leave(self, entry: _Entry[Payload]) -> None:
        """Remove an entry from memory, or from disk together with its file."""
        if self._memory.pop(entry.entry_id, None) is not None:
            self.num_bytes -= entry.num_bytes
        else:
            del self._disk[entry.entry_id]
            self.num_file_bytes -= entry.num_file_bytes
            assert entry.file is not None
            _remove(entry.file)

    # -------------------------------------------------------------------- disk

    def _write(self, entry: _Entry[Payload], payload: Payload) -> bool:
        """Move a payload to disk. Returns False if it cannot be written, or if its file alone exceeds `max_bytes`."""
        spill = self._spill
        if spill is None or self._folder is None:
            return False
        self._num_written += 1
        file = spill.folder / os.path.basename(self._folder.name) / f"{self._num_written}.payload"
        num_bytes = 0
        try:
            spill.dump(payload, file)
            num_bytes = file.stat().st_size if file.is_file() else 0
            if not num_bytes:
                logger.warning("dump wrote no bytes to a file with exactly the path %s; the payload is lost", file)
        except Exception:
            logger.warning("a payload could not be written to %s; it is lost", file, exc_info=True)
        finally:
            if not 0 < num_bytes <= spill.max_bytes:
                for leftover in file.parent.glob(f"{self._num_written}.*"):  # `dump` may have added an ending
                    _remove(leftover)
        if not 0 < num_bytes <= spill.max_bytes:
            return False
        while self.num_file_bytes + num_bytes > spill.max_bytes:
            self._lose(next(iter(self._disk.values())))
        self._leave(entry)
        entry.file, entry.num_file_bytes, entry.payload = file, num_bytes, None
        self._disk[entry.entry_id] = entry
        self.num_file_bytes += num_bytes
        return True

    def _read(self, entry: _Entry[Payload]) -> _Entry[Payload] | None:
        """Bring an entry back to memory. If its file cannot be read, forget the entry and return None."""
        assert self._spill is not None
        assert entry.file is not None
        try:
            entry.payload = self._spill.load(entry.file)
            assert entry.payload is not None, "load returned None"
        except Exception:
            logger.warning("the payload in %s could not be read; it is lost", entry.file, exc_info=True)
            self._lose(entry)
            return None
        self._leave(entry)
        self._keep(entry)
        self._make_room()
        return entry


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        logger.warning("the payload's file %s could not be removed", path, exc_info=True)

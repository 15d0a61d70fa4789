"""Keeper: makes a cache entry of each prefix that an owner asks to keep, and writes the entries to a file.

A prompt may mark prefixes to keep (`Mark`). Each of them becomes an entry once the prompt is computed.

The file has the entries that a restarted process must still keep. An entry is written without its tokens: the key of
its last block shows whether a prompt begins with the entry's prefix.

    CACHE_DIR/v1/<namespace, 32 hex>.entries     {"entries": [{"name", "owner", "source", "refresh_s", ...}, ...]}
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from foreword.cache import BlockHash, CacheEntry, EntryWish, KVCacheManager, TokenSequence, entry_name
from foreword.engine.prompt import Keep, Mark, Prompt
from foreword.engine.tiering.director import TierDirector
from foreword.request import Request

logger = logging.getLogger(__name__)
MAX_BYTES = 16 << 20
SAVE_EVERY_S = 10.0
"""The least seconds between two writes of the file."""


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """An entry as it is written to the file. From it, a later process can keep the prefix again."""

    name: str
    owner: str | None
    source: str
    num_tokens: int
    last_key: str
    """The key of the last whole block of the entry's prefix, in hexadecimal digits."""
    until: float
    """The entry's end, in seconds since 1970."""
    refresh_s: float | None

    def __post_init__(self) -> None:
        """Raise ValueError or OverflowError for values that no entry can have."""
        texts, refresh_s = (self.name, self.source, self.last_key), 1.0 if self.refresh_s is None else self.refresh_s
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.owner, str | None):
            raise ValueError("a name is no text")
        for number in (self.num_tokens, self.until, refresh_s):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{number!r:.40} is no finite number")
        if not isinstance(self.num_tokens, int) or self.num_tokens < 1 or refresh_s <= 0:
            raise ValueError("a number is too small")
        bytes.fromhex(self.last_key)


class EntryFile:
    """The entries of one model in a cache directory. If two processes write, the last write wins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[SavedEntry]:
        """Read the entries. Returns none if there is no file, or if the file is damaged, which is logged."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return [SavedEntry(**entry) for entry in json.loads(self.path.read_bytes())["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            logger.warning("the cache entries in %s cannot be read, and are forgotten: %s", self.path, error)
            return []

    def write(self, entries: Sequence[SavedEntry]) -> None:
        """Replace the file. A failure is logged, and this process still keeps its entries."""
        text = json.dumps({"entries": [asdict(entry) for entry in entries]})
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent)  # mode 0600 whatever the umask
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("the cache entries cannot be written to %s: %s", self.path, error)


class Keeper:
    """Makes, changes and ends cache entries. The cache itself ends entries whose time is over, and enforces budgets."""

    def __init__(
        self,
        manager: KVCacheManager,
        tiers: TierDirector,
        sequence_of: Callable[[Prompt], TokenSequence],
        clock: Callable[[], float],
    ) -> None:
        self._manager, self._tiers, self._sequence_of, self._clock = manager, tiers, sequence_of, clock
        self._file: EntryFile | None = None
        self._asleep: dict[str, SavedEntry] = {}
        """Name -> an entry that an earlier process saved, if no prompt of this process has begun with the entry's
        prefix yet."""
        self._last_saved = -math.inf
        self.wall_clock: Callable[[], float] = time.time
        """Returns seconds since 1970. This clock goes on through restarts."""
        self._marked: WeakKeyDictionary[Request, Prompt] = WeakKeyDictionary()
        """First continuation of a prompt with marks -> the prompt, until the continuation has a token."""

    @property
    def are_possible(self) -> bool:
        return self._manager.keeps_prefixes

    def note_marks(self, request: Request, prompt: Prompt) -> None:
        """Remember the prefixes that a prompt marks. They become entries once its first continuation has a token."""
        if not self._manager.keeps_prefixes:
            return
        marks = (*prompt.marks, *(self._woken(request.sequence, prompt.owner) if self._asleep else ()))
        if marks:
            self._marked[request] = replace(prompt, marks=marks)

    def keep_marked(self, moved: Iterable[Request]) -> Iterator[tuple[Request, tuple[CacheEntry, ...]]]:
        for request in moved if self._marked else ():
            prompt = self._marked.pop(request, None)
            if prompt is not None:
                yield request, tuple(self.pin(prompt.prefix(mark.end), mark.keep) for mark in prompt.marks)

    def pin(self, prompt: Prompt, keep: Keep) -> CacheEntry:
        """Make an entry of a prompt's cached blocks, or add the blocks to an existing entry.

        Raises ConfigError if pins are switched off.
        """
        now, sequence = self._clock(), self._sequence_of(prompt)
        until = now + keep.ttl_s if keep.until is None else keep.until
        refresh_s = keep.ttl_s if keep.until is None and keep.is_refreshed else None
        asleep = self._asleep.get(keep.name or entry_name(sequence, prompt.owner, keep.source))
        if asleep is not None:
            until = max(until, self._from_wall(asleep.until))
        entry = self._manager.keep_prefix(
            sequence, EntryWish(until, prompt.owner, keep.source, keep.name, refresh_s), now
        )
        self._tiers.offer_pinned(sequence, entry.num_kept_tokens)
        if self._manager.entry(entry.name) is not None:  # otherwise it found no blocks or no budget, and sleeps on
            self._asleep.pop(entry.name, None)
        return entry

    def unpin(self, prompt: Prompt) -> None:
        """End the entry that `pin` made of this prompt, if the entry was given no name."""
        self.drop(entry_name(self._sequence_of(prompt), prompt.owner))

    def drop(self, name: str) -> None:
        """End an entry now. If a prompt is still being computed for the entry, the entry is not made again when the
        prompt is computed.

        Blocks that another entry keeps, too, stay in the cache.
        """
        self._manager.drop_entry(name)
        self._asleep.pop(name, None)
        self._change_marks(name, None)

    def set_end(self, name: str, until: float) -> None:
        """Move the end of an entry to an earlier or later time. The entry may still have to be made, after its prompt
        is computed.
        """
        self._manager.set_entry_end(name, until, self._clock())
        if name in self._asleep:
            self._asleep[name] = replace(self._asleep[name], until=self._to_wall(until))
        self._change_marks(name, until)

    def _change_marks(self, name: str, until: float | None) -> None:
        for request, prompt in list(self._marked.items()):
            if any(mark.keep.name == name for mark in prompt.marks):
                changed = (
                    mark if mark.keep.name != name else replace(mark, keep=replace(mark.keep, until=until))
                    for mark in prompt.marks
                    if mark.keep.name != name or until is not None
                )
                self._marked[request] = replace(prompt, marks=tuple(changed))

    def entries(self, *, count_kept: bool = True) -> list[CacheEntry]:
        """All entries, the oldest first, including those that lost blocks; see `KVCacheManager.entries`."""
        self._manager.expire_pins(self._clock())
        now = self.wall_clock()
        self._asleep = {name: entry for name, entry in self._asleep.items() if entry.until > now}
        return [*self._manager.entries(count_kept=count_kept), *map(self._sleeping, self._asleep.values())]

    # ----------------------------------------------------------------- restarts

    def open(self, file: EntryFile) -> None:
        """Go on with the entries that an earlier process left in a file, and save this process's entries there.

        An earlier entry has no blocks in memory until a prompt begins with the entry: only tiers have its blocks.
        """
        self._file = file
        self._asleep = {entry.name: entry for entry in file.read() if entry.until > self.wall_clock()}

    def save(self, *, at_once: bool = False) -> None:
        """Write all entries to the file, if there is one. Without `at_once`, at most every `SAVE_EVERY_S` seconds."""
        if self._file is None or not (at_once or time.monotonic() >= self._last_saved + SAVE_EVERY_S):
            return
        entries = self.entries(count_kept=False)
        if entries or self._file.path.exists():
            self._file.write(
                [
                    SavedEntry(
                        entry.name,
                        entry.owner,
                        entry.source,
                        entry.num_tokens,
                        entry.last_key.hex(),
                        self._to_wall(entry.until),
                        entry.refresh_s,
                    )
                    for entry in entries
                    if entry.last_key is not None
                ]
            )
        self._last_saved = time.monotonic()

    def _woken(self, sequence: TokenSequence, owner: str | None) -> Iterator[Mark]:
        """Yield a mark for each entry that an earlier process saved, if the prompt begins with the entry's prefix."""
        number_of = {key.hex(): number for number, key in enumerate(sequence.block_hashes(), start=1)}
        for entry in self._asleep.values():
            number = number_of.get(entry.last_key)
            if number is not None and entry.owner == owner and entry.until > self.wall_clock():
                until = self._from_wall(entry.until) if entry.refresh_s is None else None
                keep = Keep(entry.refresh_s or 1.0, entry.source, entry.name, until)
                yield Mark(number * sequence.block_size, keep)

    def _sleeping(self, entry: SavedEntry) -> CacheEntry:
        last_key = BlockHash(bytes.fromhex(entry.last_key))
        return CacheEntry(
            entry.name,
            entry.owner,
            entry.source,
            entry.num_tokens,
            entry.num_tokens,
            0,
            self._from_wall(entry.until),
            entry.refresh_s,
            last_key,
        )

    def _to_wall(self, until: float) -> float:
        return self.wall_clock() + until - self._clock()

    def _from_wall(self, until: float) -> float:
        return self._clock() + until - self.wall_clock()

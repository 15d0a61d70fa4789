"""Keeper: the prefixes that owners ask to keep, from their wishes to entries of the cache.

Knows prompts, marks and time; knows nothing of steps. A mark of a prompt becomes an entry once the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from foreword.cache import CacheEntry, EntryWish, KVCacheManager, TokenSequence, entry_name
from foreword.engine.prompt import Keep, Mark, Prompt
from foreword.engine.tiering.director import TierDirector
from foreword.request import Request


class Keeper:
    """Makes, changes and ends entries; the cache counts their time and their budgets."""

    def __init__(
        self,
        manager: KVCacheManager,
        tiers: TierDirector,
        sequence_of: Callable[[Prompt], TokenSequence],
        clock: Callable[[], float],
    ) -> None:
        self._manager, self._tiers, self._sequence_of, self._clock = manager, tiers, sequence_of, clock
        self._marked: WeakKeyDictionary[Request, Prompt] = WeakKeyDictionary()
        """Prompts with marks whose first token is not there yet, by their first continuation."""

    def note_marks(self, request: Request, prompt: Prompt) -> None:
        """Keep what a prompt marks, once its first continuation has a token."""
        if prompt.marks and self._manager.keeps_prefixes:
            self._marked[request] = prompt

    def keep_marked(self, moved: Iterable[Request]) -> Iterator[tuple[Request, tuple[CacheEntry, ...]]]:
        """Make entries of the marks of prompts that were computed."""
        for request in moved if self._marked else ():
            prompt = self._marked.pop(request, None)
            if prompt is not None:
                yield request, tuple(self._keep_mark(prompt, mark) for mark in prompt.marks)

    def _keep_mark(self, prompt: Prompt, mark: Mark) -> CacheEntry:
        return self.pin(replace(prompt, token_ids=prompt.token_ids[: mark.end]), mark.keep)

    def pin(self, prompt: Prompt, keep: Keep) -> CacheEntry:
        """Make an entry of a prompt's cached blocks, or add them to it.

        Raises ConfigError if pins are switched off.
        """
        now, sequence = self._clock(), self._sequence_of(prompt)
        until = now + keep.ttl_s if keep.until is None else keep.until
        refresh_s = keep.ttl_s if keep.until is None and keep.is_refreshed else None
        entry = self._manager.keep_prefix(
            sequence, EntryWish(until, prompt.owner, keep.source, keep.name, refresh_s), now
        )
        self._tiers.offer_pinned(sequence, entry.num_kept_tokens)
        return entry

    def unpin(self, prompt: Prompt) -> None:
        """End the entry that `pin` made of this prompt, if it has no name of its own."""
        self.drop(entry_name(self._sequence_of(prompt), prompt.owner))

    def drop(self, name: str) -> None:
        """End an entry now. Prompts on their way do not make it again. Blocks that another entry keeps stay kept."""
        self._manager.drop_entry(name)
        self._change_marks(name, None)

    def set_end(self, name: str, until: float) -> None:
        """Move an entry's end, nearer or farther, for prompts on their way too."""
        self._manager.set_entry_end(name, until, self._clock())
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

    def entries(self) -> list[CacheEntry]:
        """All entries, the oldest first, those too that lost blocks."""
        self._manager.expire_pins(self._clock())
        return self._manager.entries()

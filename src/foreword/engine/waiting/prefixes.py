"""WaitingPrefixes: the waiting requests by what is cached of their prompts.

Knows block keys, and which of them lookups find: the cache's ledger reports changes, so nothing is looked up again.
Knows nothing of the order of service.

A group is the requests of one lane with the same first missing block. Keys are chained, so all that comes before that
block is the same too: if one of them computes it, the others hit it.

    cached     |--- document ---|
    request 1  |--- document ---|-- question a --|     a group for each of the two questions,
    request 2  |--- document ---|-- question b --|     and one of both where the document is missing
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Generic, TypeVar

from foreword.cache import BlockHash, GroupLedger
from foreword.request import Request

GONE = -1
Lane = TypeVar("Lane")
Name = tuple[int, BlockHash | str]


class Group(Generic[Lane]):
    """Requests of a lane with the same cached beginning and the same next block."""

    __slots__ = ("_by_age", "lane", "members", "name", "num_cached", "passed_in", "version")

    def __init__(self, lane: Lane, name: Name, num_cached: int) -> None:
        self.lane = lane
        self.name = name
        self.num_cached = num_cached
        """Blocks of the beginning that are cached."""
        self.members: set[Request] = set()
        self.version = GONE
        """A number of its own for each oldest member that it had; GONE once it has no members."""
        self.passed_in = -1
        """The last step in which it was passed over."""
        self._by_age: list[tuple[tuple[int, int], Request]] = []

    def add(self, request: Request) -> None:
        self.members.add(request)
        heapq.heappush(self._by_age, (request.service_key, request))

    def oldest(self) -> Request:
        """The member that is served first."""
        while self._by_age[0][1] not in self.members:
            heapq.heappop(self._by_age)
        return self._by_age[0][1]


class WaitingPrefixes(Generic[Lane]):
    """Groups of waiting requests, kept up to date by the ledger of the first group of layers.

    With an index that can forget a block and keep the ones after it, a group may count too many blocks until it is
    looked up; the radix index cannot.
    """

    def __init__(self, ledger: GroupLedger, note_change: Callable[[Group[Lane]], None]) -> None:
        """`note_change` gets each group that has members and is new, or has another oldest member or beginning."""
        self._ledger, self._note_change = ledger, note_change
        ledger.watcher = self
        self._versions = count()
        self._group_of: dict[Request, Group[Lane]] = {}
        self._keys: dict[Request, Sequence[BlockHash]] = {}
        """The keys of each prompt's blocks; none if it must not be looked up."""
        self._groups: dict[tuple[Lane, Name], Group[Lane]] = {}
        self._by_missing: dict[BlockHash, set[Group[Lane]]] = {}
        """First missing block -> groups."""
        self._by_last: dict[BlockHash, set[Group[Lane]]] = {}
        """Last cached block -> groups."""

    def __contains__(self, request: Request) -> bool:
        return request in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, request: Request, lane: Lane) -> None:
        keys = self._keys[request] = () if request.skips_cache else self._ledger.keys_of(request.sequence)
        self._put(request, lane, keys, self._num_cached(keys, 0, len(keys)))

    def remove(self, request: Request) -> None:
        group = self._group_of.pop(request)
        was_oldest = group.oldest() is request
        group.members.remove(request)
        if not group.members:
            self._drop(group, self._keys[request])
        elif was_oldest:
            self._note(group)
        del self._keys[request]

    def group_of(self, request: Request) -> Group[Lane]:
        return self._group_of[request]

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that are known to be cached."""
        return self._group_of[request].num_cached * self._ledger.width * request.sequence.block_size

    # ------------------------------------------------------------------ events

    def stored(self, keys: Sequence[BlockHash]) -> None:
        """These blocks are found from now on."""
        if self._by_missing:
            for group in {group for key in keys for group in self._by_missing.get(key, ())}:
                self._spread(group)

    def gone(self, keys: Iterable[BlockHash]) -> None:
        """These blocks are not found any more."""
        if self._by_last:
            for group in {group for key in keys for group in self._by_last.get(key, ())}:
                keys_of_one = self._keys[group.oldest()]
                self._move(group, keys_of_one, self._num_cached(keys_of_one, 0, group.num_cached))

    def cleared(self) -> None:
        """No block is found any more."""
        self.gone(list(self._by_last))

    def _spread(self, group: Group[Lane]) -> None:
        """Put the members of a group whose next block is cached where they belong now."""
        members = sorted(group.members, key=lambda request: request.service_key)
        first_keys = self._keys[members[0]]
        self._drop(group, first_keys)
        least = group.num_cached
        likely = self._num_cached(first_keys, least, len(first_keys))
        for request in members:
            keys = self._keys[request]
            num_cached = likely
            if len(keys) < likely or keys[likely - 1] != first_keys[likely - 1] or self._finds(keys, likely):
                num_cached = self._num_cached(keys, least, len(keys))
            self._put(request, group.lane, keys, num_cached)

    def _move(self, group: Group[Lane], keys: Sequence[BlockHash], num_cached: int) -> None:
        """Move a group to fewer cached blocks, which all its members share, and join it with the group there."""
        members = group.members
        if num_cached == group.num_cached:
            return
        self._drop(group, keys)
        for request in members:
            self._put(request, group.lane, self._keys[request], num_cached)

    # ------------------------------------------------------------------ places

    def _put(self, request: Request, lane: Lane, keys: Sequence[BlockHash], num_cached: int) -> None:
        missing = keys[num_cached] if num_cached < len(keys) else None
        last = keys[num_cached - 1] if num_cached else None
        name: Name = (num_cached, missing or last or request.request_id)
        group = self._groups.get((lane, name))
        if group is None:
            group = self._groups[lane, name] = Group(lane, name, num_cached)
            if missing is not None:
                self._by_missing.setdefault(missing, set()).add(group)
            if last is not None:
                self._by_last.setdefault(last, set()).add(group)
        group.add(request)
        self._group_of[request] = group
        if group.oldest() is request:
            self._note(group)

    def _note(self, group: Group[Lane]) -> None:
        group.version = next(self._versions)
        self._note_change(group)

    def _drop(self, group: Group[Lane], keys: Sequence[BlockHash]) -> None:
        """Forget a group; `keys`: those of one of its members."""
        del self._groups[group.lane, group.name]
        group.version = GONE
        at = group.num_cached
        for table, number in ((self._by_missing, at), (self._by_last, at - 1)):
            if 0 <= number < len(keys):
                groups = table[keys[number]]
                groups.remove(group)
                if not groups:
                    del table[keys[number]]

    def _finds(self, keys: Sequence[BlockHash], number: int) -> bool:
        return number < len(keys) and keys[number] in self._ledger

    def _num_cached(self, keys: Sequence[BlockHash], least: int, most: int) -> int:
        """The number of leading blocks that are found, between two bounds; found blocks have no gaps before them."""
        return bisect.bisect_left(keys, True, least, most, key=lambda key: key not in self._ledger)

    def check_integrity(self) -> None:
        """Raise AssertionError if groups, members and tables contradict each other, or what the ledger finds."""
        for request, group in self._group_of.items():
            assert request in group.members
            keys, at = self._keys[request], group.num_cached
            assert not self._finds(keys, at), "a group missed a new block"
            assert not at or self._finds(keys, at - 1), "a group counts a block that is gone"
        assert self._keys.keys() == self._group_of.keys()
        assert sum(len(group.members) for group in self._groups.values()) == len(self._group_of)
        assert all(group.members for group in self._groups.values()), "a group is empty"
        for table in (self._by_missing, self._by_last):
            assert all(table.values())
            assert {group for groups in table.values() for group in groups} <= set(self._groups.values())

"""WaitingPrefixes: the waiting requests by what is cached of their prompts.

Knows block keys, and which of them lookups find: the cache's ledger reports changes, so nothing is looked up again.
Knows nothing of the order of service.

A family is the requests of one lane with the same first missing block. Keys are chained, so all that comes before that
block is the same too: if one of them computes it, the others hit it.

    cached     |--- document ---|
    request 1  |--- document ---|-- question a --|     a family for each of the two questions,
    request 2  |--- document ---|-- question b --|     and one of both where the document is missing
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

from foreword.cache import BlockHash, GroupLedger
from foreword.request import Request

GONE = -1
Name = tuple[int, BlockHash | str]


class Lane(Protocol):
    """Requests among which the order of service is decided."""

    def note(self, family: Family) -> None:
        """Note a family of this lane that is new, or has another oldest member or another beginning."""


class Family:
    """Requests of a lane with the same cached beginning and the same next block."""

    __slots__ = ("_by_age", "lane", "members", "name", "num_cached", "oldest", "passed_in", "version")

    def __init__(self, lane: Lane, name: Name, num_cached: int, oldest: Request) -> None:
        self.lane = lane
        self.name = name
        self.num_cached = num_cached
        """Blocks of the beginning that are cached."""
        self.oldest = oldest
        """The member that is served first."""
        self.members = {oldest}
        self.version = GONE
        """A number of its own for each oldest member that it had; GONE once it has no members."""
        self.passed_in = -1
        """The last step in which it was passed over."""
        self._by_age: list[tuple[tuple[int, int], Request]] = []
        """The members but the oldest, and some that have left."""

    def add(self, request: Request) -> None:
        self.members.add(request)
        if request.service_key < self.oldest.service_key:
            request, self.oldest = self.oldest, request
        heapq.heappush(self._by_age, (request.service_key, request))

    def remove(self, request: Request) -> None:
        self.members.remove(request)
        if request is self.oldest and self.members:
            while (following := heapq.heappop(self._by_age)[1]) not in self.members:
                pass
            self.oldest = following


class WaitingPrefixes:
    """Families of waiting requests, kept up to date by the ledger of the first group of layers.

    With an index that can forget a block and keep the ones after it, a family may count too many blocks until it is
    looked up; the radix index cannot.
    """

    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger
        ledger.watcher = self
        self._versions = count()
        self._family_of: dict[Request, Family] = {}
        self._keys: dict[Request, Sequence[BlockHash]] = {}
        """The keys of each prompt's blocks; none if it must not be looked up."""
        self._families: dict[tuple[Lane, Name], Family] = {}
        self._by_missing: dict[BlockHash, set[Family]] = {}
        """First missing block -> families."""
        self._by_last: dict[BlockHash, set[Family]] = {}
        """Last cached block -> families."""

    def __contains__(self, request: Request) -> bool:
        return request in self._family_of

    def __len__(self) -> int:
        return len(self._family_of)

    def add(self, request: Request, lane: Lane) -> None:
        keys = self._keys[request] = () if request.skips_cache else self._ledger.keys_of(request.sequence)
        self._put(request, lane, self._num_cached(keys, 0, len(keys)))

    def remove(self, request: Request) -> None:
        family = self._family_of.pop(request)
        was_oldest = family.oldest is request
        family.remove(request)
        if not family.members:
            self._drop(family)
        elif was_oldest:
            self._note(family)
        del self._keys[request]

    def family_of(self, request: Request) -> Family:
        return self._family_of[request]

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that are known to be cached."""
        return self._family_of[request].num_cached * self._ledger.width * request.sequence.block_size

    # ------------------------------------------------------------------ events

    def stored(self, keys: Sequence[BlockHash]) -> None:
        """These blocks are found from now on."""
        if self._by_missing:
            for family in {family for key in keys for family in self._by_missing.get(key, ())}:
                self._spread(family)

    def gone(self, keys: Iterable[BlockHash]) -> None:
        """These blocks are not found any more."""
        if not self._by_last:
            return
        for key in keys:
            families = list(self._by_last.get(key, ()))
            if families:  # all of them share the blocks up to this one
                own = self._keys[families[0].oldest]
                num_cached = self._num_cached(own, 0, families[0].num_cached)
                for family in families if num_cached < families[0].num_cached else ():
                    self._move(family, num_cached)

    def cleared(self) -> None:
        """No block is found any more."""
        self.gone(list(self._by_last))

    def _spread(self, family: Family) -> None:
        """Put the members of a family whose next block is cached where they belong now."""
        least, own = family.num_cached, self._keys[family.oldest]
        likely = self._num_cached(own, least, len(own))
        places: dict[BlockHash | None, int] = {}
        """The next block of each member -> cached blocks before it."""
        for request in family.members:
            keys = self._keys[request]
            num_cached = likely
            if len(keys) < likely or keys[likely - 1] != own[likely - 1] or self._finds(keys, likely):
                num_cached = self._num_cached(keys, least, len(keys))
            places[keys[num_cached] if num_cached < len(keys) else None] = num_cached
        if len(places) == 1 and None not in places:
            return self._move(family, likely)
        self._drop(family)
        for request in sorted(family.members, key=lambda request: request.service_key):
            keys = self._keys[request]
            self._put(request, family.lane, self._num_cached(keys, least, len(keys)))
        return None

    # ------------------------------------------------------------------ places

    def _move(self, family: Family, num_cached: int) -> None:
        """Move a family whose members have this number of cached blocks and the same next one."""
        self._drop(family)
        name = self._name(family.oldest, num_cached)
        there = self._families.get((family.lane, name))
        if there is None:
            family.name, family.num_cached = name, num_cached
            self._enter(family)
            self._note(family)
            return
        for request in family.members:
            self._put(request, family.lane, num_cached)

    def _put(self, request: Request, lane: Lane, num_cached: int) -> None:
        name = self._name(request, num_cached)
        family = self._families.get((lane, name))
        if family is None:
            family = Family(lane, name, num_cached, request)
            self._enter(family)
        else:
            family.add(request)
        self._family_of[request] = family
        if family.oldest is request:
            self._note(family)

    def _name(self, request: Request, num_cached: int) -> Name:
        """Names a family by its next block; if none is missing, by its last one, or its only request."""
        keys = self._keys[request]
        if num_cached < len(keys):
            return num_cached, keys[num_cached]
        return num_cached, keys[-1] if keys else request.request_id

    def _enter(self, family: Family) -> None:
        self._families[family.lane, family.name] = family
        for table, key in self._entries(family):
            table.setdefault(key, set()).add(family)

    def _drop(self, family: Family) -> None:
        """Forget a family, whose oldest member is still known."""
        del self._families[family.lane, family.name]
        family.version = GONE
        for table, key in self._entries(family):
            families = table[key]
            families.remove(family)
            if not families:
                del table[key]

    def _entries(self, family: Family) -> Iterator[tuple[dict[BlockHash, set[Family]], BlockHash]]:
        """The tables that have a family, and its key in each."""
        keys, at = self._keys[family.oldest], family.num_cached
        if at < len(keys):
            yield self._by_missing, keys[at]
        if at:
            yield self._by_last, keys[at - 1]

    def _note(self, family: Family) -> None:
        family.version = next(self._versions)
        family.lane.note(family)

    def _finds(self, keys: Sequence[BlockHash], number: int) -> bool:
        return number < len(keys) and keys[number] in self._ledger

    def _num_cached(self, keys: Sequence[BlockHash], least: int, most: int) -> int:
        """The number of leading blocks that are found, between two bounds; found blocks have no gaps before them."""
        return bisect.bisect_left(keys, True, least, most, key=lambda key: key not in self._ledger)

    def check_integrity(self) -> None:
        """Raise AssertionError if families, members and tables contradict each other, or what the ledger finds."""
        for request, family in self._family_of.items():
            assert request in family.members
            keys, at = self._keys[request], family.num_cached
            assert not self._finds(keys, at), "a family missed a new block"
            assert not at or self._finds(keys, at - 1), "a family counts a block that is gone"
        assert self._keys.keys() == self._family_of.keys()
        assert sum(len(family.members) for family in self._families.values()) == len(self._family_of)
        assert all(family.members for family in self._families.values()), "a family is empty"
        for table in (self._by_missing, self._by_last):
            assert all(table.values())
            assert {family for families in table.values() for family in families} <= set(self._families.values())

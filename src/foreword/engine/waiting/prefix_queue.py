"""PrefixQueue: serves what is cached first, within a bound on delay.

The order: tenants by turns; of a tenant priorities; within both (a lane) the family of which most is cached, and of a
family the oldest request.

A request may be overtaken, within its lane, by later ones that together take at most `max_overtake_s` seconds:

    arrival     1 (new document)   2 (cached)   3 (cached)   4 (new)   5 (cached)
    service     2   3   5   1   4                  2, 3 and 5 take time from 1, and 5 from 4, within the bound

What later requests took from a request depends on its arrival alone, and most was taken from the oldest. So one sum
per lane decides, however many wait.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from foreword.cache import GroupLedger
from foreword.engine.waiting.pace import Pace
from foreword.engine.waiting.prefixes import Family, WaitingPrefixes
from foreword.engine.waiting.turns import Turns
from foreword.request import Request

MAX_STALE = 4
"""Entries of a lane's heaps for each waiting request; beyond, they are made anew."""


class Lane:
    """The waiting requests of one priority and one tenant."""

    def __init__(self, rank: int, tenant: str | None) -> None:
        self.rank, self.tenant = rank, tenant
        self.waiting: set[Request] = set()
        self.blocked_in = -1
        """The last step in which an overtaking request found no blocks."""
        self._by_match: list[tuple[int, tuple[int, int], int, Family]] = []
        self._by_age: list[tuple[tuple[int, int], int, Family]] = []
        self._passed_by_match = self._by_match[:]
        """What was taken from a heap because its family was passed over in this step."""
        self._passed_by_age = self._by_age[:]
        self._arrivals: list[tuple[tuple[int, int], Request]] = []
        self._overtook: list[tuple[tuple[int, int], float]] = []
        """Service keys and seconds of requests that overtook one which still waits, in order of arrival."""
        self._taken_s = 0.0
        """The sum of these seconds."""

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        heapq.heappush(self._arrivals, (request.service_key, request))

    def note(self, family: Family) -> None:
        """Note a family that is new, or has changed."""
        if max(len(self._by_match), len(self._by_age)) > 64 + MAX_STALE * len(self.waiting):
            entries = self._by_match + self._passed_by_match
            families = {one for _, _, version, one in entries if version == one.version}
            for heap in (self._by_match, self._by_age, self._passed_by_match, self._passed_by_age):
                heap.clear()
            for one in families:
                self._push(one)
        self._push(family)

    def _push(self, family: Family) -> None:
        age = family.oldest.service_key
        heapq.heappush(self._by_match, (-family.num_cached, age, family.version, family))
        heapq.heappush(self._by_age, (age, family.version, family))

    def begin_step(self) -> None:
        """Offer again what was passed over in the step before."""
        for by_match in self._passed_by_match:
            heapq.heappush(self._by_match, by_match)
        for by_age in self._passed_by_age:
            heapq.heappush(self._by_age, by_age)
        self._passed_by_match.clear()
        self._passed_by_age.clear()

    def best(self, step: int) -> Request | None:
        """The request of which most is cached, among those that were not passed over in this step."""
        while self._by_match:
            _, _, version, family = self._by_match[0]
            if version == family.version:
                if family.passed_in != step:
                    return family.oldest
                self._passed_by_match.append(self._by_match[0])
            heapq.heappop(self._by_match)
        return None

    def likely(self) -> Iterator[Request]:
        """Requests of which much is cached: the front of a heap is not quite in order."""
        return (family.oldest for _, _, version, family in self._by_match[:32] if version == family.version)

    def oldest(self, step: int) -> Request | None:
        """The oldest of them."""
        while self._by_age:
            _, version, family = self._by_age[0]
            if version == family.version:
                if family.passed_in != step:
                    return family.oldest
                self._passed_by_age.append(self._by_age[0])
            heapq.heappop(self._by_age)
        return None

    # ------------------------------------------------------------------- bound

    def start(self, request: Request, seconds: float) -> None:
        """A request starts, and takes this time from those that came before it."""
        self.waiting.remove(request)
        while self._arrivals and self._arrivals[0][1] not in self.waiting:
            heapq.heappop(self._arrivals)
        first = self._arrivals[0][0] if self._arrivals else None
        num_past = bisect.bisect(self._overtook, (first, float("inf"))) if first else len(self._overtook)
        if num_past:
            self._taken_s -= sum(seconds for _, seconds in self._overtook[:num_past])
            del self._overtook[:num_past]
        if first is not None and request.service_key > first and 0.0 < seconds < float("inf"):
            bisect.insort(self._overtook, (request.service_key, seconds))
            self._taken_s += seconds
        if not self._overtook:
            self._taken_s = 0.0  # no error of rounding adds up

    def seconds_taken_from(self, request: Request) -> float:
        """What later requests took from a waiting one since it came."""
        num_before = bisect.bisect(self._overtook, (request.service_key, float("inf")))
        return self._taken_s - sum(seconds for _, seconds in self._overtook[:num_before])


class PrefixQueue:
    """Serves the longest cached prefix first: see this module's docstring."""

    def __init__(self, ledger: GroupLedger, pace: Pace, *, max_overtake_s: float, quantum: int) -> None:
        """`quantum`: tokens that a tenant gets when its turn comes."""
        self._ledger, self._pace, self._max_overtake_s, self._quantum = ledger, pace, max_overtake_s, quantum
        self.clear()

    def clear(self) -> None:
        self._prefixes = WaitingPrefixes(self._ledger)
        self._lanes: dict[str | None, dict[int, Lane]] = {}
        self._turns = Turns(self._quantum)
        self._step = 0

    def add(self, request: Request) -> None:
        rank, tenant = request.service_key[0], request.tenant
        lanes = self._lanes.setdefault(tenant, {})
        lane = lanes.get(rank)
        if lane is None:
            lane = lanes[rank] = Lane(rank, tenant)
            self._turns.join(tenant)
        lane.add(request)
        self._prefixes.add(request, lane)

    def remove(self, request: Request) -> None:
        self._leave(request, 0.0)

    def start(self, request: Request, num_tokens: int) -> None:
        lane = self._lane_of(request)
        self._turns.charge(lane.tenant, num_tokens)
        self._leave(request, self._pace.seconds(request, num_tokens))

    def _leave(self, request: Request, seconds: float) -> None:
        lane = self._lane_of(request)
        self._prefixes.remove(request)
        lane.start(request, seconds)
        if not lane.waiting:
            del self._lanes[lane.tenant][lane.rank]
            if not self._lanes[lane.tenant]:
                del self._lanes[lane.tenant]
                self._turns.leave(lane.tenant)

    def note_end(self, request: Request) -> None:
        num_tokens = request.num_output_tokens
        self._pace.note_answer(num_tokens)
        self._turns.charge(request.tenant, num_tokens)

    def candidates(self) -> Iterator[Request]:
        self._step += 1
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.begin_step()
        idle: set[str | None] = set()
        while len(idle) < len(self._lanes):
            tenant = self._turns.next(idle)
            by_rank = sorted(self._lanes[tenant].items())
            request = next((one for _, lane in by_rank if (one := self._choose(lane)) is not None), None)
            if request is None:
                idle.add(tenant)
                continue
            yield request
            if request in self._prefixes:
                self._prefixes.family_of(request).passed_in = self._step
            idle &= self._lanes.keys()

    def _choose(self, lane: Lane) -> Request | None:
        """The next request of a lane; None if all of its families were passed over."""
        best, oldest = lane.best(self._step), lane.oldest(self._step)
        if best is None or oldest is None or best is oldest or lane.blocked_in == self._step:
            return oldest
        num_tokens = len(best) - self._prefixes.num_cached_tokens(best)
        taken = lane.seconds_taken_from(oldest) + self._pace.seconds(best, num_tokens)
        return best if taken <= self._max_overtake_s else oldest

    def likely(self, most: int) -> Iterable[Request]:
        found = (r for lanes in self._lanes.values() for lane in lanes.values() for r in lane.likely())
        return islice(found, most)

    def may_pass(self, request: Request) -> bool:
        lane = self._lane_of(request)
        if request is lane.oldest(self._step):
            return False
        lane.blocked_in = self._step
        return True

    def _lane_of(self, request: Request) -> Lane:
        return self._lanes[request.tenant][request.service_key[0]]

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Request]:
        lanes = [lane for by_tenant in self._lanes.values() for lane in by_tenant.values()]
        return iter(sorted((r for lane in lanes for r in lane.waiting), key=lambda request: request.service_key))

    def check_integrity(self) -> None:
        self._prefixes.check_integrity()
        self._turns.check_integrity(self._lanes)
        for lanes in self._lanes.values():
            for lane in lanes.values():
                assert lane.waiting, "a lane is empty"
                assert all(self._lane_of(request) is lane for request in lane.waiting)
        assert sum(1 for _ in self) == len(self._prefixes)

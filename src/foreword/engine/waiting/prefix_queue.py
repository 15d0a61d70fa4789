"""PrefixQueue: serves requests with cached prefixes first, within a bound on delay.

Tenants take turns, and a tenant's requests are served in order of priority. The requests of one tenant and one priority
are a lane. Requests of a lane with the same first missing block are a family. The family with the most cached blocks
goes first, and in a family the oldest request.

A request may be overtaken, within its lane, by later requests that together take at most `max_overtake_s` seconds:

    arrival     1 (new document)   2 (cached)   3 (cached)   4 (new)   5 (cached)
    service     2   3   5   1   4                  2, 3 and 5 take time from 1, and 5 from 4, within the bound

How long later requests have delayed a request depends only on when that request arrived, and is longest for the oldest
request. So one sum per lane is enough, however many requests wait.

`WaitingPrefixes` sorts waiting requests by the cached parts of their prompts. The cache's ledger reports changes, so
nothing is looked up again. Keys are chained, so requests with the same first missing block have the same blocks before
it, too: if one of the requests computes the block, the others hit it.

    cached     |--- document ---|
    request 1  |--- document ---|-- question a --|     a family for each of the two questions,
    request 2  |--- document ---|-- question b --|     and one family of both while the document is missing
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

from foreword.batch import Entries
from foreword.cache import BlockHash, GroupLedger, KVCacheManager
from foreword.config import SchedulerConfig
from foreword.engine.waiting.queue import TurnQueue, Turns, WaitingQueue
from foreword.errors import ConfigError
from foreword.request import Request

GONE = -1
Name = tuple[int, BlockHash | str]
MAX_STALE = 4
"""The most entries of a lane's heap for each waiting request; with more entries, the heaps are rebuilt."""


class Family:
    """Requests of a lane with the same cached beginning and the same next block."""

    __slots__ = ("_by_age", "lane", "members", "name", "num_cached", "oldest", "passed_in", "version")

    def __init__(self, lane: Lane, name: Name, num_cached: int, oldest: Request) -> None:
        self.lane = lane
        self.name = name
        self.num_cached = num_cached
        """The number of cached blocks with which each member begins."""
        self.oldest = oldest
        """The member that is served first."""
        self.members = {oldest: None}
        """The members in the order in which they came. (The order of a set would depend on addresses.)"""
        self.version = GONE
        """A unique number, new after each change of `oldest` or `num_cached`; GONE once the family is dropped."""
        self.passed_in = -1
        """The last step in which this family was passed over."""
        self._by_age: list[tuple[tuple[int, int], Request]] = []
        """Heap of the members except the oldest; it may also have members that left."""

    def add(self, request: Request) -> None:
        self.members[request] = None
        if request.service_key < self.oldest.service_key:
            request, self.oldest = self.oldest, request
        heapq.heappush(self._by_age, (request.service_key, request))

    def remove(self, request: Request) -> None:
        del self.members[request]
        if request is self.oldest and self.members:
            while (following := heapq.heappop(self._by_age)[1]) not in self.members:
                pass
            self.oldest = following


class WaitingPrefixes:
    """Families of waiting requests, kept up to date by the ledger of the first group of layers.

    Some indexes can forget a block but keep the blocks after it. Then a family may count too many blocks until one of
    its requests is looked up. The radix index also forgets all blocks after a forgotten block.
    """

    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger
        ledger.watcher = self
        self._versions = count()
        self._family_of: dict[Request, Family] = {}
        self._keys: dict[Request, Sequence[BlockHash]] = {}
        """The keys of each prompt's blocks; empty if the prompt must not be looked up."""
        self._families: dict[tuple[Lane, Name], Family] = {}
        self._by_missing: dict[BlockHash, dict[Family, None]] = {}
        """First missing block -> families."""
        self._by_last: dict[BlockHash, dict[Family, None]] = {}
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
        """The number of a waiting request's tokens that are known to be cached."""
        return self._family_of[request].num_cached * self._ledger.width * request.sequence.block_size

    # ------------------------------------------------------------------ events

    def stored(self, keys: Sequence[BlockHash]) -> None:
        """Record that lookups find these blocks from now on."""
        if self._by_missing:
            for family in dict.fromkeys(family for key in keys for family in self._by_missing.get(key, ())):
                self._spread(family)

    def gone(self, keys: Iterable[BlockHash]) -> None:
        """Record that lookups no longer find these blocks."""
        if not self._by_last:
            return
        for key in keys:
            families = list(self._by_last.get(key, ()))
            if families:  # all these families share the blocks up to this key
                member_keys = self._keys[families[0].oldest]
                num_cached = self._num_cached(member_keys, 0, families[0].num_cached)
                for family in families if num_cached < families[0].num_cached else ():
                    self._move(family, num_cached)

    def cleared(self) -> None:
        """Record that lookups no longer find any block."""
        self.gone(list(self._by_last))

    def _spread(self, family: Family) -> None:
        """Divide a family whose next block is cached now: each member goes to the family to which it belongs."""
        low, oldest_keys = family.num_cached, self._keys[family.oldest]
        likely = self._num_cached(oldest_keys, low, len(oldest_keys))
        places: dict[BlockHash | None, int] = {}
        """Next missing block of a member, None if no block is missing -> the number of cached blocks before it."""
        for request in family.members:
            keys = self._keys[request]
            num_cached = likely
            if len(keys) < likely or keys[likely - 1] != oldest_keys[likely - 1] or self._finds(keys, likely):
                num_cached = self._num_cached(keys, low, len(keys))
            places[keys[num_cached] if num_cached < len(keys) else None] = num_cached
        if len(places) == 1 and None not in places:
            return self._move(family, likely)
        self._drop(family)
        for request in sorted(family.members, key=lambda request: request.service_key):
            keys = self._keys[request]
            self._put(request, family.lane, self._num_cached(keys, low, len(keys)))
        return None

    # ------------------------------------------------------------------ places

    def _move(self, family: Family, num_cached: int) -> None:
        """Move a family whose members now have `num_cached` cached blocks each and the same next block."""
        self._drop(family)
        name = self._name(family.oldest, num_cached)
        existing = self._families.get((family.lane, name))
        if existing is None:
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
        """Name a family by its first missing block; if no block is missing, by the last block, or by the request."""
        keys = self._keys[request]
        if num_cached < len(keys):
            return num_cached, keys[num_cached]
        return num_cached, keys[-1] if keys else request.request_id

    def _enter(self, family: Family) -> None:
        self._families[family.lane, family.name] = family
        for table, key in self._entries(family):
            table.setdefault(key, {})[family] = None

    def _drop(self, family: Family) -> None:
        """Forget a family. The keys of its oldest member must still be known."""
        del self._families[family.lane, family.name]
        family.version = GONE
        for table, key in self._entries(family):
            families = table[key]
            del families[family]
            if not families:
                del table[key]

    def _entries(self, family: Family) -> Iterator[tuple[dict[BlockHash, dict[Family, None]], BlockHash]]:
        """Yield each table that has the family, and the family's key in that table."""
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

    def _num_cached(self, keys: Sequence[BlockHash], low: int, high: int) -> int:
        """The number of leading cached blocks, from `low` to `high`. Assumes that no block after a missing block is
        cached.
        """
        return bisect.bisect_left(keys, True, low, high, key=lambda key: key not in self._ledger)

    def check_integrity(self) -> None:
        """Raise AssertionError if families, members and tables contradict each other or the ledger."""
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
        """Entries that were taken from a heap because their families were passed over in this step."""
        self._passed_by_age = self._by_age[:]
        self._arrivals: list[tuple[tuple[int, int], Request]] = []
        self._overtook: list[tuple[tuple[int, int], float]] = []
        """(Service key, seconds of delay) of each request that overtook a waiting request, in order of arrival."""
        self._taken_s = 0.0
        """The sum of these seconds."""

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        heapq.heappush(self._arrivals, (request.service_key, request))

    def note(self, family: Family) -> None:
        """Record a family that is new, or has changed."""
        if max(len(self._by_match), len(self._by_age)) > 64 + MAX_STALE * len(self.waiting):
            entries = self._by_match + self._passed_by_match
            families = {each for _, _, version, each in entries if version == each.version}
            for heap in (self._by_match, self._by_age, self._passed_by_match, self._passed_by_age):
                heap.clear()
            for each in families:
                self._push(each)
        self._push(family)

    def _push(self, family: Family) -> None:
        age = family.oldest.service_key
        heapq.heappush(self._by_match, (-family.num_cached, age, family.version, family))
        heapq.heappush(self._by_age, (age, family.version, family))

    def begin_step(self) -> None:
        """Offer the families again that were passed over in the step before."""
        for by_match in self._passed_by_match:
            heapq.heappush(self._by_match, by_match)
        for by_age in self._passed_by_age:
            heapq.heappush(self._by_age, by_age)
        self._passed_by_match.clear()
        self._passed_by_age.clear()

    def best(self, step: int) -> Request | None:
        """The oldest request of the family with the most cached blocks; skips families passed over in this step."""
        while self._by_match:
            _, _, version, family = self._by_match[0]
            if version == family.version:
                if family.passed_in != step:
                    return family.oldest
                self._passed_by_match.append(self._by_match[0])
            heapq.heappop(self._by_match)
        return None

    def likely(self) -> Iterator[Request]:
        """Requests with many cached blocks, from the front of the heap. Others may have more cached blocks, because a
        heap is not quite in order.
        """
        return (family.oldest for _, _, version, family in self._by_match[:32] if version == family.version)

    def oldest(self, step: int) -> Request | None:
        """The oldest request of the families that were not passed over in this step; None if all were."""
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
        """Record that a request starts, and so delays the requests that came before it by `seconds`."""
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
            self._taken_s = 0.0  # so that errors of rounding do not add up

    def seconds_taken_from(self, request: Request) -> float:
        """The seconds by which requests that arrived later, but started earlier, have delayed a waiting request."""
        num_before = bisect.bisect(self._overtook, (request.service_key, float("inf")))
        return self._taken_s - sum(seconds for _, seconds in self._overtook[:num_before])


class PrefixQueue:
    """Serves the longest cached prefix first: see this module's docstring."""

    def __init__(self, ledger: GroupLedger, pace: Pace, *, max_overtake_s: float, quantum: int) -> None:
        """`quantum`: the tokens that a tenant may compute when its turn comes."""
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
        # `start` has charged the tokens that another engine generated.
        self._turns.charge(request.tenant, num_tokens - request.num_answered_tokens)

    def candidates(self) -> Iterator[Request]:
        self._step += 1
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.begin_step()
        idle: set[str | None] = set()
        while len(idle) < len(self._lanes):
            tenant = self._turns.next(idle)
            by_rank = sorted(self._lanes[tenant].items())
            request = next((chosen for _, lane in by_rank if (chosen := self._choose(lane)) is not None), None)
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
        seconds = lane.seconds_taken_from(oldest) + self._pace.seconds(best, num_tokens)
        return best if seconds <= self._max_overtake_s else oldest

    def likely(self, limit: int) -> Iterable[Request]:
        requests = (r for lanes in self._lanes.values() for lane in lanes.values() for r in lane.likely())
        return islice(requests, limit)

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


KEPT = 0.9
"""At each step or answer, the weight of all earlier values is multiplied by this number."""


class Mean:
    """A mean in which older values count less."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def note(self, total: float, count: float) -> None:
        """Record `count` values that add up to `total`."""
        self._sum, self._weight = KEPT * self._sum + total, KEPT * self._weight + count

    @property
    def value(self) -> float | None:
        """The mean; None before the first value."""
        return self._sum / self._weight if self._weight else None


class Pace:
    """Estimates how many seconds a prompt token and an answer token take, from the steps so far, and how long an answer
    gets, from earlier answers.

    A step's time is divided equally among its tokens. So a request that decodes in a large batch takes little time from
    others, and one that decodes alone takes the whole step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._began = clock()
        self._prompt_token_s, self._answer_token_s, self._answer_tokens = Mean(), Mean(), Mean()

    def begin_step(self) -> None:
        """Record that a step is planned. Called only while no other step is being computed."""
        self._began = self._clock()

    def note_step(self, entries: Entries) -> None:
        """Record that the oldest planned step was computed."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        num_tokens = int((entries.ends - entries.starts).sum())
        mean = self._prompt_token_s if entries.progress["is_new"].any() else self._answer_token_s
        mean.note(seconds, num_tokens)

    def note_answer(self, num_tokens: int) -> None:
        """Record that an answer has ended after `num_tokens` tokens."""
        self._answer_tokens.note(num_tokens, 1)

    def seconds(self, request: Request, num_tokens: int) -> float:
        """Estimate the seconds that a request takes if it computes `num_tokens` tokens before its first new token.

        The answer is expected to be as long as earlier answers, or as long as allowed if no answer has ended. Returns
        infinity before the first step that computed prompts.
        """
        prompt_token_s = self._prompt_token_s.value
        if prompt_token_s is None:
            return float("inf")
        remaining = request.max_tokens - request.num_output_tokens
        answer_token_s = self._answer_token_s.value or prompt_token_s
        return num_tokens * prompt_token_s + min(remaining, self._answer_tokens.value or remaining) * answer_token_s


def make_queue(manager: KVCacheManager, config: SchedulerConfig, pace: Pace) -> WaitingQueue:
    """Make an empty queue. Raises ConfigError if the policy needs a cache ledger, and the cache has none."""
    if config.scheduling_policy == "fcfs":
        return TurnQueue(config.max_num_batched_tokens, lambda _: None)  # as if all requests had one tenant
    if config.scheduling_policy == "priority":
        return TurnQueue(config.max_num_batched_tokens)
    if manager.ledger is None:
        raise ConfigError(
            "scheduling_policy='prefix' needs a cache that keeps a ledger; give ledger=CacheLedger(num_blocks), and "
            "leave prefix caching on"
        )
    return PrefixQueue(
        manager.ledger.groups[0], pace, max_overtake_s=config.max_overtake_s, quantum=config.max_num_batched_tokens
    )

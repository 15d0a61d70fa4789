"""WaitingQueue: the protocol of queues, and the queue in order of arrival and priority."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Protocol

from foreword.request import Request

Tenant = str | None
_ORDER = attrgetter("service_key")


class Turns:
    """Deficit round robin (Shreedhar and Varghese, 1995), in computed tokens.

    A tenant is served while it has credit. It gets `quantum` tokens of credit whenever its turn comes and it has none.
    A request may overdraw the credit. Then its tenant is not served until its turns have paid the debt. The tokens
    served to two tenants that always have waiting requests differ by at most a quantum and the largest request of each,
    whatever other tenants send.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._ring: deque[Tenant] = deque()
        self._credit: dict[Tenant, int] = {}
        """Tenant that waits -> its credit in tokens. Debts of other tenants stay here until no tenant waits."""

    def join(self, tenant: Tenant) -> None:
        """Record that a tenant has waiting requests. Changes nothing if it had some before."""
        if tenant not in self._ring:
            self._ring.append(tenant)
            self._credit.setdefault(tenant, 0)

    def leave(self, tenant: Tenant) -> None:
        """Record that a tenant has no waiting request. The tenant keeps its debt, and loses its credit."""
        self._ring.remove(tenant)
        if self._credit[tenant] >= 0:
            del self._credit[tenant]
        if not self._ring:
            self._credit.clear()

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Charge a tenant for tokens that were computed or will be. Nothing is charged while no tenant waits."""
        if self._ring:
            self._credit[tenant] = self._credit.get(tenant, 0) - num_tokens

    def next(self, skipped: Collection[Tenant]) -> Tenant:
        """The tenant whose turn it is; tenants in `skipped` cannot use a turn. At least one tenant is not skipped."""
        while True:
            tenant = self._ring[0]
            if tenant not in skipped:
                if self._credit[tenant] > 0:
                    return tenant
                self._credit[tenant] += self._quantum
            self._ring.rotate(-1)

    def check_integrity(self, tenants: Collection[Tenant]) -> None:
        """Raise AssertionError if the tenants that have turns are not `tenants`."""
        assert sorted(map(str, self._ring)) == sorted(map(str, tenants)), "turns and waiting tenants differ"
        assert all(self._credit[tenant] <= self._quantum for tenant in self._ring), "a tenant saved credit"


class WaitingQueue(Protocol):
    """Requests that wait, and the order in which the scheduler tries to start them."""

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted."""

    def remove(self, request: Request) -> None:
        """Forget a waiting request that has ended."""

    def start(self, request: Request, num_tokens: int) -> None:
        """Forget a waiting request that runs now, and computes `num_tokens` tokens before its first new token."""

    def candidates(self) -> Iterator[Request]:
        """Yield the requests to try in this step. Each is chosen only when the caller asks for it.

        A request that still waits when the next request is asked for cannot run in this step, and is passed over.
        """

    def likely(self, limit: int) -> Iterable[Request]:
        """Requests that the next step is likely to try first, at most `limit`. Changes nothing."""

    def may_pass(self, request: Request) -> bool:
        """Whether other requests may be tried after `request`, a candidate for which there are too few blocks."""

    def note_end(self, request: Request) -> None:
        """Record that a running request has ended."""

    def clear(self) -> None:
        """Forget all requests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the queue contradicts itself."""


class TurnQueue:
    """Serves tenants in turn, and the requests of a tenant by service key: by rank, then by arrival.

    A request that does not fit holds up all later requests. A priority orders only the requests of one tenant. Other
    tenants do not wait longer because of it.
    """

    def __init__(self, quantum: int, tenant_of: Callable[[Request], Tenant] = attrgetter("tenant")) -> None:
        """`quantum`: the tokens that a tenant may compute when its turn comes."""
        self._quantum, self._tenant_of = quantum, tenant_of
        self.clear()

    def clear(self) -> None:
        self._requests: dict[Tenant, list[Request]] = {}
        """Tenant -> its waiting requests in service order."""
        self._turns = Turns(self._quantum)

    def add(self, request: Request) -> None:
        tenant = self._tenant_of(request)
        bisect.insort(self._requests.setdefault(tenant, []), request, key=_ORDER)
        self._turns.join(tenant)

    def remove(self, request: Request) -> None:
        tenant = self._tenant_of(request)
        requests = self._requests[tenant]
        del requests[bisect.bisect_left(requests, request.service_key, key=_ORDER)]
        if not requests:
            del self._requests[tenant]
            self._turns.leave(tenant)

    def start(self, request: Request, num_tokens: int) -> None:
        self._turns.charge(self._tenant_of(request), num_tokens)
        self.remove(request)

    def candidates(self) -> Iterator[Request]:
        num_passed: dict[Tenant, int] = {}
        idle: set[Tenant] = set()
        while len(idle) < len(self._requests):
            tenant = self._turns.next(idle)
            requests, at = self._requests[tenant], num_passed.get(tenant, 0)
            if at >= len(requests):
                idle.add(tenant)
                continue
            request = requests[at]
            yield request
            requests = self._requests.get(tenant, [])
            if at >= len(requests) or requests[at] is not request:  # requests came or went
                at = bisect.bisect_left(requests, request.service_key, key=_ORDER)
            num_passed[tenant] = at + (at < len(requests) and requests[at] is request)
            idle &= self._requests.keys()

    def likely(self, limit: int) -> Iterable[Request]:
        return islice(self, limit)

    def may_pass(self, request: Request) -> bool:
        return False

    def note_end(self, request: Request) -> None:
        # `start` has charged the tokens that another engine generated.
        self._turns.charge(self._tenant_of(request), request.num_output_tokens - request.num_answered_tokens)

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*self._requests.values(), key=_ORDER)

    def check_integrity(self) -> None:
        self._turns.check_integrity(self._requests)
        for requests in self._requests.values():
            keys = [request.service_key for request in requests]
            assert keys, "a tenant has turns and nothing waits"
            assert keys == sorted(set(keys)), "the waiting queue is out of order"

"""Turns: which tenant goes next, so that all get the same number of computed tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

Tenant = str | None


class Turns:
    """Deficit round robin (Shreedhar and Varghese, 1995), in computed tokens.

    A tenant is served while it has credit, and gets `quantum` tokens of credit each time that its turn comes without
    any. A request may overdraw the credit; its tenant then sits out the turns that pay for it. Between two tenants that
    always wait, the tokens served differ by at most a quantum and the largest request of each, whatever others send.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._ring: deque[Tenant] = deque()
        self._credit: dict[Tenant, int] = {}
        """Tokens of credit of tenants that wait; of others only debts, until nobody waits."""

    def join(self, tenant: Tenant) -> None:
        """A tenant has requests that wait; no change if it had some before."""
        if tenant not in self._ring:
            self._ring.append(tenant)
            self._credit.setdefault(tenant, 0)

    def leave(self, tenant: Tenant) -> None:
        """A tenant has no request that waits. It keeps its debt, and loses its credit."""
        self._ring.remove(tenant)
        if self._credit[tenant] >= 0:
            del self._credit[tenant]
        if not self._ring:
            self._credit.clear()

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens were computed, or will be, for a tenant. Costs nothing while nobody waits."""
        if self._ring:
            self._credit[tenant] = self._credit.get(tenant, 0) - num_tokens

    def next(self, skipped: Collection[Tenant]) -> Tenant:
        """The tenant whose turn it is; `skipped` ones cannot use theirs. At least one is not skipped."""
        while True:
            tenant = self._ring[0]
            if tenant not in skipped:
                if self._credit[tenant] > 0:
                    return tenant
                self._credit[tenant] += self._quantum
            self._ring.rotate(-1)

    def check_integrity(self, tenants: Collection[Tenant]) -> None:
        """Raise AssertionError if other tenants than these have turns."""
        assert sorted(map(str, self._ring)) == sorted(map(str, tenants)), "turns and waiting tenants differ"
        assert all(self._credit[tenant] <= self._quantum for tenant in self._ring), "a tenant saved credit"

"""Quotas: the number of cached blocks that a tenant may leave in the pool.

Knows tenants' namespaces. Runs between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.server.access.tenants import Tenant, Tenants
from foreword.server.engine_thread import Ended


class Quotas:
    """Evicts the blocks beyond a tenant's quota whenever one of the tenant's requests ends.

    Blocks that requests hold stay; free blocks go in the order of normal eviction. Blocks of public prefixes count for
    no tenant.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.shrink: Callable[[str, int], None] = lambda namespace, max_blocks: None
        """Shrinks a namespace's share of the engine's cache, or of each engine's, to this number of blocks."""
        self._tenants = tenants
        self._limits: dict[str, tuple[str, int]] = {}

    def note(self, tenant: Tenant) -> None:
        """Note a tenant's quota. Called on the event loop; the engine's thread reads it at a later step."""
        if tenant.max_cached_blocks is not None:
            self._limits[tenant.name] = (self._tenants.namespace_of_all(tenant), tenant.max_cached_blocks)
        else:
            self._limits.pop(tenant.name, None)

    def enforce(self, ended: Sequence[Ended]) -> None:
        """Shrink the caches of the tenants whose requests ended to their quotas."""
        for name in {request.job.record.tenant for request in ended}:
            limit = self._limits.get(name)
            if limit is not None:
                self.shrink(*limit)

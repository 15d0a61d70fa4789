"""Quotas: how many cached blocks a tenant may leave behind.

Knows tenants' namespaces and the cache's door. Runs on the engine's thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreword.cache import KVCacheManager
from foreword.server.access.tenants import Tenant, Tenants
from foreword.server.engine_thread import Ended


class Quotas:
    """Evicts what a tenant has cached beyond its quota, whenever one of its requests has ended.

    Blocks that requests hold stay; of the free ones those go that would be evicted next anyway. Blocks of public
    prefixes belong to nobody.
    """

    def __init__(self, manager: KVCacheManager, tenants: Tenants) -> None:
        self._manager = manager
        self._tenants = tenants
        self._limits: dict[str, tuple[str, int]] = {}

    def note(self, tenant: Tenant) -> None:
        """Learn a tenant's quota. Called on the event loop; what it changes is read at a later step."""
        if tenant.max_cached_blocks is not None:
            self._limits[tenant.name] = (self._tenants.namespace_of_all(tenant), tenant.max_cached_blocks)
        else:
            self._limits.pop(tenant.name, None)

    def enforce(self, ended: Sequence[Ended]) -> None:
        """Requests ended: bring their tenants below their quotas."""
        for name in {request.job.record.tenant for request in ended}:
            limit = self._limits.get(name)
            if limit is not None:
                self._shrink(*limit)

    def _shrink(self, namespace: str, max_blocks: int) -> None:
        """Evict the namespace's free blocks beyond so many, in the order of eviction."""
        ledger = self._manager.ledger
        if ledger is None:  # nothing is cached at all: Tenants refuses quotas where only the account is missing
            return
        excess = ledger.num_under_salt(namespace) - max_blocks
        if excess > 0:
            own = ledger.blocks_under_salt(namespace, self._manager.free_block_ids())
            self._manager.evict_blocks(own[:excess])

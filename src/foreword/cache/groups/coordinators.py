"""Which coordinator serves which groups.

Knows the three coordinators and what each of them can do; knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreword.cache.account.ledger import CacheLedger
from foreword.cache.blocks.block_pool import BlockPool
from foreword.cache.groups.coordinator import KVCacheCoordinatorNoPrefixCache
from foreword.cache.groups.group_specs import FullAttentionSpec, GroupSpec, SinkFullSpec
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator
from foreword.cache.groups.unitary import UnitaryKVCacheCoordinator
from foreword.cache.index.index import HashIndex, PrefixIndex
from foreword.errors import ConfigError


def is_one_full_group(groups: Sequence[GroupSpec]) -> bool:
    """Whether every layer needs every block, so that hits are prefixes."""
    return len(groups) == 1 and isinstance(groups[0], (FullAttentionSpec, SinkFullSpec))


def get_kv_cache_coordinator(
    groups: Sequence[GroupSpec],
    pool: BlockPool,
    block_size: int,
    *,
    enable_prefix_caching: bool,
    index: PrefixIndex | None = None,
    ledger: CacheLedger | None = None,
    deduplicate: bool = False,
) -> KVCacheCoordinatorNoPrefixCache:
    """The coordinator for these groups. `block_size` is that of the sequences, in tokens.

    Raises ConfigError for sizes and options that the groups cannot have.
    """
    for group in groups:
        if group.block_size % block_size:
            raise ConfigError(
                f"block_size={block_size} does not divide the block_size of {group}; leave it out, or "
                "choose a common divisor of all groups' sizes"
            )
    if not enable_prefix_caching:
        return KVCacheCoordinatorNoPrefixCache(groups, pool)
    if is_one_full_group(groups) and groups[0].block_size == block_size:
        index = index if index is not None else HashIndex(pool.num_blocks)
        return UnitaryKVCacheCoordinator(groups[0], pool, index, ledger=ledger, deduplicate=deduplicate)
    if index is not None:
        raise ConfigError(
            f"index={type(index).__name__} finds whole prefixes only, but these groups look up single blocks; "
            "leave it out"
        )
    if deduplicate:
        raise ConfigError("deduplicate=True needs one group of full attention; leave it out")
    return HybridKVCacheCoordinator(groups, pool, block_size, ledger=ledger)

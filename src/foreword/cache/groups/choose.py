"""Chooses the coordinator for a set of groups."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.cache.account.ledger import CacheLedger
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.coordinator import KVCacheCoordinator, KVCacheCoordinatorNoPrefixCache
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator
from foreword.cache.groups.managers import FullAttentionSpec, GroupSpec, SinkFullSpec
from foreword.cache.groups.unitary import UnitaryKVCacheCoordinator
from foreword.cache.index.hash_index import HashIndex
from foreword.cache.index.prefix_index import PrefixIndex
from foreword.errors import ConfigError


def is_one_full_group(groups: Sequence[GroupSpec]) -> bool:
    """Whether all layers need all blocks, so that each hit is a prefix."""
    return len(groups) == 1 and isinstance(groups[0], (FullAttentionSpec, SinkFullSpec))


def get_kv_cache_coordinator(
    groups: Sequence[GroupSpec],
    num_blocks: int,
    policy: EvictionPolicy,
    block_size: int,
    *,
    enable_prefix_caching: bool,
    index: PrefixIndex | None = None,
    ledger: CacheLedger | None = None,
    deduplicate: bool = False,
) -> KVCacheCoordinator:
    """Make the coordinator for these groups. `block_size` is the block size of the sequences, in tokens.

    Raises ConfigError for sizes and options that the groups cannot have.
    """
    for group in groups:
        if group.block_size % block_size:
            raise ConfigError(
                f"block_size={block_size} does not divide the block_size of {group}; leave it out, or "
                "choose a common divisor of all groups' sizes"
            )
    if not enable_prefix_caching:
        return KVCacheCoordinatorNoPrefixCache(groups, num_blocks, policy)
    if is_one_full_group(groups) and groups[0].block_size == block_size:
        index = index if index is not None else HashIndex(num_blocks)
        return UnitaryKVCacheCoordinator(groups[0], num_blocks, policy, index, ledger=ledger, deduplicate=deduplicate)
    if index is not None:
        raise ConfigError(
            f"index={type(index).__name__} finds whole prefixes only, but these groups look up single blocks; "
            "leave it out"
        )
    if deduplicate:
        raise ConfigError("deduplicate=True needs one group of full attention; leave it out")
    return HybridKVCacheCoordinator(groups, num_blocks, policy, block_size, ledger=ledger)

"""Chooses the coordinator for a set of groups; and the coordinator without a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence, Set

from foreword.cache.account.ledger import CacheLedger, Eviction, MissReason
from foreword.cache.block_ids import BlockIds
from foreword.cache.blocks.group_index import GroupedHashIndex
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.coordinator import Keys, KVCacheCoordinator
from foreword.cache.groups.group_specs import FullAttentionSpec, GroupSpec, SinkFullSpec
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator
from foreword.cache.groups.prefix_hit import PrefixHit
from foreword.cache.groups.unitary import UnitaryKVCacheCoordinator
from foreword.cache.index.hash_index import HashIndex
from foreword.cache.index.prefix_index import PrefixIndex
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import ConfigError


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Serves any groups. It remembers nothing, so lookups find nothing."""

    def __init__(self, groups: Sequence[GroupSpec], num_blocks: int, policy: EvictionPolicy) -> None:
        super().__init__(groups, num_blocks, policy, GroupedHashIndex(num_blocks, len(groups)))

    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        return self.nothing

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        return False

    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        return

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        return [[] for _ in self.managers]

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        return self.nothing.tables

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        return list(self.nothing.tables)

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        return False

    def why_missed(self, sequence: TokenSequence, hit: PrefixHit) -> tuple[MissReason, Eviction | None]:
        return MissReason.NEVER_SEEN, None

    def num_ghost_tokens(self, sequence: TokenSequence, hit: PrefixHit) -> int:
        return 0


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

"""The prefix cache core: which KV blocks hold which tokens, and who may use them.

Needs the standard library and numpy only, so that any engine can adopt it alone. Knows token ids, never
text, tensors or requests. `KVCacheManager` is the door; a scheduler needs nothing else.
"""

from foreword.cache.block_pool import BlockIds, BlockPool, FreeKVCacheBlockQueue
from foreword.cache.eviction import EvictionPolicy, make_policy
from foreword.cache.hashing import (
    NO_EXTRA_KEYS,
    BlockHash,
    ExtraKeys,
    MediaItem,
    hash_block_tokens,
    hash_blocks,
    sha256,
)
from foreword.cache.index import HashIndex, PartialBlock, PrefixIndex, PrefixMatch
from foreword.cache.manager import KVCacheManager, PrefixHit
from foreword.cache.pins import PinnedPolicy
from foreword.cache.policies import PriorityPolicy
from foreword.cache.radix import RadixIndex, make_index
from foreword.cache.sequence import TokenSequence
from foreword.cache.stats import CachingMetrics, PrefixCacheStats

__all__ = [
    "NO_EXTRA_KEYS",
    "BlockHash",
    "BlockIds",
    "BlockPool",
    "CachingMetrics",
    "EvictionPolicy",
    "ExtraKeys",
    "FreeKVCacheBlockQueue",
    "HashIndex",
    "KVCacheManager",
    "MediaItem",
    "PartialBlock",
    "PinnedPolicy",
    "PrefixCacheStats",
    "PrefixHit",
    "PrefixIndex",
    "PrefixMatch",
    "PriorityPolicy",
    "RadixIndex",
    "TokenSequence",
    "hash_block_tokens",
    "hash_blocks",
    "make_index",
    "make_policy",
    "sha256",
]

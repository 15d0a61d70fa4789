"""The prefix cache core: which KV blocks hold which tokens, and who may use them.

Needs the standard library and numpy only, so that any engine can adopt it alone. Knows token ids, never
text, tensors or requests. `KVCacheManager` is the door; a scheduler needs nothing else.
"""

from foreword.cache.block_pool import BlockIds, BlockPool, FreeKVCacheBlockQueue
from foreword.cache.hashing import (
    NO_EXTRA_KEYS,
    BlockHash,
    ExtraKeys,
    HashFunction,
    MediaItem,
    chain_root,
    hash_block_tokens,
    hash_blocks,
    make_hash_function,
    sha256,
    sha256_cbor,
)
from foreword.cache.index import HashIndex, PartialBlock, PrefixIndex, PrefixMatch
from foreword.cache.manager import KVCacheManager, PrefixHit
from foreword.cache.radix import RadixIndex, make_index
from foreword.cache.sequence import TokenSequence
from foreword.cache.stats import CachingMetrics, PrefixCacheStats

__all__ = [
    "NO_EXTRA_KEYS",
    "BlockHash",
    "BlockIds",
    "BlockPool",
    "CachingMetrics",
    "ExtraKeys",
    "FreeKVCacheBlockQueue",
    "HashFunction",
    "HashIndex",
    "KVCacheManager",
    "MediaItem",
    "PartialBlock",
    "PrefixCacheStats",
    "PrefixHit",
    "PrefixIndex",
    "PrefixMatch",
    "RadixIndex",
    "TokenSequence",
    "chain_root",
    "hash_block_tokens",
    "hash_blocks",
    "make_hash_function",
    "make_index",
    "sha256",
    "sha256_cbor",
]

"""The prefix cache core: which KV blocks hold which tokens, and who may use them.

Needs the standard library and numpy only, so that any engine can adopt it alone. Knows token ids, never
text, tensors or requests. `KVCacheManager` is the door; a scheduler needs nothing else.
"""

from foreword.cache.account.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    KVCacheEvent,
    NumberedEvent,
    PrefixMirror,
)
from foreword.cache.account.ledger import CacheLedger, Eviction, EvictionCause, MissReason
from foreword.cache.account.stats import CachingMetrics, PrefixCacheStats
from foreword.cache.block_ids import NULL_BLOCK, BlockIds
from foreword.cache.blocks.block_allocator import PrefixCachingBlock, PrefixCachingBlockAllocator
from foreword.cache.blocks.block_pool import BlockPool, KVCacheBlock
from foreword.cache.blocks.block_table import BlockTable, MultiGroupBlockTable
from foreword.cache.blocks.group_index import (
    BlockHashWithGroupId,
    GroupedHashIndex,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from foreword.cache.eviction.choose import make_policy
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.eviction.pins import PinnedPolicy
from foreword.cache.eviction.policies import PriorityPolicy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.explain import LookupExplanation
from foreword.cache.groups.checkpoints import StateCheckpoints
from foreword.cache.groups.choose import KVCacheCoordinatorNoPrefixCache
from foreword.cache.groups.coordinator import KVCacheCoordinator, PrefixHit
from foreword.cache.groups.group_specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupSpec,
    MambaSpec,
    SinkFullSpec,
    SlidingWindowSpec,
)
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator
from foreword.cache.groups.managers import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)
from foreword.cache.groups.unitary import UnitaryKVCacheCoordinator
from foreword.cache.index.hash_index import HashIndex
from foreword.cache.index.prefix_index import Divergence, PartialBlock, PrefixIndex, PrefixMatch
from foreword.cache.index.radix import RadixIndex, make_index
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.hashing import (
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
from foreword.cache.keys.sequence import TokenSequence
from foreword.cache.manager import KVCacheManager
from foreword.cache.view import BlockState

__all__ = [
    "NO_EXTRA_KEYS",
    "NULL_BLOCK",
    "AllBlocksCleared",
    "BlockHash",
    "BlockHashWithGroupId",
    "BlockIds",
    "BlockPool",
    "BlockRemoved",
    "BlockState",
    "BlockStored",
    "BlockTable",
    "CacheLedger",
    "CachingMetrics",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalSpec",
    "Divergence",
    "EventLog",
    "Eviction",
    "EvictionCause",
    "EvictionPolicy",
    "ExtraKeys",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupSpec",
    "GroupedHashIndex",
    "HashFunction",
    "HashIndex",
    "HybridKVCacheCoordinator",
    "KVCacheBlock",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheEvent",
    "KVCacheManager",
    "LookupExplanation",
    "MambaManager",
    "MambaSpec",
    "MediaItem",
    "MissReason",
    "MultiGroupBlockTable",
    "NumberedEvent",
    "PartialBlock",
    "PinnedPolicy",
    "PrefixCacheStats",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "PrefixHit",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixMirror",
    "PrefixNode",
    "PriorityPolicy",
    "RadixIndex",
    "SinkFullAttentionManager",
    "SinkFullSpec",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StateCheckpoints",
    "TokenSequence",
    "UnitaryKVCacheCoordinator",
    "chain_root",
    "get_block_hash",
    "get_group_id",
    "hash_block_tokens",
    "hash_blocks",
    "make_block_hash_with_group_id",
    "make_hash_function",
    "make_index",
    "make_policy",
    "sha256",
    "sha256_cbor",
]

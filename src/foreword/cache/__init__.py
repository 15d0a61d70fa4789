"""The prefix cache core: which KV blocks hold which tokens, and which requests may use the blocks.

The package needs only the standard library and numpy, so any engine can adopt it. It sees token ids, never text,
tensors or requests. A scheduler needs only `KVCacheManager`. Engines that own their memory use `SlotIndex` if they give
out slots, and `PayloadCache` if they keep one object for each sequence.

To learn how prefix caching works, read in this order:

    keys/hashing.py                            what identifies a block
    blocks/block_pool.py, eviction/policy.py   who holds a block, and which free block is taken next
    index/hash_index.py, index/radix.py        which block holds which prefix
    groups/managers.py, groups/coordinator.py  which blocks of a prefix each type of attention needs
    manager.py                                 the life of one request
"""

from types import ModuleType

from foreword.cache.account.events import (
    AllBlocksCleared as AllBlocksCleared,
    BlockRemoved as BlockRemoved,
    BlockStored as BlockStored,
    EventLog as EventLog,
    KVCacheEvent as KVCacheEvent,
    NumberedEvent as NumberedEvent,
    PrefixMirror as PrefixMirror,
)
from foreword.cache.account.ledger import (
    CacheLedger as CacheLedger,
    Eviction as Eviction,
    EvictionCause as EvictionCause,
    GroupLedger as GroupLedger,
    MissReason as MissReason,
)
from foreword.cache.account.stats import CachingMetrics as CachingMetrics, PrefixCacheStats as PrefixCacheStats
from foreword.cache.block_ids import (
    NO_BLOCKS as NO_BLOCKS,
    NULL_BLOCK as NULL_BLOCK,
    BlockIds as BlockIds,
    elsewhere as elsewhere,
    in_pool as in_pool,
)
from foreword.cache.blocks.block_allocator import (
    PrefixCachingBlock as PrefixCachingBlock,
    PrefixCachingBlockAllocator as PrefixCachingBlockAllocator,
)
from foreword.cache.blocks.block_pool import (
    BlockPool as BlockPool,
    KVCacheBlock as KVCacheBlock,
    KVCacheBlocks as KVCacheBlocks,
)
from foreword.cache.blocks.block_table import BlockTable as BlockTable, MultiGroupBlockTable as MultiGroupBlockTable
from foreword.cache.entries import (
    CacheEntry as CacheEntry,
    EntryWish as EntryWish,
    PIN as PIN,
    entry_name as entry_name,
)
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue as FreeKVCacheBlockQueue
from foreword.cache.eviction.pins import PinnedPolicy as PinnedPolicy
from foreword.cache.eviction.policies import PriorityPolicy as PriorityPolicy, make_policy as make_policy
from foreword.cache.eviction.policy import EvictionPolicy as EvictionPolicy
from foreword.cache.explain import LoadFailure as LoadFailure, LookupExplanation as LookupExplanation
from foreword.cache.groups.checkpoints import StateCheckpoints as StateCheckpoints
from foreword.cache.groups.coordinator import KVCacheCoordinatorNoPrefixCache as KVCacheCoordinatorNoPrefixCache
from foreword.cache.groups.coordinator import KVCacheCoordinator as KVCacheCoordinator
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator as HybridKVCacheCoordinator
from foreword.cache.groups.managers import (
    ChunkedLocalAttentionManager as ChunkedLocalAttentionManager,
    ChunkedLocalSpec as ChunkedLocalSpec,
    FullAttentionManager as FullAttentionManager,
    FullAttentionSpec as FullAttentionSpec,
    GroupSpec as GroupSpec,
    MambaManager as MambaManager,
    MambaSpec as MambaSpec,
    SingleTypeKVCacheManager as SingleTypeKVCacheManager,
    SinkFullAttentionManager as SinkFullAttentionManager,
    SinkFullSpec as SinkFullSpec,
    SlidingWindowManager as SlidingWindowManager,
    SlidingWindowSpec as SlidingWindowSpec,
)
from foreword.cache.groups.unitary import UnitaryKVCacheCoordinator as UnitaryKVCacheCoordinator
from foreword.cache.index.hash_index import (
    BlockHashToBlockMap as BlockHashToBlockMap,
    BlockHashWithGroupId as BlockHashWithGroupId,
    GroupedHashIndex as GroupedHashIndex,
    HashIndex as HashIndex,
    get_block_hash as get_block_hash,
    get_group_id as get_group_id,
    make_block_hash_with_group_id as make_block_hash_with_group_id,
)
from foreword.cache.index.prefix_index import (
    Divergence as Divergence,
    PartialBlock as PartialBlock,
    PrefixHit as PrefixHit,
    PrefixIndex as PrefixIndex,
    PrefixMatch as PrefixMatch,
    PrefixNode as PrefixNode,
)
from foreword.cache.index.radix import RadixIndex as RadixIndex, make_index as make_index
from foreword.cache.keys.hashing import (
    BlockHash as BlockHash,
    ExtraKeys as ExtraKeys,
    HashFunction as HashFunction,
    KeyedSpan as KeyedSpan,
    NONE_HASH as NONE_HASH,
    NO_EXTRA_KEYS as NO_EXTRA_KEYS,
    SPAN_KINDS as SPAN_KINDS,
    chain_root as chain_root,
    hash_block_tokens as hash_block_tokens,
    hash_blocks as hash_blocks,
    jump_span as jump_span,
    linked_span as linked_span,
    make_hash_function as make_hash_function,
    sha256 as sha256,
    sha256_cbor as sha256_cbor,
)
from foreword.cache.keys.sequence import TokenSequence as TokenSequence, common_length as common_length
from foreword.cache.manager import BlockState as BlockState, KVCacheManager as KVCacheManager
from foreword.cache.payloads import PayloadCache as PayloadCache, PayloadHit as PayloadHit, Spill as Spill
from foreword.cache.slot_index import SlotIndex as SlotIndex, SlotMatch as SlotMatch

__all__ = sorted(name for name, value in vars().items() if not (name.startswith("_") or isinstance(value, ModuleType)))
__all__.remove("ModuleType")

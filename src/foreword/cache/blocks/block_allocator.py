"""PrefixCachingBlockAllocator: vLLM v0's interface to the pool, block by block instead of request by request.

The allocator keeps chains of blocks, with the blocks' tokens and keys. A `BlockPool` keeps the number of holders of
each block, the free blocks and the index of keys. The method and the names are those of vLLM v0.6.

A block is mutable until it is full. A full block has a key (its content hash, which identifies the whole chain up to
it), can be found, and never changes. If another block already has that key, the chain continues with the other block,
and the new block is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreword.cache.block_ids import BlockIds
from foreword.cache.blocks.block_pool import BlockPool
from foreword.cache.eviction.policies import AccessTimePolicy
from foreword.cache.keys.hashing import BlockHash, HashFunction, hash_block_tokens, sha256
from foreword.errors import AllocationError


class PrefixCachingBlock:
    """One block of a sequence's chain."""

    def __init__(self, prev_block: PrefixCachingBlock | None, block_id: int, hash_fn: HashFunction) -> None:
        self.prev_block = prev_block
        self.block_id: int | None = block_id
        """None after the block was freed."""
        self.number: int = 0 if prev_block is None else prev_block.number + 1
        self.token_ids: list[int] = []
        self.content_hash: BlockHash | None = None
        """The block's key; None while the block is not full, or if it can never be found."""
        self._hash_fn = hash_fn

    def key_with(self, token_ids: Sequence[int]) -> BlockHash | None:
        """The key of this block when it holds these tokens; None if the block before it is not full."""
        parent = None if self.prev_block is None else self.prev_block.content_hash
        if self.prev_block is not None and parent is None:
            return None
        return hash_block_tokens(self._hash_fn, parent, list(token_ids))


class PrefixCachingBlockAllocator:
    """Blocks that are found by their content.

    Free blocks that hold nothing are taken first, then the least recently accessed blocks (`mark_blocks_as_accessed`).
    Among blocks accessed at the same time, the block with the longest prefix goes first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, hash_fn: HashFunction = sha256) -> None:
        self.block_size = block_size
        self._hash_fn = hash_fn
        self._evictor = AccessTimePolicy(num_blocks)
        self._pool = BlockPool(num_blocks, policy=self._evictor)
        self._computed: set[int] = set()
        self._copies: list[tuple[int, int]] = []
        self._num_queries = 0
        self._num_hits = 0

    # -------------------------------------------------------------- allocation

    def allocate_immutable_block(
        self, prev_block: PrefixCachingBlock | None, token_ids: Sequence[int]
    ) -> PrefixCachingBlock:
        """A full block of these `block_size` tokens after `prev_block`: the cached block, or a new block.

        Raises AllocationError if no block is free, or if the tokens do not fill a block.
        """
        if len(token_ids) != self.block_size:
            raise AllocationError(
                f"an immutable block has {self.block_size} tokens, not {len(token_ids)}; use allocate_mutable_block()"
            )
        block = PrefixCachingBlock(prev_block, -1, self._hash_fn)
        key = block.key_with(token_ids)
        hit = None if key is None else self._pool.get_cached_block(key)
        self._num_queries += 1
        if hit is None:
            block = self.allocate_mutable_block(prev_block)
            self.append_token_ids(block, token_ids)
            return block
        self._num_hits += 1
        self._pool.touch(_ids(hit[0].block_id))
        block.block_id, block.content_hash, block.token_ids = hit[0].block_id, key, list(token_ids)
        return block

    def allocate_immutable_blocks(
        self, prev_block: PrefixCachingBlock | None, block_token_ids: Iterable[Sequence[int]]
    ) -> list[PrefixCachingBlock]:
        """`allocate_immutable_block` for consecutive blocks. If one fails, frees all and raises AllocationError."""
        blocks: list[PrefixCachingBlock] = []
        try:
            for token_ids in block_token_ids:
                blocks.append(self.allocate_immutable_block(blocks[-1] if blocks else prev_block, token_ids))
        except AllocationError:
            for block in reversed(blocks):
                self.free(block)
            raise
        return blocks

    def allocate_mutable_block(self, prev_block: PrefixCachingBlock | None) -> PrefixCachingBlock:
        """An empty block after `prev_block`. Raises AllocationError if no block is free."""
        [block_id] = self._pool.get_new_blocks(1).tolist()
        self._computed.discard(block_id)
        return PrefixCachingBlock(prev_block, block_id, self._hash_fn)

    def append_token_ids(self, block: PrefixCachingBlock, token_ids: Sequence[int]) -> None:
        """Append tokens to a mutable block. If the tokens fill the block, lookups find it by its key from now on.

        If a cached block already has this key, `block` gets the cached block's id, and the block's own id is freed. A
        block that a fork holds too is copied before tokens are appended (`clear_copy_on_writes`). Raises
        AllocationError for more tokens than fit, for a block that was freed, or if no block is free for the copy.
        """
        room = self.block_size - len(block.token_ids)
        if len(token_ids) > room or block.block_id is None:
            raise AllocationError(
                f"{len(token_ids)} tokens do not fit into a block with room for "
                f"{room if block.block_id is not None else 0}; allocate the next block"
            )
        if len(token_ids) and self._pool.ref_count(block.block_id) > 1:
            self._copy_on_write(block, block.block_id)
        block.token_ids += token_ids
        key = block.key_with(block.token_ids) if len(block.token_ids) == self.block_size else None
        if key is None:
            return
        block.content_hash = key
        hit = self._pool.get_cached_block(key)
        if hit is None:
            self._pool.cache_key(block.block_id, key, block.number)
            return
        self._pool.touch(_ids(hit[0].block_id))
        self._pool.free_blocks(_ids(block.block_id))
        block.block_id = hit[0].block_id

    def _copy_on_write(self, block: PrefixCachingBlock, shared_id: int) -> None:
        """Give the chain its own copy of a shared block, before the chain writes into the block."""
        block.block_id = self.allocate_mutable_block(block.prev_block).block_id
        self._pool.free_blocks(_ids(shared_id))
        self._copies.append((shared_id, _held(block)))

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Copies to make before the next step writes anything: (source, target), in order. Each is returned once."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, last_block: PrefixCachingBlock) -> list[PrefixCachingBlock]:
        """Copy a chain, from its first block to `last_block`, for another sequence. Each block gets one more holder."""
        chain: list[PrefixCachingBlock] = []
        block: PrefixCachingBlock | None = last_block
        while block is not None:
            chain.append(block)
            block = block.prev_block
        copies: list[PrefixCachingBlock] = []
        for block in reversed(chain):
            block_id = _held(block)
            self._pool.touch(_ids(block_id))
            copy = PrefixCachingBlock(copies[-1] if copies else None, block_id, self._hash_fn)
            copy.token_ids, copy.content_hash = block.token_ids.copy(), block.content_hash
            copies.append(copy)
        return copies

    def free(self, block: PrefixCachingBlock) -> None:
        """Remove one holder of a block. Lookups find the block until its memory is needed."""
        self._pool.free_blocks(_ids(_held(block)))
        block.block_id = None

    # ------------------------------------------------------------- state of blocks

    def mark_blocks_as_accessed(self, block_ids: Iterable[int], now: float) -> None:
        """Record that these blocks were used now. `now` must not decrease from call to call."""
        self._evictor.note_accessed(np.fromiter(block_ids, np.int32), now)

    def mark_blocks_as_computed(self, block_ids: Iterable[int]) -> None:
        self._computed.update(block_ids)

    def is_computed(self, block_id: int) -> bool:
        return block_id in self._computed

    def is_active(self, block_id: int) -> bool:
        return self._pool.ref_count(block_id) > 0

    def last_accessed(self, block_id: int) -> float:
        return self._evictor.last_accessed(block_id)

    def get_num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def get_num_total_blocks(self) -> int:
        return self._pool.num_blocks

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of the requested immutable blocks that were found, 0.0 to 1.0; -1.0 before the first request."""
        return self._num_hits / self._num_queries if self._num_queries else -1.0

    def reset_prefix_cache(self) -> bool:
        """Forget everything, reset the hit rate, and return True. Raises CacheBusyError while blocks are held."""
        self._pool.reset_prefix_cache()
        self._num_queries = self._num_hits = 0
        self._computed.clear()
        self._copies.clear()
        return True

    def check_integrity(self, held: Iterable[PrefixCachingBlock]) -> None:
        """Raise AssertionError unless exactly these blocks are held."""
        counts = np.zeros(self._pool.num_blocks, np.int32)
        for block in held:
            counts[_held(block)] += 1
        self._pool.check_integrity(counts)


def _ids(block_id: int) -> BlockIds:
    return np.array([block_id], np.int32)


def _held(block: PrefixCachingBlock) -> int:
    if block.block_id is None:
        raise AllocationError("this block was freed already; allocate it again")
    return block.block_id

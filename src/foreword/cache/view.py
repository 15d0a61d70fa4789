"""CacheView: the reading half of a cache: its contents and their holders.

Knows blocks, tables and held requests; changes nothing, and knows nothing of lookups and steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.account.stats import PrefixCacheStats
from foreword.cache.block_ids import BlockIds, Int64Array
from foreword.cache.blocks.block_pool import KVCacheBlock, KVCacheBlocks
from foreword.cache.eviction.pins import PinnedPolicy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.choose import is_one_full_group
from foreword.cache.groups.coordinator import KVCacheCoordinator
from foreword.cache.groups.prefix_hit import PrefixHit
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.hashing import TokenArray
from foreword.cache.keys.sequence import TokenSequence


class BlockState(enum.IntEnum):
    """The state of a block in the pool."""

    FREE = 0
    """A lookup cannot find it, and no request holds it."""
    CACHED = 1
    """A lookup can find it, and no request holds it."""
    IN_USE = 2
    """A request holds it, whether a lookup can find it or not."""
    PINNED = 3
    """It has a pin, whether a request holds it or not."""


class CacheView:
    """The reading half of a KVCacheManager."""

    def __init__(self, coordinator: KVCacheCoordinator, policy: EvictionPolicy, block_size: int) -> None:
        self.groups = coordinator.specs
        self.num_blocks = coordinator.pool.num_blocks
        self.block_size = block_size
        """Tokens per block of the sequences that it serves."""
        self._coordinator, self._pool = coordinator, coordinator.pool
        self._pins = policy if isinstance(policy, PinnedPolicy) else None
        self._policy = policy.inner if isinstance(policy, PinnedPolicy) else policy
        """The order of blocks without pins."""
        self._row_of: dict[str, int] = {}
        """Request id -> row in the tables of all groups, of the requests that hold blocks."""

    @property
    def stats(self) -> PrefixCacheStats:
        """Counters of lookups, hits and evictions since the last `reset_prefix_cache`."""
        return self._coordinator.stats

    @property
    def has_one_full_group(self) -> bool:
        """Whether every layer needs every block, so that hits are prefixes."""
        return is_one_full_group(self.groups)

    def is_cached(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the full block number `block` is cached, given that those before it are."""
        return self._coordinator.holds(sequence, block)

    def handles(self, request_ids: Iterable[str]) -> Int64Array:
        """The rows of held requests, as `admit` gave them: small numbers, each valid until its request is freed."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64)

    def block_ids(self, request_id: str, group_id: int = 0) -> BlockIds:
        """Block table of one request in one group (a copy)."""
        return self._coordinator.tables.groups[group_id].row(self._row_of[request_id]).copy()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of one request in all groups, as objects."""
        rows = (tables.row(self._row_of[request_id]) for tables in self._coordinator.tables.groups)
        return KVCacheBlocks(tuple([KVCacheBlock(self._pool, block_id) for block_id in row.tolist()] for row in rows))

    def block_tables(self, request_ids: Sequence[str], group_id: int = 0) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """One group's tables of several requests, [requests, longest], and their lengths in blocks (copies).

        An entry is NULL_BLOCK where the group no longer needs a block.
        """
        return self._coordinator.tables.groups[group_id].gather(self.handles(request_ids))

    def group_block_tables(self, rows: Int64Array) -> list[tuple[BlockIds, npt.NDArray[np.int32]]]:
        """`block_tables` of every group."""
        return [tables.gather(rows) for tables in self._coordinator.tables.groups]

    def sink_block_ids(self) -> BlockIds:
        """Blocks that hold the groups' sinks, in the order of the groups; in no request's table (a copy)."""
        return self._coordinator.held_for_ever()

    def num_required_blocks(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that admitting a request with this hit takes, for its first `num_tokens` tokens."""
        return self._coordinator.num_required_blocks(hit, num_tokens)

    def can_ever_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether a request of `num_tokens` fits into the empty pool, in steps of `max_step_tokens` at most."""
        usable = self.num_blocks - len(self.sink_block_ids())
        return self.max_num_blocks(num_tokens, max_step_tokens) <= usable

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` holds at a time, in steps of `max_step_tokens` at most."""
        return self._coordinator.max_num_blocks(num_tokens, max_step_tokens)

    def held_request_ids(self) -> list[str]:
        return list(self._row_of)

    def get_num_common_prefix_blocks(self, request_ids: Sequence[str], group_id: int = 0) -> int:
        """Number of leading table entries of one group that all these requests share physically."""
        if not request_ids:
            return 0
        tables, lengths = self.block_tables(request_ids, group_id)
        shared = (tables == tables[0]).all(axis=0)[: int(lengths.min())]
        return int(shared.argmin()) if not shared.all() else len(shared)

    def get_num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def get_num_cached_blocks(self) -> int:
        """Full blocks that hold an indexed prefix, held by requests or not."""
        return self._coordinator.num_indexed

    def get_num_tails(self) -> int:
        """Partly filled blocks that hold the end of an indexed prefix; nobody holds them."""
        return self._coordinator.num_tails

    def num_cached_tokens(self) -> int:
        """Tokens whose KV is cached in full blocks, in the group that has most of them; duplicates count."""
        counts = self._coordinator.num_indexed_by_group()
        return max(count * group.block_size for count, group in zip(counts, self.groups, strict=True))

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return self._pool.get_usage()

    def block_states(self) -> npt.NDArray[np.uint8]:
        """The present state of each block, as `BlockState` numbers, [num_blocks] (a copy)."""
        states = np.full(self.num_blocks, BlockState.FREE, np.uint8)
        states[self._coordinator.indexed_block_ids()] = BlockState.CACHED
        states[self._coordinator.tail_block_ids()] = BlockState.CACHED
        states[self._pool.ref_counts() > 0] = BlockState.IN_USE
        if self._pins is not None:
            states[self._pins.pinned_block_ids()] = BlockState.PINNED
        return states

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """The cached prefixes that were reused most, a parent before its children; None without a radix index.

        With `under_salt`, only prefixes under salts that begin with it.
        """
        return self._coordinator.top_prefixes(limit, under_salt)

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        """At most `num_tokens` tokens that followed all of a sequence in a cached one, under the same extra keys.

        Of several ways to go on, the last one that was cached. Empty if none is known, or if the index has no tokens.
        """
        return self._coordinator.following(sequence, num_tokens)

    def free_block_ids(self) -> BlockIds:
        """Free blocks in the order in which they will be given away (a copy)."""
        return self._pool.free_block_ids()

"""KVCacheBlock: one block of a pool as an object, for engines that are written around such objects.

Knows a pool and a number; has no state of its own, so it always tells what the pool tells now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreword.cache.blocks.block_pool import BlockPool
    from foreword.cache.blocks.group_index import BlockHashWithGroupId


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """A view of one row of the pool's arrays. Two views of one block are equal."""

    pool: BlockPool
    block_id: int

    @property
    def ref_cnt(self) -> int:
        """Number of holders; 0: the block is free, and may still be found."""
        return 0 if self.is_null else self.pool.ref_count(self.block_id)

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Under what it is found; None: it is not."""
        return None if self.is_null else self.pool.block_hash(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether it stands for no block, where a group needs none."""
        return self.block_id < 0

"""The KV tensors.

Knows tensors, blocks and slots; knows nothing of requests, prefixes or who holds a block.

    slot = block id * block_size + offset in the block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape of one attention layer's KV."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(layers: list[LayerLayout], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return block_size * dtype.itemsize * sum(layer.elements_per_token for layer in layers)


class KVStorage:
    """Keys and values of every layer, `[num_blocks + 1, block_size, kv_heads, dim]` each.

    The last block is scrap: KV that must not be kept is written there, and nothing reads it unmasked. Memory
    is not touched before it is used, so a large pool costs nothing at start; unwritten slots may hold anything.
    """

    def __init__(
        self,
        layers: list[LayerLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scrap_block = num_blocks

        def blocks(heads: int, dim: int) -> Tensor:
            return torch.empty(num_blocks + 1, block_size, heads, dim, dtype=dtype, device=device)

        self.keys = [blocks(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [blocks(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def slot_mapping(self, batch: Batch) -> Tensor:
        """Slot of each token of a batch, [tokens]; a scrap slot where the KV is in a shared block already."""
        request = np.repeat(np.arange(len(batch.query_starts) - 1), np.diff(batch.query_starts))
        block_ids = batch.block_tables[request, batch.positions // self.block_size].astype(np.int64)
        block_ids[batch.positions < batch.write_from[request]] = self.scrap_block
        return torch.from_numpy(block_ids * self.block_size + batch.positions % self.block_size)

    def copy_blocks(self, copies: IntArray) -> None:
        """Copy whole blocks, [copies, (source, target)], all sources read before any target is written."""
        if not len(copies):
            return
        sources, targets = torch.from_numpy(copies.astype(np.int64)).to(self.keys[0].device).unbind(1)
        for blocks in (*self.keys, *self.values):
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the KV of some tokens: keys and values [tokens, kv_heads, dim], slots [tokens]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

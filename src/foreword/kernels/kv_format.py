"""How keys and values are stored: a format, and one layer's blocks in it.

A row is one token's key, or value, of one head.

    written by    `KVBlocks.write`; `triton/blocks.py`, after `encode`; `model/cpu/rotary.py` and `model/rotation.py`,
                  of elements
    read by       `KVBlocks.read` and `read_blocks`, and by the compiled kernels whose `why_not` accepts the format

All blocks of a pool have one format, and it is part of their keys. A format whose rows have scales counts them in
`row_bytes`, and `KVBlocks` is where its readers find them: nobody is handed a bare tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store keys and values."""

    dtype: torch.dtype
    """The type of an element in its block."""

    @property
    def name(self) -> str:
        """As `dtype` is written in configurations: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def key(self, computed: torch.dtype) -> str:
        """The part of blocks' keys that names the format, and the type in which layers compute."""
        return str(computed) if computed == self.dtype else f"{computed} as {self.dtype}"

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements, with all that belongs to it."""
        return dim * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Rows of any type as elements."""
        return rows.to(self.dtype)

    def view(self, pages: tuple[Tensor, Tensor], block_size: int, num_heads: int, dims: tuple[int, int]) -> KVBlocks:
        """Blocks in pages of keys and of values, bytes [blocks, bytes] each; `dims`: elements of a key and of a value.

        They are contiguous if they fill their pages.
        """
        keys, values = (
            torch.unflatten(
                own[:, : block_size * num_heads * self.row_bytes(dim)].view(self.dtype), 1, (block_size, num_heads, dim)
            )
            for own, dim in zip(pages, dims, strict=True)
        )
        return KVBlocks(self, keys, values)


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """One layer's keys and values in the blocks of a pool."""

    format: KVFormat
    keys: Tensor
    """[blocks, block_size, kv_heads, key_dim] elements"""
    values: Tensor
    """[blocks, block_size, kv_heads, value_dim] elements"""

    @classmethod
    def plain(cls, keys: Tensor, values: Tensor) -> KVBlocks:
        """Blocks whose elements are numbers of the tensors' type."""
        return cls(KVFormat(keys.dtype), keys, values)

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def key_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (self.format.row_bytes(self.key_dim) + self.format.row_bytes(self.value_dim))

    @property
    def is_contiguous(self) -> bool:
        """Whether there are no gaps between blocks."""
        return self.keys.is_contiguous() and self.values.is_contiguous()

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows [tokens, kv_heads, dim] of any type at slots [tokens]."""
        for blocks, rows in ((self.keys, keys), (self.values, values)):
            if blocks.is_contiguous():
                blocks.flatten(0, 1).index_copy_(0, slots, self.format.encode(rows))
            else:
                blocks[slots // self.block_size, slots % self.block_size] = self.format.encode(rows)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the elements of some slots [tokens]: keys and values, each [tokens, kv_heads, dim]."""
        if self.is_contiguous:
            return self.keys.flatten(0, 1).index_select(0, slots), self.values.flatten(0, 1).index_select(0, slots)
        places = slots // self.block_size, slots % self.block_size
        return self.keys[places], self.values[places]

    def read_blocks(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whole blocks in float32: ids [requests, n] to keys and values [requests, n * block_size, kv_heads, dim]."""
        return self.keys[block_ids].flatten(1, 2).float(), self.values[block_ids].flatten(1, 2).float()

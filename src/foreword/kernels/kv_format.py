"""KVFormat: how keys and values are stored, and who reads and writes them.

Knows elements, rows and blocks; knows no layer and no kernel. A row is one token's key, or value, of one head.

    written by    `write`; `triton/blocks.py`, after `encode`; `model/cpu/rotary.py`, whose rows are elements already
    read by       `reference.py` through `read`, and by the compiled kernels whose `why_not` accepts it, directly

All blocks of a pool have one format, and it is part of their keys.
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

    @classmethod
    def of(cls, blocks: Tensor) -> KVFormat:
        """The format of blocks as `view` gives them."""
        return cls(blocks.dtype)

    @property
    def name(self) -> str:
        """As `dtype` is written in configurations: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def key(self, computed: torch.dtype) -> str:
        """The part of blocks' keys that names the format, and the type in which layers compute."""
        return str(computed) if computed == self.dtype else f"{computed} as {self.dtype}"

    def num_bytes(self, num_elements: int) -> int:
        """Bytes that elements take."""
        return num_elements * self.dtype.itemsize

    def view(self, pages: Tensor, block_size: int, num_heads: int, dim: int) -> Tensor:
        """Blocks [blocks, block_size, heads, dim] in pages of bytes [blocks, bytes]; contiguous if they fill them."""
        used = self.num_bytes(block_size * num_heads * dim)
        return torch.unflatten(pages[:, :used].view(self.dtype), 1, (block_size, num_heads, dim))

    def encode(self, rows: Tensor) -> Tensor:
        """Rows of any type as elements."""
        return rows.to(self.dtype)

    def write(self, blocks: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Store rows [tokens, heads, dim] at slots [tokens]."""
        if blocks.is_contiguous():
            blocks.flatten(0, 1).index_copy_(0, slots, self.encode(rows))
        else:
            size = blocks.shape[1]
            blocks[slots // size, slots % size] = self.encode(rows)

    def read(self, blocks: Tensor, block_ids: Tensor) -> Tensor:
        """Rows of whole blocks in float32: block ids [requests, n] to [requests, n * block_size, heads, dim]."""
        return blocks[block_ids].flatten(1, 2).float()

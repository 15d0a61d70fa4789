"""Storage of keys and values: a format, and one layer's blocks in it.

A row is one token's key, or value, of one head. A format stores a row's elements as numbers, or as codes of eight bits
and one scale:

    scale   = (largest |element| / 127) as bfloat16, rounded up
    code    = element / scale, rounded to the nearest whole number, ties to even
    element = code * scale, for all readers

Codes and scale depend on the row alone. Attention reads all rows from storage, even those of the present step. So a
token's KV has the same bits in any batch, and a hit reads what a miss wrote.

    a block's page of numbers    token 0: head 0, head 1, ..; token 1: ..
    a block's page of codes      the codes in this order, and then the scales in this order

A latent format stores one key per token, which all heads share, and no values: the first elements of a key are its
value (`model/decoder/decoder.py`).

    written by    `KVBlocks.write`, `model/cpu/rotary.py`; numbers also by `triton/blocks.py` and `model/rotation.py`
    read by       `KVBlocks.read` and `read_blocks`, and by the compiled kernels whose `why_not` accepts the format

All blocks of a pool have one format, and the format is part of the blocks' keys. Readers find codes and scales in
`KVBlocks`, and never get a bare tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_CODE = 127
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store keys and values."""

    dtype: torch.dtype
    """The type in which blocks store an element. int8: elements are codes, with a scale for each row."""
    latent: bool = False
    """Whether values are the first elements of keys, with one key per token for all heads."""

    @property
    def name(self) -> str:
        """The name of the format in configurations, such as "bfloat16" or "latent bfloat16"."""
        return ("latent " if self.latent else "") + str(self.dtype).removeprefix("torch.")

    @property
    def is_coded(self) -> bool:
        """Whether elements are codes."""
        return self.dtype == torch.int8

    def key(self, computed: torch.dtype) -> str:
        """The part of blocks' keys that names the format, and the type in which layers compute."""
        if self == KVFormat(computed):
            return str(computed)
        return f"{computed} as {'latent ' if self.latent else ''}{self.dtype}"

    def row_bytes(self, dim: int) -> int:
        """The bytes of a row of `dim` elements, including the row's scale if elements are codes."""
        return dim * self.dtype.itemsize + (SCALE_BYTES if self.is_coded else 0)

    def token_row_bytes(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """The bytes of one token's key, and of its value, for one head."""
        return self.row_bytes(key_dim), 0 if self.latent else self.row_bytes(value_dim)

    def can_take(self, computed: torch.dtype) -> bool:
        """Whether compiled kernels can write rows of this type in this format, and read the rows again."""
        return computed == self.dtype or (self.is_coded and computed in (torch.bfloat16, torch.float32))

    def view(self, pages: tuple[Tensor, Tensor], block_size: int, num_heads: int, dims: tuple[int, int]) -> KVBlocks:
        """The blocks in pages of keys and of values, [blocks, bytes] each; `dims`: elements per key and per value.

        The blocks are contiguous if they fill their pages. A latent format uses no pages of values.
        """
        if self.latent:
            rows = pages[0][:, : block_size * dims[0] * self.dtype.itemsize].view(self.dtype)
            return KVBlocks.of_latents(torch.unflatten(rows, 1, (block_size, 1, dims[0])), dims[1])
        num_rows, elements, scales = block_size * num_heads, [], []
        for page, dim in zip(pages, dims, strict=True):
            end = num_rows * dim * self.dtype.itemsize
            elements.append(torch.unflatten(page[:, :end].view(self.dtype), 1, (block_size, num_heads, dim)))
            if self.is_coded:
                page_scales = page[:, end : end + num_rows * SCALE_BYTES].view(torch.bfloat16)
                scales.append(torch.unflatten(page_scales, 1, (block_size, num_heads)))
        return KVBlocks(self, elements[0], elements[1], (scales[0], scales[1]) if scales else None)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows [..., dim] of any type as codes [..., dim] int8 and scales [...] bfloat16.

    A row with a NaN or an infinite element gets a NaN or infinite scale, so all its elements are read as NaN.
    """
    exact = rows.float()
    size = exact.abs().view(torch.int32).amax(-1).view(torch.float32)  # as integers, a NaN is larger than any number
    bits = ((size / LARGEST_CODE).view(torch.int32).long() + 0xFFFF) >> 16
    scales = bits.clamp(max=0x7FC0).to(torch.int16).view(torch.bfloat16)
    codes = exact / scales.float()[..., None]
    return torch.where(codes.abs() <= LARGEST_CODE + 1, codes.round(), 0.0).to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The elements [..., dim] in float32, from codes [..., dim] and scales [...]."""
    return codes.float() * scales.float()[..., None]


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """One layer's keys and values in the blocks of a pool."""

    format: KVFormat
    keys: Tensor
    """[blocks, block_size, kv_heads, key_dim] elements"""
    values: Tensor
    """[blocks, block_size, kv_heads, value_dim] elements; in a latent format, they are a part of `keys`."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of keys and of values, [blocks, block_size, kv_heads] bfloat16 each, if the elements are codes."""

    @classmethod
    def plain(cls, keys: Tensor, values: Tensor) -> KVBlocks:
        """Blocks whose elements are numbers of the tensors' type."""
        return cls(KVFormat(keys.dtype), keys, values)

    @classmethod
    def of_latents(cls, keys: Tensor, value_dim: int) -> KVBlocks:
        """Blocks of keys [blocks, block_size, 1, key_dim] whose first `value_dim` elements are the values."""
        return cls(KVFormat(keys.dtype, latent=True), keys, keys[..., :value_dim])

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
    def value_row(self) -> int:
        """The number of elements from the beginning of a value to the next value."""
        return self.key_dim if self.format.latent else self.value_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * sum(self.format.token_row_bytes(self.key_dim, self.value_dim))

    @property
    def is_contiguous(self) -> bool:
        """Whether there are no gaps between blocks."""
        if not self.format.is_coded:
            return self.keys.is_contiguous() and (self.format.latent or self.values.is_contiguous())
        count = self.block_size * self.num_kv_heads
        return all(part.stride(0) == count * self.format.row_bytes(part.shape[3]) for part in (self.keys, self.values))

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows [tokens, kv_heads, dim] of any type at slots [tokens]; latent values are in the keys' rows."""
        both = (self.keys, keys), (self.values, values)
        for at, (blocks, rows) in enumerate(both[:1] if self.format.latent else both):
            if self.scales is None:
                _put(blocks, slots, rows.to(blocks.dtype))
                continue
            codes, scales = encode(rows)
            _put(blocks, slots, codes)
            _put(self.scales[at], slots, scales)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in some slots [tokens], [tokens, kv_heads, dim] each.

        The copies have the blocks' type; codes are decoded to float32.
        """
        keys, values = _take(self.keys, slots), _take(self.values, slots)
        if self.scales is None:
            return keys, values
        return decode(keys, _take(self.scales[0], slots)), decode(values, _take(self.scales[1], slots))

    def read_blocks(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of blocks [requests, n], in float32, [requests, n * block_size, kv_heads, dim] each."""
        keys, values = self.keys[block_ids].flatten(1, 2), self.values[block_ids].flatten(1, 2)
        if self.scales is None:
            return keys.float(), values.float()
        key_scales, value_scales = (scales[block_ids].flatten(1, 2) for scales in self.scales)
        return decode(keys, key_scales), decode(values, value_scales)


def _put(blocks: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [tokens, ...] at slots of blocks [blocks, block_size, ...]."""
    if blocks.is_contiguous():
        blocks.flatten(0, 1).index_copy_(0, slots, rows)
    else:
        blocks[slots // blocks.shape[1], slots % blocks.shape[1]] = rows


def _take(blocks: Tensor, slots: Tensor) -> Tensor:
    """Copies of rows at slots of blocks [blocks, block_size, ...]."""
    if blocks.is_contiguous():
        return blocks.flatten(0, 1).index_select(0, slots)
    return blocks[slots // blocks.shape[1], slots % blocks.shape[1]]

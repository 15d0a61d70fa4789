"""Writes KV into slots, and copies blocks (copy on write), on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.triton.arguments import on_device

_SEGMENT_WORDS = 2048
"""The number of words of a page that one program copies."""
_WORDS = (torch.int64, torch.int32, torch.uint8)
"""Possible types of a copied word. The widest type whose size divides all addresses and lengths of pages is chosen."""


@triton.jit
def write_rows(
    keys,  # [blocks, BLOCK_SIZE, HEADS, KEY_DIM], blocks apart by a stride, otherwise without gaps
    values,
    new_keys,  # [tokens, HEADS, KEY_DIM]
    new_values,
    slots,  # [tokens]
    key_block_stride,
    value_block_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """A program writes one token's KV of all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = tl.arange(0, KEY_WIDTH)
    row = new_keys + token * key_token_stride + at // KEY_DIM * key_head_stride + at % KEY_DIM
    target = keys + block * key_block_stride + inside * (HEADS * KEY_DIM) + at
    tl.store(target, tl.load(row, mask=at < HEADS * KEY_DIM), mask=at < HEADS * KEY_DIM)
    at = tl.arange(0, VALUE_WIDTH)
    row = new_values + token * value_token_stride + at // VALUE_DIM * value_head_stride + at % VALUE_DIM
    target = values + block * value_block_stride + inside * (HEADS * VALUE_DIM) + at
    tl.store(target, tl.load(row, mask=at < HEADS * VALUE_DIM), mask=at < HEADS * VALUE_DIM)


@triton.jit(do_not_specialize=["num_copies"])
def stage_pages(
    staging,  # words: per tensor of pages [copies, its page length]
    addresses,  # int64 [tensors]: where a tensor of pages lies
    page_words,  # int64 [tensors]: length of its pages
    staging_words,  # int64 [tensors]: length of the pages of the tensors before it
    copies,  # [copies, 2]: source, target
    num_copies,
    NUM_TENSORS: tl.constexpr,
    SEGMENT: tl.constexpr,
    OUT: tl.constexpr,
):
    """A program moves SEGMENT words of one copy in one tensor: from the source to staging or, if OUT, to the target."""
    tensor, copy = tl.program_id(1) % NUM_TENSORS, tl.program_id(1) // NUM_TENSORS
    length = tl.load(page_words + tensor)
    pages = tl.load(addresses + tensor).to(staging.dtype, bitcast=True)
    page = pages + tl.load(copies + 2 * copy + OUT).to(tl.int64) * length
    staged = staging + tl.load(staging_words + tensor) * num_copies + copy * length
    at = tl.program_id(0) * SEGMENT + tl.arange(0, SEGMENT)
    if OUT:
        tl.store(page + at, tl.load(staged + at, mask=at < length), mask=at < length)
    else:
        tl.store(staged + at, tl.load(page + at, mask=at < length), mask=at < length)


def write_slots(blocks: KVBlocks, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store the KV of some tokens, by one launch.

    blocks        changed in place; gaps between them are allowed
    slots         [tokens], any integers; distinct, except in a block that nobody reads
    keys, values  [tokens, kv_heads, dim]; gaps between tokens and heads are allowed
    """
    if not len(slots):
        return
    assert blocks.scales is None, "elements are numbers"
    keys, values = keys.to(blocks.keys.dtype), values.to(blocks.values.dtype)
    keys, values = (new if new.stride(2) == 1 else new.contiguous() for new in (keys, values))
    num_heads, key_dim, value_dim = blocks.num_kv_heads, blocks.key_dim, blocks.value_dim
    with on_device(slots.device):
        write_rows[(len(slots),)](
            blocks.keys,
            blocks.values,
            keys,
            values,
            slots,
            blocks.keys.stride(0),
            blocks.values.stride(0),
            *keys.stride()[:2],
            *values.stride()[:2],
            BLOCK_SIZE=blocks.block_size,
            HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_WIDTH=triton.next_power_of_2(num_heads * key_dim),
            VALUE_WIDTH=triton.next_power_of_2(num_heads * value_dim),
            num_warps=4,
        )


class TritonBlocks:
    """Writes KV. Copies blocks in all tensors of pages by two launches: to staging memory, and from staging memory.

    If a block gets other content in the same step, it can be both a source and a target of copies. With staging memory,
    all sources are read before any target is written.
    """

    def __init__(self, pages: Sequence[Tensor]) -> None:
        """`pages`: tensors [blocks, bytes] of uint8 on one device, without gaps, which must not move afterwards."""
        self._pages = [tensor for tensor in pages if tensor.shape[1]]
        assert all(tensor.is_contiguous() and tensor.dtype == torch.uint8 for tensor in self._pages)
        places = [number for tensor in self._pages for number in (tensor.data_ptr(), tensor.shape[1])]
        self._word = next(word for word in _WORDS if all(number % word.itemsize == 0 for number in places))
        lengths = [tensor.shape[1] // self._word.itemsize for tensor in self._pages]
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self._longest, self._all_words = max(lengths), sum(lengths)
        addresses = [tensor.data_ptr() for tensor in self._pages]
        self._table = torch.tensor([addresses, lengths, starts], device=self._pages[0].device)

    write = staticmethod(write_slots)

    def copy(self, copies: Tensor) -> None:
        """Copy blocks. All sources are read before any target is written.

        `copies` is [copies, (source, target)] on the device.
        """
        if not len(copies):
            return
        staging = torch.empty(len(copies) * self._all_words, dtype=self._word, device=self._table.device)
        grid = (triton.cdiv(self._longest, _SEGMENT_WORDS), len(copies) * len(self._pages))
        with on_device(staging.device):
            for out in (0, 1):
                stage_pages[grid](
                    staging,
                    *self._table,
                    copies.contiguous(),
                    len(copies),
                    NUM_TENSORS=len(self._pages),
                    SEGMENT=_SEGMENT_WORDS,
                    OUT=out,
                    num_warps=4,
                )

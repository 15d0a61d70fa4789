"""Sizes of tiles, warps and pipeline stages, fixed by element type and head size.

Nothing is tuned at run time: two runs, or prefill and decoding, could choose different tiles, and another tile may give
other bits. Both kinds take the same TOKENS, and tiles of 16 rows for each of their warps, so that a row lies in the
same layout in both. `docs/benchmarks/triton-variants.md` lists the compiler's result for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The sizes that a kernel is compiled for, besides the layer's shape."""

    rows: int
    tokens: int
    key_width: int
    """Head size rounded up to a power of two; elements beyond the head are masked."""
    value_width: int
    value_parts: int
    """Programs that share a row's values; each computes the scores itself."""
    num_warps: int
    num_stages: int


def _width(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _tokens(dtype: torch.dtype, key_width: int) -> int:
    return 32 if dtype == torch.float32 or key_width > 128 else 64


def prefill_sizes(dtype: torch.dtype, key_dim: int, value_dim: int) -> TileSizes:
    """Sizes for `attend_folds`, which holds two mixtures of values in registers: the chunk's and the merged one."""
    key_width, value_width = _width(key_dim), _width(value_dim)
    tokens = _tokens(dtype, key_width)
    if dtype == torch.float32:
        parts = max(1, value_width // 64)
        return TileSizes(32, tokens, key_width, value_width // parts, parts, 8, 1)
    parts = max(1, value_width // 128)
    return TileSizes(128, tokens, key_width, value_width // parts, parts, 8, 3)


def decode_sizes(dtype: torch.dtype, key_dim: int, value_dim: int) -> TileSizes:
    """Sizes for `attend_items`.

    It has 64 rows, most of them masked where few requests share: prefill uses a tensor core's instruction for 64 rows
    on Hopper, and one for 16 might sum in another order. Decoding waits for KV, which is read only once in any case.
    """
    key_width, value_width = _width(key_dim), _width(value_dim)
    tokens = _tokens(dtype, key_width)
    if dtype == torch.float32:
        return TileSizes(32, tokens, key_width, value_width, 1, 8, 1)
    return TileSizes(64, tokens, key_width, value_width, 1, 4, 3)

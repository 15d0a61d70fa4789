"""The arguments of the Triton attention kernels for a layer: tensors, strides, and compile-time constants.

Sizes of tiles, warps and pipeline stages are fixed by element type and head size. Nothing is tuned at run time: two
runs, or prefill and decoding, could choose different tiles, and another tile may give other bits. Prefill and decoding
take the same TOKENS, and tiles of 16 rows for each warp, so that a row has the same layout in both kernels.
`docs/benchmarks/triton-variants.md` lists the compiler's result for each variant.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.triton.tile import LAUNCH, LOG2_E


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """One layer's attention."""

    query: Tensor
    """[tokens, heads, key_dim]; the last dimension has no gaps, as in all tensors below."""
    blocks: KVBlocks
    """Blocks of the query's dtype."""
    options: AttentionOptions

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.blocks.num_kv_heads

    @property
    def has_sinks(self) -> bool:
        return self.options.sinks is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positional arguments: query, keys, values, and slopes times log2(e) (any tensor if there are no slopes)."""
        slopes = self.options.slopes
        slopes = self.query if slopes is None else slopes.float() * LOG2_E
        return self.query, self.blocks.keys, self.blocks.values, slopes

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Positional arguments after the metadata: strides in elements, then the factors of scores.

        The factors are scale * log2(e) and 0; with a soft-cap, they are scale / cap and cap * log2(e). Because of
        log2(e), a weight is 2 to the power of a score.
        """
        scale, cap = self.options.scale, self.options.softcap
        factors = (scale * LOG2_E, 0.0) if cap is None else (scale / cap, cap * LOG2_E)
        strides = self.blocks.keys.stride()[:3], self.blocks.values.stride()[:3]
        return (*self.query.stride()[:2], *strides[0], *strides[1], *factors)

    @property
    def constants(self) -> dict[str, int]:
        """The layer's shape, by name."""
        return {
            "NUM_KV_HEADS": self.blocks.num_kv_heads,
            "GROUPS": self.num_groups,
            "KEY_DIM": self.blocks.key_dim,
            "VALUE_DIM": self.blocks.value_dim,
            "BLOCK_SIZE": self.blocks.block_size,
            "HAS_CAP": self.options.softcap is not None,
            "HAS_SLOPES": self.options.slopes is not None,
            **self.merge_constants,
        }

    @property
    def merge_constants(self) -> dict[str, int]:
        """The sizes for the merge of partial results, by name."""
        return {
            "NUM_KV_HEADS": self.blocks.num_kv_heads,
            "GROUPS": self.num_groups,
            "VALUE_DIM": self.blocks.value_dim,
            "WINDOW": self.options.sliding_window or 0,
            "LOCAL_CHUNK": self.options.local_chunk or 0,
            "WIDEN": bool(triton.knobs.runtime.interpret),
        }


def tile_constants(sizes: TileSizes) -> dict[str, int | bool]:
    """The constants of the tile, of warps and stages, and of the treatment of multiply-adds, by name."""
    return {
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
        "KEY_WIDTH": sizes.key_width,
        "VALUE_WIDTH": sizes.value_width,
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
        **LAUNCH,
    }


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The sizes for which a kernel is compiled, in addition to the layer's shape."""

    rows: int
    tokens: int
    key_width: int
    """Head size rounded up to a power of two; elements beyond the head are masked."""
    value_width: int
    value_parts: int
    """The number of programs among which a row's values are divided. Each program computes the scores itself."""
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

    A tile has 64 rows, and most rows are masked if few requests share a chunk. The reason is that prefill uses a tensor
    core's instruction for 64 rows on Hopper, and an instruction for 16 rows might sum in another order. This costs
    little: decoding waits for KV, which is read only once in any case.
    """
    key_width, value_width = _width(key_dim), _width(value_dim)
    tokens = _tokens(dtype, key_width)
    if dtype == torch.float32:
        return TileSizes(32, tokens, key_width, value_width, 1, 8, 1)
    return TileSizes(64, tokens, key_width, value_width, 1, 4, 3)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' device the current device, since Triton launches kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

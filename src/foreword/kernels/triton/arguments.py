"""What the Triton attention kernels are told about a layer: tensors, strides, and constants to compile them for."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.triton.tile import LAUNCH, LOG2_E
from foreword.kernels.triton.tuning import TileSizes


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """One layer's attention."""

    query: Tensor
    """[tokens, heads, key_dim]; the last dimension without gaps, and so below."""
    blocks: KVBlocks
    """Of the query's dtype."""
    options: AttentionOptions

    @property
    def num_kv_heads(self) -> int:
        return self.blocks.num_kv_heads

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def key_dim(self) -> int:
        return self.blocks.key_dim

    @property
    def value_dim(self) -> int:
        return self.blocks.value_dim

    @property
    def has_sinks(self) -> bool:
        return self.options.sinks is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positional: query, keys, values, and slopes in units of log 2; without slopes any tensor in their place."""
        slopes = self.options.score.slopes
        own = self.query if slopes is None else slopes.float() * LOG2_E
        return self.query, self.blocks.keys, self.blocks.values, own

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Positional, after the metadata: strides in elements, then the factors of scores.

        Scores are in units of log 2, so that weights are powers of 2. With a soft-cap the cap is in those units, and
        scores are divided by the cap first.
        """
        scale, cap = self.options.score.scale, self.options.score.cap
        factors = (scale * LOG2_E, 0.0) if cap is None else (scale / cap, cap * LOG2_E)
        strides = self.blocks.keys.stride()[:3], self.blocks.values.stride()[:3]
        return (*self.query.stride()[:2], *strides[0], *strides[1], *factors)

    @property
    def constants(self) -> dict[str, int]:
        """By name: the layer's shape."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUPS": self.num_groups,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_SIZE": self.blocks.block_size,
            "HAS_CAP": self.options.score.cap is not None,
            "HAS_SLOPES": self.options.score.slopes is not None,
            **self.merge_constants,
        }

    @property
    def merge_constants(self) -> dict[str, int]:
        """By name: the sizes for the merge of partial results."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUPS": self.num_groups,
            "VALUE_DIM": self.value_dim,
            "WINDOW": self.options.sliding_window or 0,
            "LOCAL_CHUNK": self.options.local_chunk or 0,
            "WIDEN": bool(triton.knobs.runtime.interpret),
        }


def tile_constants(sizes: TileSizes) -> dict[str, int | bool]:
    """By name: the tile, warps and stages, and how multiply-adds are treated."""
    return {
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
        "KEY_WIDTH": sizes.key_width,
        "VALUE_WIDTH": sizes.value_width,
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
        **LAUNCH,
    }

"""The number of rows a forward pass must have so that each row's bits do not depend on the others.

They do so in two places:

- A plain float32 matrix product of fewer than 16 rows takes another path, and so does a plain bfloat16 product of a
  single long row. With packed weights, only a float32 product of a single row does.
- Elementwise functions (silu, gelu, sigmoid) compute the last few elements of each thread's share one by one, with
  a different exponential than in vectors. So each share must consist of whole vectors.

docs/decisions/0002-exactness.md and 0009-packed-weights.md have the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FASTEST_PACKED_ROWS = 4
"""Products of packed weights with fewer rows take longer (docs/decisions/0009-packed-weights.md)."""


@dataclass(frozen=True, slots=True)
class RowPadding:
    """Rounds a number of rows up: at least `minimum`, and a multiple of `multiple`."""

    multiple: int
    minimum: int

    @classmethod
    def for_model(cls, widths: list[int], dtype: torch.dtype, num_threads: int, *, packed: bool = False) -> RowPadding:
        """The padding for a model on a CPU, whose activations have these `widths` as last dimensions.

        `packed`: all matrix products have packed weights.
        """
        vector = 64 * num_threads  # two AVX-512 vectors of bfloat16, for every thread
        multiple = math.lcm(num_threads, vector // math.gcd(vector, *widths))
        if packed:
            return cls(multiple, FASTEST_PACKED_ROWS)
        return cls(multiple, 16 if dtype == torch.float32 else 2)

    @classmethod
    def fixed(cls, num_rows: int) -> RowPadding:
        """Pad to `num_rows` rows, or to a multiple."""
        return cls(num_rows, num_rows)

    def __call__(self, num_rows: int) -> int:
        rows = max(num_rows, self.minimum)
        return -(-rows // self.multiple) * self.multiple

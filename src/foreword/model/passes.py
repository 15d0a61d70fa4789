"""Cutting a batch into passes of limited size, for products whose bits depend on the number of rows.

    tokens of requests    |----0----|-1-|------2------|3|4|
    passes of 12          |-----------.|-----------.|---|      a request may continue in the next pass

Each pass writes its KV before the next one attends, so the passes together see what the whole batch would see.

A pass is padded (`RowPadding`) to a number of rows at which each row's bits do not depend on other rows. Without
padding, bits depend on other rows in two places:

- A plain float32 matrix product of fewer than 16 rows takes another path, and so does a plain bfloat16 product of a
  single long row. With packed weights, only a float32 product of a single row takes another path.
- Elementwise functions (silu, gelu, sigmoid) compute the last few elements of each thread's share one by one, with
  a different exponential than in vectors. So each share must consist of whole vectors.

docs/decisions/0002-exactness.md and 0009-packed-weights.md have the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from foreword.batch import NO_ENTRIES, Batch
from foreword.model.sampling.readout import Rows

FASTEST_PACKED_ROWS = 4
"""With packed weights, products of fewer rows than this take longer (docs/decisions/0009-packed-weights.md)."""


def split_batch(batch: Batch, logit_rows: Rows, max_tokens: int) -> Iterator[tuple[Batch, Rows]]:
    """Yield passes of `max_tokens` tokens (the last may be shorter), each with its part of `logit_rows` (ascending).

    A pass carries no entries, because it may hold only a part of an entry.
    """
    for start in range(0, batch.num_tokens, max_tokens):
        end = min(start + max_tokens, batch.num_tokens)
        requests = np.flatnonzero((batch.query_starts[:-1] < end) & (batch.query_starts[1:] > start))
        cuts = np.clip(batch.query_starts[np.append(requests, requests[-1] + 1)], start, end) - start
        rows = logit_rows[(logit_rows >= start) & (logit_rows < end)] - start
        yield (
            replace(
                batch,
                entries=NO_ENTRIES,
                token_ids=batch.token_ids[start:end],
                positions=batch.positions[start:end],
                rotary=None if batch.rotary is None else batch.rotary[..., start:end],
                adapted=batch.adapted and batch.adapted._replace(numbers=batch.adapted.numbers[start:end]),
                shown=tuple(part for shown in batch.shown if len((part := shown.within(start, end)).tokens)),
                query_starts=cuts.astype(np.int32),
                group_tables=tuple(table[requests] for table in batch.group_tables),
                write_from=batch.write_from[requests],
            ),
            rows,
        )


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
        """Pad to a multiple of `num_rows` rows."""
        return cls(num_rows, num_rows)

    def __call__(self, num_rows: int) -> int:
        rows = max(num_rows, self.minimum)
        return -(-rows // self.multiple) * self.multiple

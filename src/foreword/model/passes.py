"""Cutting a batch into passes of limited size, for products whose bits depend on the number of rows.

    tokens of requests    |----0----|-1-|------2------|3|4|
    passes of 12          |-----------.|-----------.|---|      a request may continue in the next pass

Each pass writes its KV before the next one attends, so the passes together see what the whole batch would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from foreword.batch import NO_ENTRIES, Batch
from foreword.model.sampling.readout import Rows


def split_batch(batch: Batch, logit_rows: Rows, most: int) -> Iterator[tuple[Batch, Rows]]:
    """Yield passes of `most` tokens (the last may be shorter), each with its part of `logit_rows` (ascending).

    A pass carries no entries, because it may hold only a part of one.
    """
    for start in range(0, batch.num_tokens, most):
        end = min(start + most, batch.num_tokens)
        requests = np.flatnonzero((batch.query_starts[:-1] < end) & (batch.query_starts[1:] > start))
        cuts = np.clip(batch.query_starts[np.append(requests, requests[-1] + 1)], start, end) - start
        rows = logit_rows[(logit_rows >= start) & (logit_rows < end)] - start
        yield (
            replace(
                batch,
                entries=NO_ENTRIES,
                token_ids=batch.token_ids[start:end],
                positions=batch.positions[start:end],
                rotary=None if batch.rotary is None else batch.rotary[start:end],
                adapted=batch.adapted and batch.adapted._replace(numbers=batch.adapted.numbers[start:end]),
                shown=tuple(own for one in batch.shown if len((own := one.within(start, end)).tokens)),
                query_starts=cuts.astype(np.int32),
                group_tables=tuple(table[requests] for table in batch.group_tables),
                write_from=batch.write_from[requests],
            ),
            rows,
        )

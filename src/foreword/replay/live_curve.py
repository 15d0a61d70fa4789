"""LRU at a few capacities at once, for traffic that keeps coming.

Knows prefix keys. `distances.LruCurve` keeps every block of a finite recording; this curve keeps a sample of fixed
size. A block beyond the largest capacity cannot be a hit at any capacity, so it is forgotten.

After Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS" (FAST 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.errors import ConfigError
from foreword.replay.distances import NUM_PARTS
from foreword.replay.keys import PrefixKeys
from foreword.replay.stack import LruStack

MAX_SAMPLED_BLOCKS = 32_768
"""Size of the sample, about 3 MB. Caches with no larger capacity are followed block by block, without an error."""

WINDOW_BLOCKS = 2**22
"""Number of prompt blocks after which older counts are halved: old traffic fades."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The estimate for one capacity."""

    num_blocks: int
    hit_rate: float
    """Share of the prompt tokens that LRU would have found, in whole blocks."""
    standard_error: float
    """Standard error of the sampling; 0.0 if all blocks are followed."""


class LiveLruCurve:
    """Hit rate over capacity, for the requests that it followed.

    Follows the blocks whose key falls under a threshold, and scales their distances up accordingly. A
    request costs a few array operations over its blocks.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        block_tokens: int,
        max_sampled_blocks: int = MAX_SAMPLED_BLOCKS,
        window_blocks: int = WINDOW_BLOCKS,
    ) -> None:
        """`capacities` in blocks of `block_tokens`, ascending. Raises ConfigError."""
        if not capacities or min(capacities) < 1 or list(capacities) != sorted(capacities):
            raise ConfigError(f"capacities={list(capacities)} are not blocks in ascending order; use 1 or more")
        if max_sampled_blocks < 1 or block_tokens < 1 or window_blocks < 1:
            raise ConfigError(
                f"max_sampled_blocks={max_sampled_blocks}, block_tokens={block_tokens} and "
                f"window_blocks={window_blocks} must be at least 1"
            )
        self.block_tokens = block_tokens
        self.sampling_rate = min(1.0, max_sampled_blocks / capacities[-1])
        self._capacities = np.array(capacities, np.int64)
        self._threshold = np.uint64(round(self.sampling_rate * 2**32))
        self._max_sampled = max_sampled_blocks
        self._window = window_blocks
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._stack = LruStack()
        self._hits = np.zeros((NUM_PARTS, len(self._capacities)))
        """Sampled blocks found, by part of the sample and capacity."""
        self._looked_up = np.zeros(NUM_PARTS)
        """Sampled blocks looked for, by part of the sample."""
        self._num_blocks = 0.0
        self._num_tokens = 0.0

    @property
    def num_followed(self) -> int:
        """Number of blocks in the sample now."""
        return len(self._stack)

    def admit(self, keys: PrefixKeys, num_prompt_tokens: int) -> None:
        """Follow the next request: keys of its full blocks, the prompt's first.

        The blocks after the prompt hold its answer: later prompts can find them, but this request did not look them up.
        """
        num_looked_up = num_prompt_tokens // self.block_tokens
        self._num_tokens += num_prompt_tokens
        self._num_blocks += num_looked_up
        if self.sampling_rate < 1.0:
            chosen = np.flatnonzero((keys >> np.uint64(32)) < self._threshold)
            keys, num_looked_up = keys[chosen], int(np.searchsorted(chosen, num_looked_up))
        parts = (keys[:num_looked_up] % np.uint64(NUM_PARTS)).astype(np.int64)
        np.add.at(self._looked_up, parts, 1)
        distances = self._stack.admit(keys)[:num_looked_up]
        seen = distances > 0
        # Of D different blocks, itself included, the sample has itself and its share of the D - 1 others.
        needed = (distances[seen] - 1) / self.sampling_rate + 1
        np.add.at(self._hits, parts[seen], needed[:, None] <= self._capacities)
        if len(self._stack) > self._max_sampled * 5 // 4:
            self._stack.keep_latest(self._max_sampled)
        if self._num_blocks > self._window:
            self._fade()

    def _fade(self) -> None:
        self._hits /= 2
        self._looked_up /= 2
        self._num_blocks /= 2
        self._num_tokens /= 2

    def points(self) -> list[CurvePoint]:
        """The curve so far; no points before the first request."""
        if not self._num_tokens:
            return []
        rate, per_token = self.sampling_rate, self.block_tokens / self._num_tokens
        # The number of lookups is known; the misses are estimated. An estimate of the hits would depend on whether the
        # most popular blocks are in the sample (SHARDS-adj).
        missed = self._looked_up[:, None] - self._hits
        rates = np.clip((self._num_blocks - missed.sum(axis=0) / rate) * per_token, 0.0, 1.0)
        errors = missed.std(axis=0, ddof=1) * np.sqrt(NUM_PARTS) / rate * per_token * (rate < 1.0)
        return [
            CurvePoint(int(capacity), float(hit_rate), float(error))
            for capacity, hit_rate, error in zip(self._capacities, rates, errors, strict=True)
        ]

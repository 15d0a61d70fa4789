"""What each replica has of the sources that a linked prompt's tokens are copied from.

A replica first computes what it lacks of a source, apart. Then it copies the run, which costs next to nothing:

    prompt     |==== cached ====|--- computed ---|~~~ copied ~~~|--- computed ---|~~~ copied ~~~|--- computed ---|
    sources                             |== cached ==|- computed -|            |======= cached =======|

A run that lies in the cached beginning needs no source. What a source shares with the prompt or with other sources,
such as the instructions, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.cluster.holders import Key


class CopiedRun(NamedTuple):
    """Tokens `begin` to `end` (exclusive) of a prompt that are copied from a source."""

    begin: int
    end: int
    keys: list[Key]
    """Of the source's blocks, from its first one to the one that holds the run's last token."""


@dataclass(frozen=True, slots=True)
class SourceHits:
    """The sources of one prompt on all replicas."""

    runs: tuple[CopiedRun, ...]
    depths: Int64Array
    """The number of leading blocks of each run's source that each replica has, [runs, slots]."""
    pending: npt.NDArray[np.bool_]
    """Whether the run reaches beyond what the replica has of the prompt, [runs, slots]."""
    num_blocks: int
    """Blocks of all sources that are not the prompt's too, each once."""
    missing_blocks: Int64Array
    """Those of them that a replica needs and lacks, [slots]."""
    copied_tokens: Int64Array
    """Tokens of the prompt that a replica would copy, [slots]."""

    @classmethod
    def of(
        cls,
        runs: Sequence[CopiedRun],
        prompt_keys: Sequence[Key],
        hit_tokens: Int64Array,
        depths: Int64Array,
    ) -> SourceHits:
        """`hit_tokens`: what each replica has of the prompt, [slots]; `depths`: as of these runs, [runs, slots]."""
        begins, ends, lengths = np.array([(run.begin, run.end, len(run.keys)) for run in runs]).T[:, :, np.newaxis]
        # A replica needs the sources of the last runs. So each block counts at the last run that has it.
        shared = np.array(_shared_with_later(runs, prompt_keys))[:, np.newaxis]
        pending = ends > hit_tokens
        missing = np.maximum(lengths - np.maximum(depths, shared), 0) * pending
        copied = np.maximum(ends - np.maximum(begins, hit_tokens), 0)
        num_blocks = int((lengths - shared).sum())
        return cls(tuple(runs), depths, pending, num_blocks, missing.sum(axis=0), copied.sum(axis=0))

    def lacking(self, slot: int) -> list[Key]:
        """The keys of the blocks that this replica would compute for sources."""
        return list(dict.fromkeys(key for run, depth in self._needed(slot) for key in run.keys[depth:]))

    def last_held(self, slot: int) -> list[Key]:
        """The last block that this replica has of each source that it would use."""
        return list(dict.fromkeys(run.keys[depth - 1] for run, depth in self._needed(slot) if depth))

    def _needed(self, slot: int) -> list[tuple[CopiedRun, int]]:
        depths, pending = self.depths[:, slot].tolist(), self.pending[:, slot].tolist()
        return [(run, depth) for run, depth, is_needed in zip(self.runs, depths, pending, strict=True) if is_needed]

    def counts(self) -> SourceHits:
        """The sums alone, for a log."""
        return replace(self, runs=(), depths=self.depths[:0], pending=self.pending[:0])


def _shared_with_later(runs: Sequence[CopiedRun], prompt_keys: Sequence[Key]) -> list[int]:
    """For each run the number of its leading blocks that are the prompt's, or a later run's.

    Keys name all that is before their block, so equal keys are equal beginnings.
    """
    seen, shared = set(prompt_keys), []
    for run in reversed(runs):
        shared.append(next((at for at, key in enumerate(run.keys) if key not in seen), len(run.keys)))
        seen.update(run.keys)
    return shared[::-1]

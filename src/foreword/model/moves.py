"""Moving KV from slots to slots: values are copied, keys are copied and turned to their new positions.

Knows slots, tensors and rotations; knows nothing of prompts, sources or why. A key is turned once, in float32, from the
canonical key at its source, and rounded once. So a moved key's bits depend on the source's key and on the shift alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Move
from foreword.model.rotation import KeyRotation, Turn
from foreword.model.storage import KVStorage


class KeyMover:
    """Moves KV within one storage, for one thread at a time."""

    def __init__(self, storage: KVStorage, rotation: KeyRotation) -> None:
        self._storage, self._rotation = storage, rotation
        self._turns_of = functools.lru_cache(maxsize=1024)(Turn.cosines)

    def move(self, moves: Sequence[Move]) -> None:
        """Move tokens in all layers. No source may be a target."""
        moving = [one for one in moves if len(one.sources)]
        if not moving:
            return
        sources = torch.from_numpy(np.concatenate([one.sources for one in moving]))
        targets = torch.from_numpy(np.concatenate([one.targets for one in moving]))
        shifts = np.array([one.shift for one in moving], np.int64)
        lengths = np.array([len(one.sources) for one in moving], np.int64)
        turned: dict[Turn, tuple[Tensor, Tensor]] = {}
        for layer, turn in self._rotation.turns.items():
            keys, values = self._storage.read(layer, sources)
            if turn.table is not None and shifts.any():
                if turn not in turned:
                    turned[turn] = self._tables(turn, shifts, lengths)
                keys = turn.apply(keys.float(), *turned[turn])
            self._storage.write(layer, targets, keys, values)

    def _tables(self, turn: Turn, shifts: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token, [tokens, 1, width / 2]."""
        pairs = [self._turns_of(turn, shift) for shift in shifts.tolist()]
        counts = torch.from_numpy(lengths)
        cosine, sine = (torch.stack(own).repeat_interleave(counts, dim=0)[:, None] for own in zip(*pairs, strict=True))
        return cosine, sine

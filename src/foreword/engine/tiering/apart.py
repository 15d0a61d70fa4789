"""Payloads that are no blocks of the pool, in its tiers: what an encoder made of pictures.

A tier names a payload by namespace, group and key, and looks into none. Blocks of the pool have small group ids; these
have the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from foreword.cache import BlockHash
from foreword.engine.tiering.loads import MOST_PROBE_S, SHORTEST_FIRST_DEADLINE_S
from foreword.engine.tiering.stores import Stores
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import EXACT, BlockKeys, BlockRun, Buffers, Tier

GROUP_ID = (1 << 16) - 1


class PayloadsApart:
    """Loads and stores of such payloads. The engine's thread calls it, and waits for loads: computing takes seconds."""

    def __init__(self, tiers: Sequence[Tier], namespace: bytes, root: BlockHash, stores: Stores) -> None:
        """`root`: of all block keys, and so of these names; `stores`: what counts the bytes of a day."""
        self._tiers, self._namespace, self._root, self._stores = tiers, namespace, root, stores

    def load(self, names: Sequence[str], payloads: Sequence[memoryview]) -> list[bool]:
        """Fill the payloads that one tier has; says which those are. Waits 5 s at most for each tier."""
        keys, sizes = self._keys(names), np.array([len(one) for one in payloads], np.int64)
        for tier in self._tiers:
            asked = tier.probe(keys, deadline_s=MOST_PROBE_S)
            asked.wait()
            here = np.flatnonzero(asked.report.outcomes == Outcome.PRESENT)
            if len(here):
                buffers = Buffers([payloads[number] for number in here.tolist()])
                ticket = tier.load(keys.select(here), sizes[here], buffers, deadline_s=SHORTEST_FIRST_DEADLINE_S)
                ticket.wait()
                done = set(here[ticket.report.outcomes == Outcome.DONE].tolist())
                return [number in done for number in range(len(names))]
        return [False] * len(names)

    def store(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Begin to store payloads, which must not change any more."""
        count = len(names)
        self._stores.store_apart(
            BlockRun(
                self._keys(names),
                np.array([len(one) for one in payloads], np.int64),
                Buffers(payloads),
                np.full(count, -1, np.int32),
                np.full(count, EXACT, np.uint16),
                np.ones(count, np.float32),
            )
        )

    def _keys(self, names: Sequence[str]) -> BlockKeys:
        keys = [hashlib.sha256(self._root + name.encode()).digest() for name in names]
        return BlockKeys.of_group(self._namespace, GROUP_ID, keys)

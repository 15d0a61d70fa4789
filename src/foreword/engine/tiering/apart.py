"""Keeps the rows that an encoder made of pictures in the pool's tiers, as payloads that are not blocks of the pool.

A tier names a payload by namespace, group and key, and never reads its content. Blocks of the pool have small group
ids, and these payloads have the last group id. A tier's threads have buffers as large as the largest payload, so large
payloads are cut into pieces.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import compress

import numpy as np

from foreword.cache import BlockHash
from foreword.engine.tiering.loads import MOST_PROBE_S, WORTH
from foreword.engine.tiering.stores import Stores
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import EXACT, GROUP_APART, BlockKeys, BlockRun, Buffers, Tier

PIECE_BYTES = 4 << 20
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 2.0
"""The longest waits for a load, in seconds. FIRST_WAIT_S: while the time to compute is unknown. MOST_WAIT_S: once it is
known."""
REST_S = 30.0
"""Seconds without loads after a load that took too long: otherwise every request would wait for the slow tier again."""


class PayloadsApart:
    """Loads and stores payloads other than blocks. The engine's thread waits for loads, so all requests wait, too."""

    def __init__(self, tiers: Sequence[Tier], namespace: bytes, root: BlockHash, stores: Stores) -> None:
        """`root`: the root of all block keys; the keys of the payloads depend on it, too. `stores` counts the bytes
        that are stored on a day.
        """
        self._tiers, self._namespace, self._root, self._stores = tiers, namespace, root, stores
        self._rests_until = 0.0

    def load(self, names: Sequence[str], payloads: Sequence[memoryview], compute_s: float | None) -> list[bool]:
        """Fill the payloads that the tiers have; returns whether each was filled.

        `compute_s`: seconds to make all payloads; None: unknown. The wait for all tiers together is at most four fifths
        of that time, and at most 2 s (0.5 s if the time is unknown). Nothing is loaded from a tier that would take
        longer.
        """
        if time.monotonic() < self._rests_until:
            return [False] * len(names)
        until = time.monotonic() + (FIRST_WAIT_S if compute_s is None else min(MOST_WAIT_S, WORTH * compute_s))
        keys, pieces, owners = self._cut(names, payloads)
        sizes = np.array([len(piece) for piece in pieces], np.int64)
        missing = np.ones(len(pieces), np.bool_)
        for tier in self._tiers:
            if not missing.any():
                break
            lacking = np.flatnonzero(missing)
            probe = tier.probe(keys.select(lacking), deadline_s=min(MOST_PROBE_S, max(0.0, until - time.monotonic())))
            probe.wait()
            here = lacking[probe.report.outcomes == Outcome.PRESENT]
            num_bytes, wait_s = int(sizes[here].sum()), until - time.monotonic()
            worth = wait_s if compute_s is None else WORTH * compute_s * num_bytes / int(sizes.sum())
            if not len(here) or tier.estimate_load_s(num_bytes) > min(wait_s, worth):
                continue
            buffers = Buffers([pieces[number] for number in here.tolist()])
            # A late load is cancelled before it times out, because a tier forgets blocks whose load timed out.
            ticket = tier.load(keys.select(here), sizes[here], buffers, deadline_s=10 * MOST_WAIT_S)
            if not ticket.wait(wait_s):
                ticket.cancel()
                self._rests_until = time.monotonic() + REST_S
            missing[here[ticket.report.outcomes == Outcome.DONE]] = False
            if time.monotonic() < self._rests_until:
                break
        lost = set(owners[missing].tolist())
        return [number not in lost for number in range(len(names))]

    def store(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Begin to store the payloads that are admitted; they must not change any more."""
        admitted = [self._stores.admits_apart(self._key(name)) for name in names]
        names = list(compress(names, admitted))
        keys, pieces, _ = self._cut(names, list(compress(payloads, admitted)))
        count = len(pieces)
        if not count:
            return
        self._stores.store_apart(
            BlockRun(
                keys,
                np.array([len(piece) for piece in pieces], np.int64),
                Buffers(pieces),
                np.full(count, -1, np.int32),
                np.full(count, EXACT, np.uint16),
                np.ones(count, np.float32),
            )
        )

    def _cut(
        self, names: Sequence[str], payloads: Sequence[memoryview]
    ) -> tuple[BlockKeys, list[memoryview], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Cut payloads into pieces; returns the pieces' keys, the pieces, and for each piece its payload's number."""
        cut = [
            (number, self._key(f"{name} {start}"), payload[start : start + PIECE_BYTES])
            for number, (name, payload) in enumerate(zip(names, payloads, strict=True))
            for start in range(0, len(payload), PIECE_BYTES)
        ]
        keys = BlockKeys.of_group(self._namespace, GROUP_APART, [key for _, key, _ in cut])
        return keys, [piece for _, _, piece in cut], np.array([number for number, _, _ in cut], np.int64)

    def _key(self, name: str) -> bytes:
        return hashlib.sha256(self._root + name.encode()).digest()

"""The `Tier` protocol: a place for blocks below the pool, and the values that travel to and from it.

A block is named by its namespace (which model and arithmetic wrote it), its group id and its block key. Its payload is
a fixed number of bytes for each group. A tier may be slow, full, torn or gone: a block that it cannot give back bit for
bit is a miss, with a reason.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.tiers.ticket import Outcome, Ticket

NAMESPACE_BYTES = 16
KEY_BYTES = 32
BoolArray = npt.NDArray[np.bool_]
KeyArray = npt.NDArray[np.uint8]
"""Block keys, [blocks, 32]."""
GROUP_APART = (1 << 16) - 1
"""The group of payloads other than blocks of the pool: rows that an encoder made of pictures."""
EXACT = 1
"""Flag of a block: any order of computation gives the same bits."""
PINNED = 2
"""Flag of a block: eviction keeps it as long as another block can be evicted."""


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Names of blocks of one namespace and of one or more groups. Do not change them: tiers keep references."""

    namespace: bytes
    """16 bytes."""
    group_ids: npt.NDArray[np.uint16]
    """[blocks]"""
    keys: KeyArray
    """[blocks, 32]; shorter keys are filled up with zeros."""

    def __post_init__(self) -> None:
        assert len(self.namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes"
        assert self.keys.shape == (len(self.group_ids), KEY_BYTES), f"keys have shape {self.keys.shape}"

    @classmethod
    def of_group(cls, namespace: bytes, group_id: int, keys: Sequence[bytes]) -> BlockKeys:
        """Names of blocks that all belong to one group. All keys have the same length, at most 32 bytes."""
        num_bytes = len(keys[0]) if keys else KEY_BYTES
        joined = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), num_bytes)
        if num_bytes < KEY_BYTES:
            joined = np.pad(joined, ((0, 0), (0, KEY_BYTES - num_bytes)))
        return cls(namespace, np.full(len(keys), group_id, np.uint16), joined)

    def __len__(self) -> int:
        return len(self.group_ids)

    def names(self) -> list[bytes]:
        """Namespace, group and key of each block as one string of 50 bytes."""
        rows = np.empty((len(self), NAMESPACE_BYTES + 2 + KEY_BYTES), np.uint8)
        rows[:, :NAMESPACE_BYTES] = np.frombuffer(self.namespace, np.uint8)
        rows[:, NAMESPACE_BYTES : NAMESPACE_BYTES + 2] = self.group_ids.astype("<u2")[:, None].view(np.uint8)
        rows[:, NAMESPACE_BYTES + 2 :] = self.keys
        names: list[bytes] = rows.view(f"V{rows.shape[1]}").ravel().tolist()
        return names

    def select(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> BlockKeys:
        """The chosen names, in order."""
        return BlockKeys(self.namespace, self.group_ids[chosen], self.keys[chosen])


class BlockSink(Protocol):
    """Where loaded blocks go: the caller's memory."""

    def put(self, index: int, payload: memoryview) -> None:
        """Copy the verified payload of the `index`-th block of the load. `payload` is valid during the call only.

        A thread of the tier calls this, one block at a time, and never after the ticket is done or cancelled.
        """
        ...


class BlockSource(Protocol):
    """The caller's memory, from which a tier copies the blocks that it is to store."""

    def take(self, index: int, out: memoryview) -> None:
        """Write the payload of the `index`-th block of the run to `out`, which has its length.

        A thread of the tier calls this, one block at a time, and never after the ticket is done or cancelled.
        """
        ...


@dataclass(frozen=True, slots=True)
class Buffers:
    """One buffer for each block, as sink and as source."""

    buffers: Sequence[memoryview]

    def put(self, index: int, payload: memoryview) -> None:
        self.buffers[index][:] = payload

    def take(self, index: int, out: memoryview) -> None:
        out[:] = self.buffers[index]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one prefix, head first, to be stored together."""

    keys: BlockKeys
    payload_bytes: npt.NDArray[np.int64]
    """[blocks]"""
    source: BlockSource
    parents: npt.NDArray[np.int32]
    """[blocks]: the index in this run of the block before it in the prefix; -1 if that block is not in the run."""
    flags: npt.NDArray[np.uint16]
    """[blocks]: `EXACT`, `PINNED`, both or 0."""
    values: npt.NDArray[np.float32]
    """[blocks]: expected seconds that a hit saves, above 0; eviction compares them."""
    ttl_s: float | None = None
    """Seconds after which the blocks are no longer found; None: never."""

    @classmethod
    def chain(
        cls,
        keys: BlockKeys,
        payload_bytes: int,
        source: BlockSource,
        *,
        flags: int = EXACT,
        ttl_s: float | None = None,
    ) -> BlockRun:
        """A run of blocks of equal length, each the child of the one before it."""
        count = len(keys)
        return cls(
            keys,
            np.full(count, payload_bytes, np.int64),
            source,
            np.arange(-1, count - 1, dtype=np.int32),
            np.full(count, flags, np.uint16),
            np.ones(count, np.float32),
            ttl_s,
        )

    def repeats(self) -> BoolArray:
        """Whether each block has the name of an earlier block of the run, [blocks]."""
        names = self.keys.names()
        first = dict(zip(reversed(names), reversed(range(len(names))), strict=True))
        return np.array([first[name] != index for index, name in enumerate(names)], bool)


@dataclass(slots=True)
class TierStats:
    """Counts since the tier was opened. `Tier.stats` returns a copy, which does not change."""

    num_blocks: int = 0
    """Blocks that can be looked up now."""
    stored_bytes: int = 0
    """Physical bytes that this process's blocks occupy now."""
    shared_bytes: int = 0
    """Physical bytes of all processes' blocks in the same place, including ours."""
    budget_bytes: int = 0
    num_looked_up: int = 0
    num_found: int = 0
    num_loaded: int = 0
    loaded_bytes: int = 0
    num_written: int = 0
    written_bytes: int = 0
    """Physical bytes written, including headers and the blocks that eviction copied forward."""
    num_evicted: int = 0
    num_copied_forward: int = 0
    not_loaded: dict[str, int] = field(default_factory=dict)
    """Blocks that a load did not give, by outcome."""
    not_stored: dict[str, int] = field(default_factory=dict)
    """Blocks that a store dropped, by outcome."""
    num_damaged_headers: int = 0
    """Places in files where a run's header should be and does not verify."""
    load_bytes_per_s: float = 0.0
    """Rate of recent loads; 0 before the first."""
    queued_load_bytes: int = 0
    queued_store_bytes: int = 0
    is_scanned: bool = True
    """Whether all blocks that were here when the tier was opened can be looked up."""
    breaker: str = "closed"
    """`open` while a server that failed is left alone, `half-open` during the next try."""
    num_breaker_trips: int = 0


DoneCallback = Callable[[Ticket], None]


class Tier(Protocol):
    """A place for blocks below the pool.

    Any thread may call any method; no method except `close` waits for I/O. The engine's thread calls `lookup`,
    `load`, `store` and `forget` between steps.
    """

    name: str
    """For statistics: `disk`, `store`, `host`."""

    def lookup(self, keys: BlockKeys) -> BoolArray:
        """Which blocks are known to be here, [blocks]. Reads memory only.

        True means that a load is worth a try: the tier may evict or lose the block before it is loaded. A block whose
        load failed is not found again until it is stored again. A tier to which other processes write asks in the
        background for blocks that it does not know; see `probe`.
        """
        ...

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        """Find out which blocks are here. The ticket is done after at most `deadline_s` seconds, and usually at once.

        The ticket's report has PRESENT or MISSING for each block, or why there is no answer: IO_ERROR, TIMEOUT,
        CANCELLED or QUEUE_FULL. `lookup` finds the blocks that are PRESENT.
        """
        ...

    def load(
        self,
        keys: BlockKeys,
        payload_bytes: npt.NDArray[np.int64],
        sink: BlockSink,
        *,
        deadline_s: float,
        on_done: DoneCallback | None = None,
    ) -> Ticket:
        """Begin to load blocks, in order, into `sink`. The ticket is done after at most `deadline_s` seconds.

        Every block is verified before the sink gets it. The ticket's report has one outcome for each block: DONE,
        MISSING, CORRUPT, IO_ERROR, TIMEOUT, CANCELLED or QUEUE_FULL. Before the ticket is done, the tier forgets each
        block that is MISSING, CORRUPT, IO_ERROR or TIMEOUT. `keys` and `sink` must live until the ticket is done or
        cancelled. The report stays valid forever.
        """
        ...

    def estimate_load_s(self, num_bytes: int) -> float:
        """Seconds until a load of that size would end, from the queue and the rate of recent loads."""
        ...

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        """Begin to store a run. The blocks' memory must not change until the ticket is done or cancelled.

        Blocks that are here already are PRESENT. If the queue or the tier is full, the blocks are dropped (QUEUE_FULL,
        NO_ROOM) and counted: a store never waits, and raises no error.
        """
        ...

    def forget(self, keys: BlockKeys) -> None:
        """Stop `lookup` from finding these blocks, until they are stored again. Unknown blocks do no harm."""
        ...

    def close(self, flush_s: float) -> None:
        """Work on queued stores for at most `flush_s` seconds, cancel the rest, free everything. May be called twice.

        Afterwards, `lookup` finds nothing, and loads and stores end at once.
        """
        ...

    def stats(self) -> TierStats:
        """Return the counts so far."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the tier's tables contradict each other. Changes nothing, and does no I/O."""
        ...


def joined_keys(batches: Iterable[BlockKeys]) -> BlockKeys:
    """Join the names of one or more batches of one namespace, in order."""
    listed = list(batches)
    assert len({batch.namespace for batch in listed}) == 1, "the batches are of several namespaces"
    return BlockKeys(
        listed[0].namespace,
        np.concatenate([batch.group_ids for batch in listed]),
        np.concatenate([batch.keys for batch in listed]),
    )


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Counts under a lock. Any thread may call any method."""

    stats: TierStats = field(default_factory=TierStats)
    stats_lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **amounts: int) -> None:
        with self.stats_lock:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)

    def count_load(self, outcomes: npt.NDArray[np.uint8]) -> None:
        self._count_rest(self.stats.not_loaded, outcomes)

    def count_store(self, outcomes: npt.NDArray[np.uint8]) -> None:
        self._count_rest(self.stats.not_stored, outcomes)

    def copy_of_stats(self) -> TierStats:
        with self.stats_lock:
            stats = self.stats
            return replace(stats, not_loaded=dict(stats.not_loaded), not_stored=dict(stats.not_stored))

    def _count_rest(self, counts: dict[str, int], outcomes: npt.NDArray[np.uint8]) -> None:
        with self.stats_lock:
            for value, count in Counter(outcomes.tolist()).items():
                if value not in (Outcome.DONE, Outcome.PRESENT):
                    name = Outcome(value).name.lower()
                    counts[name] = counts.get(name, 0) + count

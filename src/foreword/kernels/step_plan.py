"""The plan of a compiled kernel's step: items of work, and which requests share chunks of KV.

A plan serves all layers of a step that use the same block tables.

Requests with few queries (mostly decoding) are split by chunks of KV; they are called *members* here. Members are
sorted by their block tables, so members with equal leading blocks are neighbours. An item is some neighbours and one
chunk that they share:

    chunk       0   1   2   3   4
    member 0    A   B   C   D          items:  A 0-3 | B 0-2 | E 3-3 | C 0-1 | ...
    member 1    A   B   C   F   G      A run is as deep as its members' tables agree; nested prefixes are runs
    member 2    A   B   H              inside runs. ChunkAttention (ACL 2024) calls this the two phases: chunk
    member 3    A   E   I              first, where runs share a read of KV, then each sequence's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.batch import Batch, Int64Array, IntArray

CHUNK = 256
"""Tokens per chunk of KV. Chunks begin at multiples of CHUNK. A partial result of a compiled kernel covers a chunk."""
FOLD_QUERIES = 64
"""The most queries of one request that are computed together, chunk after chunk."""
FOLD, SHARED, LEADING = range(3)
"""Kinds of items of work, each with an item's columns after the kind.

FOLD, all KV for some queries of one request: request, first query, number of queries.
SHARED, one chunk of KV for neighbouring members: chunk, first member, last member + 1.
LEADING, the first chunks for neighbouring members (only in `cpu/attention.py`): number of chunks, first member, last
member + 1."""
FEW_QUERIES = 16
"""The most queries of a request that is split by chunks."""


@dataclass(frozen=True, slots=True)
class SharingRule:
    """Decides whether to search for shared chunks: reading less KV must save more time than the search takes.

    Sharing itself costs nothing, because the kernel computes partial results per chunk anyway. The rates below were
    measured by `benchmarks/attention.py`. `saved_ns_per_byte` was measured with two threads and with KV outside the
    processor's caches.
    """

    token_bytes: int
    """Bytes of a token's KV in all layers; 0: not known yet, so always search."""
    saved_ns_per_byte: float = 0.02
    search_ns: float = 10_000
    search_ns_per_block: float = 5

    def saving_us(self, num_chunks: int) -> float:
        """The microseconds that are saved if `num_chunks` chunks are not read again."""
        return num_chunks * CHUNK * self.token_bytes * self.saved_ns_per_byte / 1e3

    def search_us(self, num_blocks: int) -> float:
        """The microseconds that it takes to sort block tables with `num_blocks` entries in all."""
        return (self.search_ns + num_blocks * self.search_ns_per_block) / 1e3

    def pays(self, num_chunks: int, num_blocks: int) -> bool:
        """Whether saving up to `num_chunks` reads of chunks may be worth a search through `num_blocks` entries."""
        return not self.token_bytes or self.saving_us(num_chunks) > self.search_us(num_blocks)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's plan as arrays for compiled kernels. The tables are int32, all other arrays are int64."""

    tables: IntArray
    block_size: int
    num_tokens: int
    requests: Int64Array
    """[requests, 5]: first row, queries, first position, chunks, first slot of partial results."""
    items: Int64Array
    """[items, 4]: the kind FOLD or SHARED, and the columns that this kind of item has."""
    num_folds: int
    fold_queries: int
    """The most queries of a FOLD item."""
    members: Int64Array
    """The requests with few queries, sorted so that neighbours share the most chunks."""
    merges: Int64Array
    """[queries of members, 2]: request, query."""
    num_slots: int
    """The number of partial results per head."""
    most_queries: int
    """The most queries of a SHARED item."""
    num_chunks: int
    """The number of chunks that each member sees, summed over all members. There are at most as many SHARED items."""
    groups: tuple[int, ...]
    """The number of requests in each group that shares its first chunk."""
    seen_to: Int64Array | None = None
    """See `Batch.seen_to`."""


def plan_step(batch: Batch, block_size: int, rule: SharingRule | None, fold_queries: int = FOLD_QUERIES) -> StepPlan:
    """Cut a batch into items of work. Requests with equal leading blocks share items if `rule` expects a gain."""
    rows = batch.query_starts[:-1]
    lengths = (batch.query_starts[1:] - rows).astype(np.int64)
    first_positions = batch.positions[rows].astype(np.int64)
    num_chunks = (first_positions + lengths + CHUNK - 1) // CHUNK
    few = lengths <= FEW_QUERIES
    members = few.nonzero()[0]
    joined = None
    if rule is not None and len(members) > 1:
        members, joined = sort_by_blocks(batch, members, block_size, rule)
    slots = lengths * num_chunks * few
    folds = _folds((~few).nonzero()[0], lengths, first_positions, fold_queries)
    shared = _shared(num_chunks[members], joined)
    counts = lengths[members]
    queries = np.zeros(len(members) + 1, np.int64)
    np.cumsum(counts, out=queries[1:])
    of_first = shared[shared[:, 1] == 0]
    group_sizes = of_first[:, 3] - of_first[:, 2]
    most_queries = int((queries[shared[:, 3]] - queries[shared[:, 2]]).max()) if len(shared) else 0
    merges = np.empty((int(queries[-1]), 2), np.int64)
    merges[:, 0] = members.repeat(counts)
    merges[:, 1] = np.arange(len(merges)) - queries[:-1].repeat(counts)
    requests = np.empty((len(rows), 5), np.int64)
    for column, values in enumerate((rows, lengths, first_positions, num_chunks, slots.cumsum() - slots)):
        requests[:, column] = values
    return StepPlan(
        tables=np.ascontiguousarray(batch.block_tables, np.int32),
        block_size=block_size,
        num_tokens=batch.num_tokens,
        requests=requests,
        items=np.concatenate((folds, shared)) if len(folds) else shared,
        num_folds=len(folds),
        fold_queries=fold_queries,
        members=members,
        merges=merges,
        num_slots=int(slots.sum()),
        most_queries=most_queries,
        num_chunks=int(num_chunks[members].sum()),
        groups=tuple(group_sizes[group_sizes > 1].tolist()),
        seen_to=None if batch.seen_to is None else batch.seen_to.astype(np.int64),
    )


def _folds(rows: Int64Array, lengths: Int64Array, first_positions: Int64Array, max_queries: int) -> Int64Array:
    """Items of requests with many queries. The longest contexts come first, so that threads end together."""
    items = [
        (FOLD, row, start, min(max_queries, int(lengths[row]) - start))
        for row in rows.tolist()
        for start in range(0, int(lengths[row]), max_queries)
    ]
    items.sort(key=lambda item: -(int(first_positions[item[1]]) + item[2]))
    return np.array(items, np.int64).reshape(-1, 4)


def _shared(num_chunks: Int64Array, joined: Int64Array | None) -> Int64Array:
    """The SHARED items, chunk by chunk; `joined`: the number of chunks that each member shares with the next member."""
    chunks = np.arange(num_chunks.max(initial=0))[:, None]
    present = chunks < num_chunks
    begins = present
    if joined is not None:
        begins = present.copy()
        begins[:, 1:] &= chunks >= joined
        present[:, :-1] &= chunks >= joined  # `present` now says where items end
    chunk, first = begins.nonzero()
    items = np.empty((len(chunk), 4), np.int64)
    items[:, 0], items[:, 1], items[:, 2] = SHARED, chunk, first
    items[:, 3] = (first if joined is None else present.nonzero()[1]) + 1
    return items


def sort_by_blocks(
    batch: Batch, members: Int64Array, block_size: int, rule: SharingRule
) -> tuple[Int64Array, Int64Array | None]:
    """Sort members by their block tables, and count the whole chunks that each member shares with the next member.

    If sharing is not worth the search, the counts are None, and the members keep their order.
    """
    chunk_blocks = -(-CHUNK // block_size)
    whole = (batch.positions[batch.query_starts[1:] - 1][members].astype(np.int64) + 1) // CHUNK
    long = whole.nonzero()[0]
    if len(long) < 2:
        return members, None
    ends = batch.block_tables[members[long], chunk_blocks - 1]
    in_order = np.sort(ends)
    if (in_order[1:] != in_order[:-1]).all():
        return members, None
    _, first_of_group = np.unique(ends, return_index=True)
    most_saved = int(whole[long].sum() - whole[long[first_of_group]].sum())
    tables = batch.block_tables[members]
    if not rule.pays(most_saved, tables.size):
        return members, None
    rows = tables.astype(">i4")
    order = np.array(sorted(range(len(members)), key=lambda row: rows[row].tobytes()), np.int64)
    tables, whole = tables[order], whole[order]
    differs = tables[1:] != tables[:-1]
    equal_blocks = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    joined = np.minimum(equal_blocks * block_size // CHUNK, np.minimum(whole[1:], whole[:-1]))
    return members[order], joined


@dataclass(slots=True)
class SharingReport:
    """Counts of what two-phase attention did."""

    num_steps: int = 0
    """The number of steps that had requests with few queries."""
    num_shared_steps: int = 0
    chunks_read: int = 0
    chunks_seen: int = 0
    saved_us: float = 0.0
    search_us: float = 0.0
    groups: tuple[int, ...] = ()
    """The number of requests in each group, in the step that shared most."""

    def add(self, plan: StepPlan, rule: SharingRule) -> None:
        """Count one step."""
        num_read = int((plan.items[:, 0] == SHARED).sum())
        self.num_steps += plan.num_chunks > 0
        if num_read < plan.num_chunks:
            self.num_shared_steps += 1
            self.chunks_read += num_read
            self.chunks_seen += plan.num_chunks
            self.saved_us += rule.saving_us(plan.num_chunks - num_read)
            self.search_us += rule.search_us(plan.tables.size)
            self.groups = max(self.groups, plan.groups, key=sum)

    def describe(self) -> str:
        """One or two lines for a person."""
        if not self.num_shared_steps:
            return f"two-phase attention: nothing to share in {self.num_steps} steps, or not worth the search"
        ratio = self.chunks_seen / self.chunks_read
        groups = ", ".join(str(size) for size in self.groups)
        return (
            f"two-phase attention: {self.num_shared_steps} of {self.num_steps} steps read shared KV once for groups of "
            f"{groups} requests:\n  {self.chunks_read} chunks of {CHUNK} tokens instead of {self.chunks_seen} "
            f"({ratio:.1f}x less); estimated {self.saved_us / self.num_shared_steps / 1e3:.2f} ms saved per step, "
            f"{self.search_us / self.num_shared_steps / 1e3:.2f} ms to find what is shared"
        )


class Sharing:
    """Plans steps of one kernel. It estimates savings from the KV that the layers of the last step read."""

    def __init__(self, *, enabled: bool) -> None:
        """If not `enabled`, every request reads its own KV."""
        self._enabled = enabled
        self._report = SharingReport()
        self._token_bytes, self._bytes_this_step = 0, 0

    def plan(self, batch: Batch, block_size: int, fold_queries: int = FOLD_QUERIES) -> StepPlan:
        """Plan a step."""
        rule = self._rule()
        step = plan_step(batch, block_size, rule if self._enabled else None, fold_queries)
        self._report.add(step, rule)
        return step

    def plan_singles(self, batch: Batch, block_size: int) -> StepPlan | None:
        """Plan a step of single tokens; None if each token reads only its own request's KV."""
        if self._enabled and batch.num_tokens > 1:
            _, joined = sort_by_blocks(batch, np.arange(batch.num_tokens), block_size, self._rule())
            if joined is not None:
                return self.plan(batch, block_size)
        self._report.num_steps += 1
        return None

    def _rule(self) -> SharingRule:
        """The rule for the last step's KV. The first call in a step restarts the count; more calls change nothing."""
        self._token_bytes = self._bytes_this_step or self._token_bytes
        self._bytes_this_step = 0
        return SharingRule(self._token_bytes)

    def note_layer(self, token_bytes: int) -> None:
        """Record that a layer of this step reads `token_bytes` bytes of KV per token."""
        self._bytes_this_step += token_bytes

    def explain(self) -> str:
        """Describe, in a text for people, what requests shared since the kernel was made."""
        return self._report.describe() if self._enabled else "two-phase attention: switched off"

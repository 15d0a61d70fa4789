"""Leading chunks that one thread computes together, instead of one by one in any thread.

A single chunk leaves partial results, which are written to memory and read again for merging. A thread that computes
chunks from the first one on can merge them at once: partial results are merged in that order, so no bit changes. A
limit on their number keeps all threads busy:

    chunk       0   1   2   3   4
    member 0    A   A   A   D          items of step_plan.py: 4 x A, D, E | joined: A (leading, 4 chunks of both), D, E
    member 1    A   A   A   A   E      If all chunks of one request are joined, it becomes a fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.batch import Int64Array
from foreword.kernels.step_plan import FOLD, LEADING, StepPlan

PACKING_QUERIES = 4
"""Packing a chunk takes as long as multiplying it by this number of queries."""


@dataclass(frozen=True, slots=True)
class JoinedItems:
    """The work of the CPU kernel in a step."""

    items: Int64Array
    """[items, 4]: as `StepPlan.items`, and (LEADING, chunks, first member, last member + 1)."""
    merges: Int64Array
    """[queries, 3]: request, query, number of leading chunks that are merged already, into the first one's place."""


class LeadingChunks:
    """Joins leading chunks, and keeps the last result: most steps are cut like the one before."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] = ()
        self._joined: JoinedItems | None = None

    def join(self, step: StepPlan, num_kv_heads: int, num_threads: int) -> JoinedItems:
        """`join_leading`, whose result nobody may change.

        Items and merges decide it: they have the chunks, the members and the members' queries.
        """
        this = num_kv_heads, num_threads, step.items.tobytes(), step.merges.tobytes()
        if self._joined is None or this != self._last:
            self._joined, self._last = join_leading(step, num_kv_heads, num_threads), this
        return self._joined


def join_leading(step: StepPlan, num_kv_heads: int, num_threads: int) -> JoinedItems:
    """Join leading chunks of a step, where that leaves no thread without work."""
    alone = step.items[step.num_folds :]
    merges = np.zeros((len(step.merges), 3), np.int64)
    merges[:, :2] = step.merges
    if not len(alone):
        return JoinedItems(step.items, merges)
    groups = alone[alone[:, 1] == 0, 2:]
    group = np.searchsorted(groups[:, 0], alone[:, 2], side="right") - 1
    is_of_all = (alone[:, 2:] == groups[group]).all(1)
    length = np.bincount(group[is_of_all], minlength=len(groups))
    length = np.minimum(length, _longest(step, alone, groups, (num_kv_heads, num_threads)))
    single = (groups[:, 1] == groups[:, 0] + 1) & (step.requests[step.members[groups[:, 0]], 3] == 1)
    length[length < 2] = 0
    length[single] = 1  # no other chunk has to be merged
    chosen = length.nonzero()[0]
    if not len(chosen):
        return JoinedItems(step.items, merges)
    (first, end), request = groups[chosen].T, step.members[groups[chosen, 0]]
    joined = np.stack((np.full(len(chosen), LEADING), length[chosen], first, end), 1)
    whole = (end == first + 1) & (length[chosen] == step.requests[request, 3])
    folded = request[whole]
    joined[whole] = np.stack((np.full_like(folded, FOLD), folded, np.zeros_like(folded), step.requests[folded, 1]), 1)
    joined = joined[np.argsort(-length[chosen], kind="stable")]
    left = alone[~is_of_all | (alone[:, 1] >= length[group])]
    merged = np.zeros(len(step.requests), np.int64)
    merged[step.members] = length.repeat(groups[:, 1] - groups[:, 0])
    merges[:, 2] = merged[merges[:, 0]]
    items = np.concatenate((step.items[: step.num_folds], joined, left))
    return JoinedItems(items, merges[~np.isin(merges[:, 0], folded)])


def _longest(step: StepPlan, alone: Int64Array, groups: Int64Array, team: tuple[int, int]) -> Int64Array:
    """The most chunks of each group to join: what one thread computes while the others compute the rest.

    `team`: KV heads, each of which is a unit of work, and threads.
    """
    num_kv_heads, num_threads = team
    queries = np.zeros(len(step.members) + 1, np.int64)
    np.cumsum(step.requests[step.members, 1], out=queries[1:])
    costs, chunk_costs = (
        queries[runs[:, 1]] - queries[runs[:, 0]] + PACKING_QUERIES for runs in (alone[:, 2:], groups)
    )
    groups_each = -(-len(groups) * num_kv_heads // num_threads)
    longest: Int64Array = int(costs.sum()) * num_kv_heads // num_threads // groups_each // chunk_costs
    return longest

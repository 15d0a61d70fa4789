"""Sharing: plans a kernel's steps with two-phase attention where it pays, and reports the savings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.batch import Batch
from foreword.kernels.step_plan import (
    CHUNK,
    FOLD_QUERIES,
    SHARED,
    SharingRule,
    StepPlan,
    plan_step,
    sort_by_blocks,
)


@dataclass(slots=True)
class SharingReport:
    """Counts of what two-phase attention did."""

    num_steps: int = 0
    """Steps that had requests with few queries."""
    num_shared_steps: int = 0
    chunks_read: int = 0
    chunks_seen: int = 0
    saved_us: float = 0.0
    search_us: float = 0.0
    groups: tuple[int, ...] = ()
    """The sizes of groups in the step that shared most."""

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
        """Plan a step of single tokens; None if each only reads the chunks of its own KV."""
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
        """Note that a layer of this step reads `token_bytes` of KV per token."""
        self._bytes_this_step += token_bytes

    def explain(self) -> str:
        """A text for people: what requests shared since the kernel was made."""
        return self._report.describe() if self._enabled else "two-phase attention: switched off"

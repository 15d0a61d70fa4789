"""What two-phase attention saved, for a person.

Knows plans; knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreword.model.kernels.step_plan import CHUNK, SHARED, SharingRule, StepPlan


@dataclass(slots=True)
class SharingReport:
    """What two-phase attention did, step by step."""

    num_steps: int = 0
    """With requests of few queries."""
    num_shared_steps: int = 0
    chunks_read: int = 0
    chunks_seen: int = 0
    saved_us: float = 0.0
    search_us: float = 0.0
    groups: tuple[int, ...] = ()
    """Of the step that shared most."""

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

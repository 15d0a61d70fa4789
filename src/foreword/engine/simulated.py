"""SimulatedScheduler: the engine's scheduler, for callers that run no model and skip steps without decisions."""

from __future__ import annotations

from foreword.batch import Entries, Int64Array
from foreword.engine.scheduler import Scheduler


class SimulatedScheduler(Scheduler):
    """A scheduler whose steps take no time but the caller's own."""

    def schedule_entries(self) -> Entries:
        """The shares of the next step; empty if there is nothing to do. Allocates the step's blocks."""
        entries = self._next_entries()
        self.manager.take_copies()  # there is no memory to copy
        return entries

    def num_steady_steps(self) -> int:
        """The number of next steps that only add a token to each request, if none arrives and no token ends one.

        In these steps no request is admitted, and no block is taken or filled.
        """
        running = self._running
        if self.states is not None or len(self._waiting) or len(running) > self.config.max_num_batched_tokens:
            return 0
        progress = running.progress.take(running.order)
        if not len(progress) or (progress["is_new"] | (progress["num_tokens"] - progress["num_computed"] != 1)).any():
            return 0
        most = int((running.facts["max_length"][running.order] - progress["num_tokens"]).min()) - 1
        return most and min(most, self.manager.num_quiet_tokens(running.order))

    def num_computed_tokens(self) -> Int64Array:
        """Computed tokens of each running request, in service order."""
        counts: Int64Array = self._running.progress["num_computed"][self._running.order]
        return counts

    def skip(self, num_steps: int) -> None:
        """Do the work of `num_steps` of the `num_steady_steps`, with token 0 as each sample."""
        rows, progress = self._running.order, self._running.progress
        self.manager.allocate_running_slots(rows, self.num_computed_tokens() + num_steps)
        progress["num_tokens"][rows] += num_steps
        progress["num_computed"][rows] += num_steps
        progress["last_token"][rows] = 0
        for request in self._running:
            request.sequence.extend([0] * num_steps)

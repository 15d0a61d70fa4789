"""The shares of a step that recurrent layers compute: one request each, between two saved states."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from foreword.batch import Batch
from foreword.cache import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class StateRun:
    """One request's share of a step in one recurrent group."""

    first_row: int
    """The request's first row in the flattened batch."""
    start: int
    end: int
    """The step computes positions `start` to `end` (exclusive)."""
    read_block: int | None
    """The block with the state after `start` tokens; None at the beginning."""
    write_block: int
    """The block for the state after `end` tokens."""
    prompt_end: int
    """Positions from this on hold generated tokens."""

    def cells(self, grid: int) -> list[tuple[int, int]]:
        """Cut the run into spans of positions: a prompt at multiples of the grid, an answer after every token.

        Grid 4, a prompt of 6 tokens:    |0123|45|6|7|8|
        """
        last = min(self.end, self.prompt_end)
        cuts = [self.start, *range((self.start // grid + 1) * grid, last, grid)]
        cuts += [*range(max(self.start + 1, last), self.end), self.end]
        return list(itertools.pairwise(cuts))


def plan_state_runs(batch: Batch, group_id: int, block_size: int) -> list[StateRun]:
    """Find the blocks of states that each request reads and writes; `MambaManager` sets the rules of the table."""
    runs = []
    tables = batch.group_tables[group_id]
    for row, (first, last) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        start = int(batch.positions[first])
        end = start + int(last - first)
        prompt_end = end if batch.prompt_ends is None else int(batch.prompt_ends[row])
        write = int(tables[row, (end - 1) // block_size])
        read = None
        if start:
            entry = int(tables[row, (start - 1) // block_size])
            read = write if entry == NULL_BLOCK else entry
        runs.append(StateRun(int(first), start, end, read, write, prompt_end))
    return runs

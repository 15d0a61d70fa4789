"""Links: which tokens of a prompt are copied from other sequences, and the rotary position of each token.

    source, computed alone         s0 s1 s2 s3 s4 s5 s6 s7 s8      blocks of 4: s8 is in no whole block
                                         |  |  |  |  |  |
    prompt         p0 p1 p2 | c0 c1      s2 s3 s4 s5 s6 s7 | s8 q0 q1
    index          0  1  2    3  4       5  6  7  8  9  10   11 12 13
                                         run [5, 11)

The index of a token decides which tokens it attends to, and which slot it has. Its position decides how its key is
rotated. The keys of a run are rotated from their positions in the source to their positions in the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LinkedRun:
    """Tokens `begin` to `end` (exclusive) of a prompt, whose KV is copied from a source."""

    begin: int
    end: int
    source: IntArray
    """All tokens of the source: a sequence that is computed alone, at positions from 0."""
    first: int
    """The index of the run's first token in the source."""

    def __post_init__(self) -> None:
        assert 0 <= self.begin < self.end
        assert 0 <= self.first <= self.source_end <= len(self.source)

    @property
    def source_end(self) -> int:
        """The index after the run's last token in the source."""
        return self.first + self.end - self.begin

    def num_in_whole_blocks(self, block_size: int) -> int:
        """Count the source's tokens from the run's first token to the end of the source's last whole block.

        0 or less: no token of the run is in a whole block.
        """
        return len(self.source) // block_size * block_size - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """The runs of one prompt, ascending and without overlaps, and the rotary position of each prompt token. The last
    token is in no run, because its logits are needed.
    """

    method: str
    """The name of the method that chose the runs, for reports only."""
    runs: tuple[LinkedRun, ...]
    positions: IntArray
    """[prompt tokens], ascending."""
    spans: tuple[tuple[int, int], ...] = ()
    """Begin and end of each part of the prompt that could be linked, whether its tokens are in runs or not."""
    has_gaps: bool = field(init=False)
    """Whether positions differ from indices."""

    def __post_init__(self) -> None:
        ends = [0, *itertools.chain.from_iterable((run.begin, run.end) for run in self.runs)]
        assert all(before <= after for before, after in itertools.pairwise(ends)), "runs overlap"
        assert ends[-1] < len(self.positions), "the last token must be computed"
        object.__setattr__(self, "has_gaps", int(self.positions[-1]) != len(self.positions) - 1)

    def in_whole_blocks(self, block_size: int) -> Links:
        """Return the part of these links that lies in whole blocks of the sources, because only whole blocks stay
        cached.
        """
        runs = []
        for run in self.runs:
            num_tokens = run.num_in_whole_blocks(block_size)
            if num_tokens > 0:
                runs.append(replace(run, end=min(run.end, run.begin + num_tokens)))
        return replace(self, runs=tuple(runs))

    def linked_from_in(self, block_size: int) -> int | None:
        """Return `in_whole_blocks(block_size).linked_from`, but fast with thousands of runs."""
        return next((run.begin for run in self.runs if run.num_in_whole_blocks(block_size) > 0), None)

    @property
    def sources(self) -> list[IntArray]:
        """The sources of the runs, each array once, because many runs may share a source."""
        return list({id(run.source): run.source for run in self.runs}.values())

    def without(self, chosen: BoolArray) -> Links:
        """Return these links without the chosen tokens; a run is split around its chosen tokens. `chosen`: a mask,
        [tokens].
        """
        runs = []
        for run in self.runs:
            edges = np.flatnonzero(np.diff(np.concatenate(([True], chosen[run.begin : run.end], [True])))) + run.begin
            for begin, end in edges.reshape(-1, 2).tolist():
                runs.append(replace(run, begin=begin, end=end, first=run.first + begin - run.begin))
        return replace(self, runs=tuple(runs))

    @property
    def linked_from(self) -> int | None:
        """The index of the first linked token; None if all tokens are computed."""
        return self.runs[0].begin if self.runs else None

    @property
    def num_linked_tokens(self) -> int:
        return sum(run.end - run.begin for run in self.runs)

    def num_recomputed(self, start: int) -> int:
        """Count the tokens from `start` on that could be linked but are computed."""
        return sum(max(0, end - max(begin, start)) for begin, end in self.spans) - self.num_linked_tokens

    def shift(self, run: LinkedRun) -> int:
        """Return the number of positions by which a run's keys are rotated."""
        return int(self.positions[run.begin]) - run.first

    def jumps(self) -> list[int]:
        """Return the indices of computed tokens whose position does not follow the previous token's position."""
        starts = self._jumps_to(None)
        begins, ends = (np.array([getattr(run, name) for run in self.runs], np.int64) for name in ("begin", "end"))
        after = np.searchsorted(begins, starts, side="right")  # the number of runs that begin before or at the index
        reached = np.concatenate((np.zeros(1, np.int64), ends))[after]
        indices: list[int] = starts[starts >= reached].tolist()
        return indices

    def jumps_before_links(self, block_size: int) -> tuple[tuple[int, int], ...]:
        """Return index and position of each jump before the first link: a token whose position is not the next after
        the previous token's. From the first jump on, KV differs from the plain prompt's.
        """
        starts = self._jumps_to(self.linked_from_in(block_size))
        return tuple(zip(starts.tolist(), self.positions[starts].tolist(), strict=True))

    def _jumps_to(self, end: int | None) -> Int64Array:
        """Return the indices before `end` whose position does not follow the previous index's position."""
        return np.flatnonzero(np.diff(self.positions[:end], prepend=-1) != 1)

    def pending_from(self, start: int) -> list[int]:
        """Return the indices, in `runs`, of the runs that reach beyond the first `start` tokens."""
        return [number for number, run in enumerate(self.runs) if run.end > start]

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between `start` and `end` that are computed, ascending and not empty."""
        for run in self.runs:
            if run.begin >= end:
                break
            if run.begin > start:
                yield start, run.begin
            start = max(start, run.end)
        if start < end:
            yield start, end

    def end_after(self, start: int, end: int, budget: int) -> int:
        """Return the index after the first `budget` computed tokens from `start` on, but at most the index after the
        last computed token before `end`.

        Returns `start` if the budget is 0.
        """
        reached = start
        for first, last in self.ranges(start, end):
            if budget <= 0:
                break
            reached = min(last, first + budget)
            budget -= reached - first
        return reached

    def num_computed(self, start: int, end: int) -> int:
        return sum(last - first for first, last in self.ranges(start, end))

    def positions_of(self, start: int, end: int) -> IntArray:
        """Return the positions of tokens `start` to `end` (exclusive). Generated tokens have the positions after that
        of the prompt's last token.
        """
        of_prompt = self.positions[start:end]
        if len(of_prompt) == end - start:
            return of_prompt
        offset = int(self.positions[-1]) - len(self.positions) + 1
        of_answer = np.arange(max(start, len(self.positions)), end, dtype=np.int32) + np.int32(offset)
        return np.concatenate((of_prompt, of_answer))


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How a prompt's tokens were obtained. Cached, linked, recomputed and computed tokens add up to the prompt."""

    method: str
    num_spans: int
    """The number of the prompt's parts that could be linked."""
    linked_tokens: int
    """Tokens whose KV comes from a source. This KV was computed without the prompt's tokens before them."""
    recomputed_tokens: int
    """Tokens whose part could be linked, but whose KV was computed in the prompt, with the tokens before them."""
    computed_tokens: int
    """Other tokens that were computed."""
    cached_tokens: int
    """Leading tokens that were found in the prefix cache. They are exact, and only they count as hits."""
    copied_tokens: int
    """The linked tokens that had to be copied. The other linked tokens were cached: a prompt with the same runs left
    their blocks."""
    has_gaps: bool = False
    """Whether tokens have other positions than in the plain prompt. A schema may require such positions."""

    @property
    def exact(self) -> bool:
        """Whether the answer has the same bits as without links."""
        return self.linked_tokens == 0 and not self.has_gaps

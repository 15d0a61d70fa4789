"""Shares: decides which of its tokens each running request computes in a step.

Linked tokens do not use the budget, and a share ends with a computed token. With recurrent layers, a share ends only
where a state can be saved. A share never ends inside a picture whose tokens attend to each other, and never contains
picture rows that the step does not encode. A step encodes only some pictures, so that other requests do not wait until
all are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from foreword.batch import Int64Array
from foreword.cache import PrefixHit, StateCheckpoints
from foreword.config import SchedulerConfig
from foreword.engine.linking import Linking
from foreword.engine.runner import Encoder
from foreword.engine.running_rows import RunningRows
from foreword.request import Alone, Request, whole_end

Spans = tuple[Int64Array, Int64Array, Int64Array]
"""Rows, and the start and end of the tokens that each row computes."""


class Shares:
    """Divides the budget of a step among running requests, in their order."""

    def __init__(
        self,
        running: RunningRows,
        config: SchedulerConfig,
        states: StateCheckpoints | None,
        linking: Linking,
        encoding: EncoderBudget,
        wanted_by_waiting: Callable[[int], int],
    ) -> None:
        """`wanted_by_waiting(n)`: tokens, at most n, that waiting requests need for the rest of their prompts."""
        self._running, self._config, self._states, self._linking = running, config, states, linking
        self.encoding = encoding
        self._wanted_by_waiting = wanted_by_waiting

    def of_running(self, budget: int) -> Spans:
        """The spans that running requests compute in the next step, provided that all of them get blocks."""
        rows = self._running.order
        starts = self._running.progress["num_computed"][rows]
        demand = self._running.progress["num_tokens"][rows] - starts
        if self._states is not None or self._linking.holds:
            ends = self._one_by_one(rows, starts, budget, budget)
        elif self._shows_pictures(rows, starts):
            ends = self._one_by_one(rows, starts, budget, self._most_each(demand, budget))
        else:
            np.minimum(demand, self._config.long_prefill_token_threshold or self._most_each(demand, budget), out=demand)
            remaining = budget + demand - demand.cumsum()  # the budget that is left for each row
            ends = starts + np.minimum(demand, np.maximum(remaining, 0))
        computing = ends > starts
        return (rows, starts, ends) if computing.all() else (rows[computing], starts[computing], ends[computing])

    def _shows_pictures(self, rows: Int64Array, starts: Int64Array) -> bool:
        facts = self._running.facts[rows]
        return bool((facts["has_pictures"] & (starts < facts["num_prompt_tokens"])).any())

    @property
    def leaves_room(self) -> bool:
        """Whether a prompt that one step cannot finish leaves a part of the step to other requests.

        It leaves no part if an option limits each prompt's share of a step. With recurrent layers it leaves none
        either, because the share of such a prompt ends only where states can be saved.
        """
        return self._states is None and self._config.long_prefill_token_threshold is None

    def _most_each(self, demand: Int64Array, budget: int) -> int:
        """The most tokens of one running request. A prompt that does not fit leaves up to half of the step to others.

        The others are the other running requests, and those waiting requests that can compute the whole rest of their
        prompts in this step.
        """
        longest, total = int(demand.max(initial=0)), int(demand.sum())
        if total <= budget:
            return budget
        others, half = total - longest, budget // 2
        return budget - min(half, others + self._wanted_by_waiting(half - others))

    def _one_by_one(self, rows: Int64Array, starts: Int64Array, budget: int, cap: int) -> Int64Array:
        """The end of each row's span, if spans cannot end everywhere; at most `budget` tokens in all.

        A row gets at most `cap` tokens, or more if its span cannot end earlier.
        """
        ends = starts.copy()
        lengths = self._running.progress["num_tokens"][rows].tolist()
        for at, row in enumerate(rows.tolist()):
            if not budget:
                break
            request, start = self._running[row], int(starts[at])
            end = self.end(request, start, budget, lengths[at], cap)
            if end > start:
                request.num_scheduled_tokens = end
                self.encoding.book(request, start, end)
                ends[at] = end
                budget -= num_computed(request, start, end)
        return ends

    def end(self, request: Request, start: int, budget: int, length: int | None = None, cap: int | None = None) -> int:
        """The end of a request's span in this step; `start` if it should wait.

        `length`: the number of the request's tokens; None: all known tokens. `cap`: the most tokens of its span, so
        that other requests get some; None: `budget`.
        """
        budget_of_one = min(budget, self._config.long_prefill_token_threshold or cap or budget)
        length = len(request) if length is None else length
        if request.links is not None:
            return request.links.end_after(start, length, budget_of_one)
        end = min(length, start + budget_of_one)
        if self._states is None:
            end = whole_end(request.pictures, start, end, start + budget)
            return self.encoding.cut(request, start, end)
        return self._states.cut(start, end, request.num_prompt_tokens, budget, request.state_positions)


def num_computed(request: Request, start: int, end: int) -> int:
    """The number of a request's tokens between `start` and `end` that are computed, not linked."""
    return end - start if request.links is None else request.links.num_computed(start, end)


_Piece = tuple[str | Alone | None, str, int]
"""The salt, the picture's digest, and the first row of the piece."""


class EncoderBudget:
    """Ends spans before rows of pictures that a step has no time to encode.

    A step encodes pieces, which are whole pictures or tiles. It encodes at most `max_rows` rows in all, but always at
    least one piece, if any is needed.
    """

    def __init__(self, encoder: Encoder | None, max_rows: int) -> None:
        """`encoder`: None if the model takes no pictures."""
        self._encoder, self._max_rows = encoder, max_rows
        self._remaining = max_rows
        self._planned: set[_Piece] = set()
        """The pieces that this step encodes."""

    def begin_step(self) -> None:
        self._remaining = self._max_rows
        self._planned.clear()

    def cut(self, request: Request, start: int, end: int) -> int:
        """Where a span from `start` ends: before the first row that this step cannot encode, or else at `end`.

        Books nothing, because the request may not start after all.
        """
        planned, remaining = set(self._planned), self._remaining
        for key, num_rows, place in self._pieces(request, start, end):
            if key not in planned:
                if planned and num_rows > remaining:
                    self._remaining = 0  # no later request passes this one with a smaller picture
                    return place
                planned.add(key)
                remaining -= num_rows
        return end

    def book(self, request: Request, start: int, end: int) -> None:
        """Record that this step computes a span, and so encodes the picture rows that the span still needs."""
        for key, num_rows, _ in self._pieces(request, start, end):
            if key not in self._planned:
                self._planned.add(key)
                self._remaining -= num_rows

    def _pieces(self, request: Request, start: int, end: int) -> Iterator[tuple[_Piece, int, int]]:
        """Yield the pieces of pictures that tokens `start` to `end` (exclusive) need: the piece's name, its number of
        rows, and the first token that needs it.
        """
        if self._encoder is None or start >= request.num_prompt_tokens:
            return
        salt = request.rows_salt
        for placed in request.pictures:
            first, last = np.searchsorted(placed.places, (start, end)).tolist()
            for piece in self._encoder.missing(placed.picture, range(first, last), salt) if first < last else ():
                name = salt, placed.picture.digest, piece.start
                yield name, len(piece), int(placed.places[max(first, piece.start)])

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether this step cannot encode the row after a waiting request's hit."""
        return self.cut(request, hit.num_tokens, hit.num_tokens + 1) == hit.num_tokens

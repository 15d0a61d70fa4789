"""The running requests as rows of arrays, so that a step reads all of them with single numpy operations.

While a request runs, it keeps the row that the cache manager gave it:

    order         2    0    5           rows in service order
    row           0    1    2   ...  5
    num_tokens    40   -    17       9  known tokens, and one that a step in flight will sample
    num_computed  39   -    12       8
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from foreword.batch import PROGRESS, BoolArray, Entries, Int64Array
from foreword.cache import TokenSequence
from foreword.request import FACTS, NO_ROW, FactRows, Request, named_record


class RunningRows:
    """Requests in service order, their parameters and their progress.

    `progress` and `facts` are arrays of records by row. They are replaced when rows are added: do not keep them.
    """

    def __init__(self) -> None:
        self.order: Int64Array = np.empty(0, np.int64)
        """Rows in service order."""
        self.progress: npt.NDArray[np.void] = np.zeros(16, PROGRESS)
        self.facts: FactRows = np.zeros(16, FACTS)
        self._requests: npt.NDArray[np.object_] = np.empty(16, object)
        self._sequences: npt.NDArray[np.object_] = np.empty(16, object)
        self._stop_ids: frozenset[int] = frozenset()
        """A quick first test: a token that is not among these is a stop token of no request. These are the stop tokens
        of all requests that were added since the rows were last empty."""
        self._num_stays = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests[self.order].tolist())

    def __getitem__(self, row: int) -> Request:
        request: Request = self._requests[row]
        return request

    def num_computed_of(self, request: Request) -> int:
        return int(self.progress["num_computed"][request.row])

    def add(self, row: int, request: Request, num_computed: int, num_shared: int) -> None:
        """Run a request in a free row."""
        while row >= len(self.progress):
            self.progress = np.concatenate((self.progress, np.zeros_like(self.progress)))
            self.facts = np.concatenate((self.facts, np.zeros_like(self.facts)))
            self._requests = np.concatenate((self._requests, np.empty_like(self._requests)))
            self._sequences = np.concatenate((self._sequences, np.empty_like(self._sequences)))
        at = len(self)
        if at and self.last().running_key > request.running_key:  # it was preempted, or has priority
            at = bisect.bisect(self.order, request.running_key, key=lambda row: self[row].running_key)
        self.order = np.concatenate((self.order[:at], np.array([row], np.int64), self.order[at:]))
        self._num_stays += 1
        self.progress[row] = named_record(
            PROGRESS,
            stay=self._num_stays,
            num_tokens=len(request),
            num_computed=num_computed,
            num_shared=num_shared,
            last_token=int(request.sequence.token_ids[-1]),
            source=-1,
            is_new=True,
        )
        self.facts[row] = request.facts
        request.row = row
        self._requests[row] = request
        self._sequences[row] = request.sequence
        self._stop_ids = request.stop_token_ids | (self._stop_ids if len(self) > 1 else frozenset())

    def remove(self, request: Request) -> None:
        row, request.row = request.row, NO_ROW
        self.order = self.order[self.order != row]
        self.progress["stay"][row] = 0
        self._requests[row] = self._sequences[row] = None

    def clear(self) -> None:
        """Remove all requests. Earlier `Entries` stay valid: `still_run` is False for each of their requests."""
        for request in self:
            request.row = NO_ROW
        self.order = np.empty(0, np.int64)
        self.progress["stay"] = 0
        self._requests.fill(None)
        self._sequences.fill(None)

    def last(self) -> Request:
        return self[int(self.order[-1])]

    # ------------------------------------------------------------------- steps

    def entries(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> Entries:
        """The entries of a step that computes tokens `starts` to `ends` (exclusive) of the requests in these rows."""
        requests: list[Request] = self._requests.take(rows).tolist()
        return Entries(requests, rows, starts, ends, self.progress.take(rows), self.facts.take(rows))

    def still_run(self, entries: Entries) -> BoolArray:
        """Which requests have not left since these entries were made, [entries]."""
        same: BoolArray = self.progress["stay"][entries.rows] == entries.progress["stay"]
        return same

    def expect(self, entries: Entries) -> None:
        """Count a planned step as computed, and expect one more token for each request that samples in the step.

        A request that the expected token brings to its full length expects none, and has nothing more to compute.
        """
        progress, numbers = self.progress, self.still_run(entries).nonzero()[0]
        progress["num_computed"][entries.rows[numbers]] = entries.ends[numbers]
        goes_on = entries.samples & (entries.ends + 1 < entries.facts["max_length"])
        numbers = numbers[goes_on[numbers]]
        rows = entries.rows[numbers]
        progress["num_tokens"][rows] += 1
        progress["source"][rows] = numbers
        progress["last_token"][rows] = 0

    def stop_expecting(self, entries: Entries) -> None:
        """Undo `expect`."""
        progress, alive = self.progress, self.still_run(entries)
        rows = entries.rows[alive]
        progress["num_computed"][rows] = entries.progress["num_computed"][alive]
        progress["num_tokens"][rows] -= progress["source"][rows] >= 0
        progress["source"][rows] = -1

    def record(self, rows: Int64Array, lengths: Int64Array, token_ids: Int64Array) -> BoolArray:
        """Append a token to the request in each of these rows, now `lengths` long; returns which tokens end it."""
        progress = self.progress
        progress["num_tokens"][rows] = lengths
        progress["last_token"][rows] = token_ids
        progress["source"][rows] = -1
        progress["is_new"][rows] = False
        listed = token_ids.tolist()
        TokenSequence.append_each(self._sequences.take(rows).tolist(), listed)
        stops, stop_ids = np.zeros(len(listed), np.bool_), self._stop_ids.intersection(listed)
        if stop_ids:
            for at in [at for at, token_id in enumerate(listed) if token_id in stop_ids]:
                stops[at] = listed[at] in self[int(rows[at])].stop_token_ids
        return stops

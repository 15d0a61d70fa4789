"""The running requests as rows of arrays: what every step asks of all of them is one operation of numpy.

Knows requests and how far they are; knows nothing of budgets, blocks or steps' contents. A request keeps its row while
it runs, which is the one that the cache manager gave it:

    order         2    0    5           rows in service order
    row           0    1    2   ...  5
    num_tokens    40   -    17       9  known, and expected: sampled by a step that is being computed
    num_computed  39   -    12       8
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from foreword.batch import PROGRESS, BoolArray, Entries, Int64Array
from foreword.engine.queue import SortKey
from foreword.request import FACTS, FactRows, Request


class RunningRows:
    """Requests in the order in which they are served, what they asked for, and how far they are.

    `progress` and `facts` are arrays of records by row. They are replaced when rows are added: do not keep them.
    """

    def __init__(self) -> None:
        self.order: Int64Array = np.empty(0, np.int64)
        """Rows in service order."""
        self.progress: npt.NDArray[np.void] = np.zeros(16, PROGRESS)
        self.facts: FactRows = np.zeros(16, FACTS)
        self._requests: npt.NDArray[np.object_] = np.empty(16, object)
        self._append: npt.NDArray[np.object_] = np.empty(16, object)
        """`TokenSequence.append` of each request."""
        self._stop_ids: npt.NDArray[np.object_] = np.empty(16, object)
        self._keys: list[SortKey] = []
        self._num_stays = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests[self.order].tolist())

    def __getitem__(self, row: int) -> Request:
        request: Request = self._requests[row]
        return request

    def add(self, key: SortKey, row: int, request: Request, num_computed: int, num_shared: int) -> None:
        """A request runs from now on in a row that is free."""
        while row >= len(self.progress):
            self.progress = np.concatenate((self.progress, np.zeros_like(self.progress)))
            self.facts = np.concatenate((self.facts, np.zeros_like(self.facts)))
            self._requests = np.concatenate((self._requests, np.empty_like(self._requests)))
            self._append = np.concatenate((self._append, np.empty_like(self._append)))
            self._stop_ids = np.concatenate((self._stop_ids, np.empty_like(self._stop_ids)))
        at = bisect.bisect(self._keys, key)
        self._keys.insert(at, key)
        self.order = np.insert(self.order, at, row)
        self._num_stays += 1
        num_tokens, last_token = len(request), int(request.sequence.token_ids[-1])
        self.progress[row] = (self._num_stays, num_tokens, num_computed, num_shared, last_token, -1, True)
        self.facts[row] = request.facts
        self._requests[row] = request
        self._append[row] = request.sequence.append
        self._stop_ids[row] = request.stop_token_ids

    def remove(self, key: SortKey) -> None:
        """A request runs no longer."""
        at = bisect.bisect_left(self._keys, key)
        row = self.order[at]
        del self._keys[at]
        self.order = np.delete(self.order, at)
        self.progress["stay"][row] = 0
        self._requests[row] = self._append[row] = self._stop_ids[row] = None

    def clear(self) -> None:
        """Remove all requests. Entries made before stay valid: `still_run` is False for each of their requests."""
        self._keys.clear()
        self.order = np.empty(0, np.int64)
        self.progress["stay"] = 0
        for column in (self._requests, self._append, self._stop_ids):
            column.fill(None)

    def last(self) -> Request:
        return self[int(self.order[-1])]

    # ------------------------------------------------------------------- steps

    def entries(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> Entries:
        """Shares of a step for requests in these rows, as they stand now."""
        requests: list[Request] = self._requests.take(rows).tolist()
        return Entries(requests, rows, starts, ends, self.progress.take(rows), self.facts.take(rows))

    def still_run(self, entries: Entries) -> BoolArray:
        """Which requests have not left since these entries were made, [entries]."""
        same: BoolArray = self.progress["stay"][entries.rows] == entries.progress["stay"]
        return same

    def expect(self, entries: Entries) -> None:
        """Count a step as computed, and a token for each request that samples in it.

        A request that ends with its token for its length expects none, and so has nothing more to compute.
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
        progress["num_computed"][rows] = entries.starts[alive]
        progress["num_tokens"][rows] -= progress["source"][rows] >= 0
        progress["source"][rows] = -1

    def record(self, rows: Int64Array, lengths: Int64Array, token_ids: Int64Array) -> BoolArray:
        """Append a token in each of these rows, which makes them so long; which of them are tokens to stop at."""
        progress = self.progress
        progress["num_tokens"][rows] = lengths
        progress["last_token"][rows] = token_ids
        progress["source"][rows] = -1
        progress["is_new"][rows] = False
        listed = token_ids.tolist()
        for append, token_id in zip(self._append[rows].tolist(), listed, strict=True):
            append(token_id)
        stops = map(operator.contains, self._stop_ids[rows].tolist(), listed)
        return np.fromiter(stops, np.bool_, len(listed))

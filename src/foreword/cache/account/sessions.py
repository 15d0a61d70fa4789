"""Records which blocks only one session has used, so that closing the session gives up no block that others share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds

Int32Array = npt.NDArray[np.int32]

NOTHING, NOBODY, SEVERAL = 0, -1, -2
"""Values in place of a session's number. NOTHING: the block is not cached. NOBODY: no request has released the block
since it was cached or given up. SEVERAL: more than one session, or a request without a session, used the block."""
MAX_OPEN_SESSIONS = 65_536
"""The most sessions that are remembered while they have no request; the least recently used one is forgotten first."""


class SessionBlocks:
    """Stores for each block the session that used it and the block's number in its prompt: 8 bytes a block.

    A block belongs to a session if only rows of this session have held its content and released it. The blocks of a
    forgotten session are evicted like other blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._user: Int32Array = np.full(num_blocks, SEVERAL, np.int32)  # used before the count began
        self._depth: Int32Array = np.zeros(num_blocks, np.int32)
        """The number of the block in its prompt."""
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        """Open session -> its number; the session that was used last is at the end."""
        self._last = 0
        self._of_request: dict[str, int] = {}
        """Request id -> its session's number, for requests that have begun and not ended, even if preempted."""
        self._num_requests: Counter[int] = Counter()
        """Session's number -> the number of its requests that have begun and not ended."""
        self._closed: set[int] = set()
        """Numbers of sessions that were closed while they had requests."""
        self._of_row: dict[int, tuple[int, int]] = {}
        """Row -> the number of the row's session, and the number of the row's leading blocks that everybody may use."""

    def begin(self, session: Hashable, request_id: str, row: int, num_public_blocks: int = 0) -> None:
        """Record that a session uses a row's blocks. A preempted request keeps its session's number."""
        number = self._of_request.get(request_id)
        if number is None:
            number = self._of_request[request_id] = self._number_of(session)
            self._num_requests[number] += 1
        self._of_row[row] = number, num_public_blocks

    def _number_of(self, session: Hashable) -> int:
        """Return the number that a session has until it is closed; give a new session a number."""
        number = self._numbers.pop(session, None)
        if number is None:
            self._last = number = self._last % (2**31 - 1) + 1
            while len(self._numbers) >= MAX_OPEN_SESSIONS + len(self._num_requests):
                oldest, its_number = self._numbers.popitem(last=False)
                if its_number in self._num_requests:  # it is in use
                    self._numbers[oldest] = its_number
        self._numbers[session] = number
        return number

    def close_row(self, row: int) -> None:
        self._of_row.pop(row, None)

    def end(self, request_id: str) -> int | None:
        """Record the end of a request. If it was the last request of a closed session, return the session's number."""
        number = self._of_request.pop(request_id, None)
        if number is None:
            return None
        self._num_requests[number] -= 1
        if self._num_requests[number]:
            return None
        del self._num_requests[number]
        if number not in self._closed:
            return None
        self._closed.remove(number)
        return number

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Record that lookups find these blocks from now on; block i is number `depths[i]` of its prefix."""
        self._user[block_ids] = NOBODY
        self._depth[block_ids] = depths

    def note_forgotten(self, block_ids: BlockIds) -> None:
        self._user[block_ids] = NOTHING

    def note_use(self, row: int, block_ids: BlockIds) -> None:
        """Record that a row releases these blocks."""
        number, num_public = self._of_row.get(row, (0, 0))
        user = self._user[block_ids]
        ours = (number > 0) & ((user == NOBODY) | (user == number)) & (self._depth[block_ids] >= num_public)
        self._user[block_ids] = np.where(user == NOTHING, NOTHING, np.where(ours, number, SEVERAL))

    def close(self, session: Hashable) -> int | None:
        """Forget a session. Returns the session's number; None if the session is unknown."""
        number = self._numbers.pop(session, None)
        if number is not None and number in self._num_requests:
            self._closed.add(number)
        return number

    def take(self, number: int) -> BlockIds:
        """Return the cached blocks that only this session used, tails before heads, and set their user to NOBODY."""
        block_ids = np.flatnonzero(self._user == number).astype(np.int32)
        self._user[block_ids] = NOBODY
        return block_ids[np.argsort(-self._depth[block_ids], kind="stable")]

    def check_integrity(self, cached: BlockIds, rows: list[int]) -> None:
        """Raise AssertionError if numbers contradict each other, or if a block that is not cached has a user."""
        assert len(set(self._numbers.values())) == len(self._numbers), "two sessions have one number"
        assert self._num_requests == Counter(self._of_request.values()), "the requests of a number are miscounted"
        assert self._closed <= set(self._num_requests), "a closed number without requests is remembered"
        assert self._closed.isdisjoint(self._numbers.values()), "a closed number is open"
        assert set(self._of_row) <= set(rows), "a row that was closed still has a session"
        owned = np.flatnonzero((self._user > 0) | (self._user == NOBODY))
        assert set(owned.tolist()) <= set(cached.tolist()), "a block that is not cached has a user"

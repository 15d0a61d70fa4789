"""Which blocks only one session has used, so that closing it gives up nothing that others share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NULL_BLOCK, BlockIds

Int32Array = npt.NDArray[np.int32]

NOTHING, NOBODY, SEVERAL = 0, -1, -2
"""In place of a session's number. NOTHING: the block is not cached; NOBODY: no request that used it has ended; SEVERAL:
more than one session, or a request without one, used it."""
MAX_SESSIONS = 65_536
"""Sessions whose blocks are known; of more, the ones that were used last."""


class SessionBlocks:
    """The user of each block, and its place in its prompt. 8 bytes a block, and an entry a session.

    A block belongs to a session if all requests that held its content and have ended were that session's. A session
    that is forgotten leaves its blocks to nobody: they are evicted like others.
    """

    def __init__(self, num_blocks: int) -> None:
        self._user: Int32Array = np.full(num_blocks, SEVERAL, np.int32)  # used before anyone counted
        self._end: Int32Array = np.zeros(num_blocks, np.int32)
        """The number of tokens up to the block's end."""
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._last = 0

    def __contains__(self, session: Hashable) -> bool:
        return session in self._numbers

    def number_of(self, session: Hashable) -> int:
        """The number under which a session's requests count from now on, until it is closed."""
        number = self._numbers.get(session)
        if number is None:
            self._last = number = self._last % (2**31 - 1) + 1
            self._numbers[session] = number
            if len(self._numbers) > MAX_SESSIONS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(session)
        return number

    def is_open(self, session: Hashable, number: int) -> bool:
        """Whether requests that began under this number still belong to the session."""
        return self._numbers.get(session) == number

    def note_cached(self, block_ids: BlockIds) -> None:
        """Note that lookups find these blocks from now on."""
        self._user[block_ids] = NOBODY

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """Note that no lookup finds the content of these blocks any more."""
        self._user[block_ids] = NOTHING

    def note_use(self, table: BlockIds, block_size: int, number: int | None) -> None:
        """Note that a request with this block table ended; `number`: its session's, None if it has none."""
        place = np.flatnonzero(table != NULL_BLOCK)
        block_ids = table[place]
        user = self._user[block_ids]
        ours = (user == NOBODY) | (user == number) if number is not None else np.zeros(len(user), np.bool_)
        self._user[block_ids] = np.where(user == NOTHING, NOTHING, np.where(ours, number or 0, SEVERAL))
        self._end[block_ids] = (place + 1) * block_size

    def close(self, session: Hashable) -> int | None:
        """Forget a session; returns the number that its blocks have, None if nothing is known here."""
        return self._numbers.pop(session, None)

    def of(self, number: int) -> BlockIds:
        """The cached blocks that belong to this number alone, tails before heads."""
        block_ids = np.flatnonzero(self._user == number).astype(np.int32)
        return block_ids[np.argsort(-self._end[block_ids], kind="stable")]

    def check_integrity(self, cached: BlockIds) -> None:
        """Raise AssertionError if numbers contradict each other, or if a block that is not cached belongs to one."""
        assert len(set(self._numbers.values())) == len(self._numbers), "two sessions have one number"
        owned = np.flatnonzero((self._user > 0) | (self._user == NOBODY))
        assert np.isin(owned, cached).all(), "a block that is not cached has a user"

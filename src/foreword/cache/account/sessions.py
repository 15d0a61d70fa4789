"""Which blocks only one session has used, so that closing it gives up nothing that others share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds

NOBODY, SEVERAL = 0, -1
"""In place of a session's number: no request that used the block has ended; more than one session, or a request without
one, used it."""
MAX_SESSIONS = 65_536
"""Sessions whose blocks are known; of more, the ones that were used last."""


class SessionBlocks:
    """The user of each block: a session's number, NOBODY or SEVERAL. 4 bytes a block, and an entry a session.

    A block belongs to a session if all requests that held its content and have ended were that session's. A session
    that is forgotten leaves its blocks to nobody: they are evicted like others.
    """

    def __init__(self, num_blocks: int) -> None:
        self._user: npt.NDArray[np.int32] = np.full(num_blocks, SEVERAL, np.int32)  # used before anyone counted
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

    def forget(self, block_ids: BlockIds) -> None:
        """Note that these blocks get new content."""
        self._user[block_ids] = NOBODY

    def note_use(self, block_ids: BlockIds, number: int | None) -> None:
        """Note that a request that held these blocks ended; `number`: its session's, None if it has none."""
        if number is None:
            self._user[block_ids] = SEVERAL
            return
        user = self._user[block_ids]
        self._user[block_ids] = np.where((user == NOBODY) | (user == number), number, SEVERAL)

    def close(self, session: Hashable) -> int | None:
        """Forget a session; returns the number that its blocks have, None if nothing is known here."""
        return self._numbers.pop(session, None)

    def of(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether each block belongs to this number alone, [num_blocks]."""
        alone: npt.NDArray[np.bool_] = self._user == number
        return alone

    def check_integrity(self) -> None:
        """Raise AssertionError if numbers contradict each other."""
        assert len(set(self._numbers.values())) == len(self._numbers), "two sessions have one number"
        assert self._user.max(initial=SEVERAL) <= self._last, "a block belongs to a number that was never given"

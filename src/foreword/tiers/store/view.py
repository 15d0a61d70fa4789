"""What we know of a shared store's blocks, from memory: present, absent, refused, or unknown.

Others write and the server evicts, so what is known ages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from foreword.tiers.tier import BoolArray

REFUSED = float("-inf")


class StoreView:
    """Answers by name, the oldest of which go when there are too many. Any thread may call any method."""

    def __init__(self, max_blocks: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks = max_blocks
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}
        """Present until that moment; if negative, absent until minus that moment. Oldest answer first."""

    def __len__(self) -> int:
        """The number of blocks that are present."""
        with self._lock:
            return int(np.count_nonzero(np.fromiter(self._until.values(), float) > self._monotonic()))

    def look(self, names: Sequence[bytes]) -> tuple[BoolArray, BoolArray]:
        """Which blocks are present, and of which nothing is known, [blocks] each."""
        until, now = self._moments(names), self._monotonic()
        return until > now, (until <= now) & (until >= -now)

    def is_refused(self, names: Sequence[bytes]) -> BoolArray:
        """Which blocks are not to be found until we store them again, [blocks]."""
        refused: BoolArray = self._moments(names) == REFUSED
        return refused

    def note_stored(self, names: Iterable[bytes], seconds: float) -> None:
        """We have stored these; that is also the end of a refusal."""
        self._note(names, self._monotonic() + seconds, keep_refused=False)

    def note_present(self, names: Iterable[bytes], seconds: float) -> None:
        """The server has these; those that we refuse stay refused."""
        self._note(names, self._monotonic() + seconds, keep_refused=True)

    def note_absent(self, names: Iterable[bytes], seconds: float) -> None:
        """The server does not have these, or could not give them."""
        self._note(names, -self._monotonic() - seconds, keep_refused=True)

    def note_answers(self, names: Sequence[bytes], here: BoolArray, present_s: float, absent_s: float) -> None:
        """The server has said which of these blocks it has. What was learnt while it answered counts more."""
        _, unknown = self.look(names)
        self.note_present([names[at] for at in np.flatnonzero(unknown & here).tolist()], present_s)
        self.note_absent([names[at] for at in np.flatnonzero(unknown & ~here).tolist()], absent_s)

    def refuse(self, names: Iterable[bytes]) -> None:
        """Do not find these until we have stored them again, whatever the server has."""
        self._note(names, REFUSED, keep_refused=True)

    def _moments(self, names: Sequence[bytes]) -> npt.NDArray[np.float64]:
        with self._lock:
            return np.fromiter((self._until.get(name, 0.0) for name in names), float, len(names))

    def _note(self, names: Iterable[bytes], until: float, *, keep_refused: bool) -> None:
        with self._lock:
            for name in names:
                if self._until.pop(name, 0.0) == REFUSED and keep_refused:
                    self._until[name] = REFUSED
                else:
                    self._until[name] = until
            while len(self._until) > self._max_blocks:
                del self._until[next(iter(self._until))]

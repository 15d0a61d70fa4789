"""The distinct tokens of a text that grows: only new tokens are sorted, so a step costs a copy of what is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class DistinctTokens:
    """Reads one text, to which tokens are appended."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._num_read = 0

    def of(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The distinct ones of all tokens, ascending. `token_ids` begin with those of the call before."""
        if len(token_ids) > self._num_read:
            new = np.unique(token_ids[self._num_read :]).astype(np.int64)
            places = self._ids.searchsorted(new)
            is_new = np.append(self._ids, -1)[places] != new  # beyond the end stands no token
            self._ids = np.insert(self._ids, places[is_new], new[is_new])
            self._num_read = len(token_ids)
        return self._ids

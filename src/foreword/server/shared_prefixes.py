"""Public prefixes: beginnings of prompts that all tenants share in the cache.

Knows token ids; knows nothing of files or salts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class SharedPrefixes:
    """How much of a prompt is public: as much as it has in common with any of the prefixes.

    What is public is decided by the prompt's tokens alone, so two prompts that begin alike agree on it as far as
    they are alike.
    """

    def __init__(self, prefixes: Sequence[TokenIds]) -> None:
        self._prefixes = list(prefixes)

    def num_shared(self, prompt: TokenIds) -> int:
        """Leading tokens of `prompt` that are public."""
        return max((_common_length(prefix, prompt) for prefix in self._prefixes), default=0)


def _common_length(ours: TokenIds, theirs: TokenIds) -> int:
    length = min(len(ours), len(theirs))
    equal = ours[:length] == theirs[:length]
    return length if equal.all() else int(equal.argmin())

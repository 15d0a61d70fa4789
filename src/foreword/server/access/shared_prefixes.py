"""Public prefixes: beginnings of prompts that all tenants share in the cache.

Knows token ids; knows nothing of files or salts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class SharedPrefixes:
    """How many leading tokens of a prompt are public: the longest prefix that it begins with, or none.

    Only whole prefixes count. A prompt that leaves one half way is its tenant's own from its first token on.
    """

    def __init__(self, prefixes: Sequence[TokenIds]) -> None:
        self._prefixes = sorted((prefix for prefix in prefixes if len(prefix)), key=len, reverse=True)

    def num_shared(self, prompt: TokenIds) -> int:
        """Leading tokens of `prompt` that are public."""
        return next((len(prefix) for prefix in self._prefixes if np.array_equal(prompt[: len(prefix)], prefix)), 0)


def common_beginning(encodings: Sequence[TokenIds]) -> TokenIds:
    """Tokens with which all these encodings begin.

    The last tokens of a text depend on what follows it; what is common to a text's encodings with different
    continuations does not.
    """
    first = encodings[0]
    for other in encodings[1:]:
        length = min(len(first), len(other))
        equal = first[:length] == other[:length]
        first = first[: length if equal.all() else int(equal.argmin())]
    return first

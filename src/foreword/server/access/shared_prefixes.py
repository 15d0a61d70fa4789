"""Public prefixes: beginnings of prompts that all tenants share in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache import common_length

TokenIds = npt.NDArray[np.int32]


class SharedPrefixes:
    """Finds the public part of a prompt: the longest public prefix that the prompt begins with.

    Only whole prefixes count. A prompt that ends or differs inside a public prefix shares none of its tokens.
    """

    def __init__(self, prefixes: Sequence[TokenIds]) -> None:
        self._prefixes = sorted((prefix for prefix in prefixes if len(prefix)), key=len, reverse=True)

    def num_shared(self, prompt: TokenIds) -> int:
        """Number of leading tokens of `prompt` that are public."""
        return next((len(prefix) for prefix in self._prefixes if np.array_equal(prompt[: len(prefix)], prefix)), 0)


def common_beginning(encodings: Sequence[TokenIds]) -> TokenIds:
    """The tokens that all these encodings begin with.

    The last tokens of a text depend on the text after it; the common tokens of encodings with different continuations
    do not.
    """
    first = encodings[0]
    for other in encodings[1:]:
        first = first[: common_length(first, other)]
    return first

"""The prefixes that requests found cached most often lately: what a replica without a past should have first.

Bounded in prefixes and in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from foreword.cluster.holders import Key
from foreword.engine import Prompt

MAX_PREFIXES = 512
MAX_TOKENS = 2_000_000
HALF_LIFE = 2_000
"""The number of notes after which a use counts half as much as a new one."""


@dataclass(slots=True)
class HotPrefix:
    """A cached prefix that requests used."""

    key: Key
    """Of its last block."""
    keys: list[Key]
    """Of all its blocks."""
    prompt: Prompt
    """Its tokens, without marks."""
    weight: float
    """Uses; late ones count more."""
    last: int
    """The number of the note that used it last."""


class HotPrefixes:
    """Counts uses of prefixes. Belongs to the event loop."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._found: OrderedDict[Key, HotPrefix] = OrderedDict()
        """The least recently used first."""
        self._num_tokens = 0
        self._num_notes = 0

    def note(self, prompt: Prompt, keys: list[Key], num_cached_tokens: int) -> None:
        """A request found this part of its prompt. Prefixes of less than a block are not noted."""
        num_blocks = min(num_cached_tokens // self._block_tokens, len(keys))
        if not num_blocks:
            return
        self._num_notes += 1
        key = keys[num_blocks - 1]
        known = self._found.get(key)
        if known is None:
            length = num_blocks * self._block_tokens
            cut = Prompt(np.array(prompt.token_ids[:length]), None, prompt.extra_keys)
            known = self._found[key] = HotPrefix(key, keys[:num_blocks], cut, 0.0, self._num_notes)
            self._num_tokens += length
        known.weight = known.weight * self._faded(known) + 1.0
        known.last = self._num_notes
        self._found.move_to_end(key)
        while len(self._found) > MAX_PREFIXES or self._num_tokens > MAX_TOKENS:
            _, dropped = self._found.popitem(last=False)
            self._num_tokens -= len(dropped.prompt.token_ids)

    def hottest(self, max_tokens: int, least_uses: float = 1.0) -> list[HotPrefix]:
        """The most used ones that fit into `max_tokens` together, the most used first."""
        ranked = sorted(self._found.values(), key=lambda one: -one.weight * self._faded(one))
        chosen: list[HotPrefix] = []
        for one in ranked:
            length = len(one.prompt.token_ids)
            if length <= max_tokens and one.weight * self._faded(one) >= least_uses:
                chosen.append(one)
                max_tokens -= length
        return chosen

    def _faded(self, one: HotPrefix) -> float:
        faded: float = 0.5 ** ((self._num_notes - one.last) / HALF_LIFE)
        return faded

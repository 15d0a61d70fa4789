"""Where to save the states of recurrent layers, and where steps must end so that these states exist.

A state takes as much memory as the KV of hundreds of tokens. States after every block would fill the pool. If states
were saved only after whole prompts, a prompt that shares only a beginning would never hit a state. So states are saved
after

    every `interval` tokens of a prompt
    the end of a prompt, and of each message in it       the next turn begins with them
    the place where a prompt parts from an earlier one   the third prompt that begins alike hits there

A position where a state is saved is rounded down to a position where a hit can end. Saving where prompts part is
Marconi's rule (Pan et al., MLSys 2025): a prefix that two prompts share is likely to return. No state is saved after
generated tokens. Recurrent layers compute a prompt in cells of several tokens (see hybrid.py), but generated tokens one
by one. So the state after generated tokens has other bits than the state after the same tokens in a prompt.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foreword.cache.groups.managers import GroupSpec, MambaSpec
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence

MAX_SEEN_KEYS = 1 << 16
"""The number of keys of earlier prompts to remember; the oldest keys are forgotten first."""


@dataclass(slots=True)
class StateCheckpoints:
    """Decides where one set of groups saves states. Remembers the keys of earlier prompts."""

    grid: int
    """Steps end at multiples of this number of tokens, or at the end of the known tokens."""
    alignment: int
    """Hits end at multiples of this number of tokens. It is a multiple of `grid`."""
    interval: int
    """States are saved at multiples of this number of tokens. It is a multiple of `alignment`."""
    _seen: dict[BlockHash, None] = field(default_factory=dict)

    @classmethod
    def for_groups(cls, groups: Sequence[GroupSpec]) -> StateCheckpoints | None:
        """The rules for these groups; None if no group is recurrent."""
        recurrent = [group for group in groups if isinstance(group, MambaSpec)]
        if not recurrent:
            return None
        alignment = math.lcm(*(group.block_size for group in groups))
        interval = math.lcm(alignment, *(group.interval_tokens or group.block_size for group in recurrent))
        return cls(math.lcm(*(group.block_size for group in recurrent)), alignment, interval)

    def align(self, num_tokens: int) -> int:
        """The last position at or before `num_tokens` where a hit can end."""
        return num_tokens // self.alignment * self.alignment

    def num_in_cells(self, num_prompt_tokens: int) -> int:
        """The number of leading tokens of a prompt that fill whole cells of `grid` tokens; a hit has no more tokens."""
        return num_prompt_tokens // self.grid * self.grid

    def of_prompt(self, sequence: TokenSequence, message_ends: Iterable[int]) -> list[int]:
        """The positions in a new prompt at which states are saved, ascending, without the multiples of the interval."""
        length = len(sequence)
        # length - 1: a hit of the same prompt must leave a token to compute. length: a longer prompt may begin with it.
        positions = {length, length - 1, self._note_junction(sequence), *(end for end in message_ends if end <= length)}
        return sorted({self.align(position) for position in positions} - {0})

    def next_after(self, positions: Sequence[int], start: int) -> int:
        """The first position after `start` at which a state is saved.

        The position is the next multiple of `interval` or, if it comes earlier, the next of `positions`.
        """
        at = bisect.bisect_right(positions, start)
        by_interval = (start // self.interval + 1) * self.interval
        return min(by_interval, positions[at]) if at < len(positions) else by_interval

    def cut(self, start: int, end: int, num_prompt_tokens: int, budget: int, positions: Sequence[int]) -> int:
        """The end of a step that begins at `start` and should end at `end`; `start` if no cell fits into the budget.

        To reach the end of the first cell, the step may use the whole budget of tokens, which is at least `end -
        start`. Each generated token is a cell, so among generated tokens a step can end anywhere.
        """
        if start >= num_prompt_tokens:
            return end
        if end < num_prompt_tokens:
            end = end // self.grid * self.grid
            if end <= start:
                end = min(num_prompt_tokens, (start // self.grid + 1) * self.grid)
                if end - start > budget:
                    return start
        return min(end, self.next_after(positions, start))

    def _note_junction(self, sequence: TokenSequence) -> int:
        """Return the length of the longest beginning that an earlier prompt shares, and remember this prompt."""
        width = self.alignment // sequence.block_size
        keys = sequence.block_hashes()[width - 1 :: width]
        seen = self._seen
        shared = next((number for number in range(len(keys), 0, -1) if keys[number - 1] in seen), 0)
        for key in keys:
            seen.pop(key, None)
            seen[key] = None
        while len(seen) > MAX_SEEN_KEYS:
            del seen[next(iter(seen))]
        return shared * self.alignment

"""Admission: which blocks are worth storing in a tier. `foreword replay --tier` compares the rules on recorded traffic.

all       every block
twice     a block that is computed for the second time: prompts that never return are never written
room      every block while the tier has room, then as `twice`: a tier that is not full keeps all for a restart
heads     the first blocks of each prompt, which prompts share most often
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import get_args

from foreword.config import AdmissionName

ADMISSIONS: tuple[AdmissionName, ...] = get_args(AdmissionName)
HEAD_TOKENS = 4096
"""The number of leading tokens of a prompt that the rule `heads` admits."""
MOST_REMEMBERED = 1 << 18
"""At least this number of keys of the last computed blocks are remembered, and at most twice as many, in 50 MB."""


class Admission:
    """One rule, and the keys that it remembers."""

    def __init__(self, rule: AdmissionName, block_tokens: int) -> None:
        self.rule = rule
        self._head_blocks = max(1, HEAD_TOKENS // block_tokens)
        self._computed: set[Hashable] = set()
        self._computed_earlier: set[Hashable] = set()

    def admits(self, number: int, key: Hashable, *, has_room: bool) -> bool:
        """Whether to store a block that was just computed, the `number`-th of its prompt. Call it once per block."""
        if self.rule == "all":
            return True
        if self.rule == "heads":
            return number < self._head_blocks
        was_computed = key in self._computed or key in self._computed_earlier
        if len(self._computed) >= MOST_REMEMBERED:
            self._computed_earlier, self._computed = self._computed, set()
        self._computed.add(key)
        return was_computed or (has_room and self.rule == "room")

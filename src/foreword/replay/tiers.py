"""Replays recorded requests on a memory with a tier below it, both with LRU, for each rule of admission.

A request finds its leading blocks, up to the first one that neither level has. It computes the rest. Computed blocks
go to memory and, if the rule admits them, to the tier (`foreword.tiers.admission`, which the engine calls too).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from foreword.config import AdmissionName
from foreword.errors import ConfigError
from foreword.replay.caches import Lru
from foreword.replay.capacity import Capacity, parse_capacity, parse_with_unit
from foreword.replay.trace import RecordedRequest
from foreword.tiers.admission import ADMISSIONS, Admission


@dataclass(frozen=True, slots=True)
class TierOption:
    """A tier that a user asks about."""

    name: str
    size: str
    """Size as the user wrote it: blocks, or bytes with a unit."""
    bytes_per_s: float | None
    """Rate of loads in bytes per second; None: not known."""

    @classmethod
    def parse(cls, text: str) -> TierOption:
        """Parse `disk=50GB,1.6GB/s`, `disk=50GB` or `disk=100000`. Raises ConfigError."""
        match = re.fullmatch(r"\s*([A-Za-z]\w*)\s*=\s*([^,]+?)\s*(?:,\s*([^,]+?)\s*/\s*s\s*)?", text)
        if match is None:
            raise ConfigError(f"--tier {text!r} is no tier; write NAME=SIZE or NAME=SIZE,RATE: disk=50GB,1.6GB/s")
        name, size, rate = match.groups()
        return cls(name, size, None if rate is None else float(parse_with_unit(rate)))

    def capacity(self, block_tokens: int, kv_bytes_per_token: int | None) -> Capacity:
        """The tier's size in blocks of the trace. Raises ConfigError."""
        return parse_capacity(self.size, block_tokens, kv_bytes_per_token)


@dataclass(slots=True)
class TierReplay:
    """Blocks found with a memory of `memory_blocks`, a tier of `tier_blocks`, and one rule of admission."""

    memory_blocks: int
    tier_blocks: int
    admission: AdmissionName
    num_blocks: int = 0
    """Blocks of all prompts."""
    memory_hits: int = 0
    tier_hits: int = 0
    num_written: int = 0

    def share(self, num_blocks: int) -> float:
        return num_blocks / max(1, self.num_blocks)


class TwoLevels:
    """A memory over a tier. Both evict the least recently used block first."""

    def __init__(self, memory_blocks: int, tier_blocks: int, admission: AdmissionName, block_tokens: int) -> None:
        self.result = TierReplay(memory_blocks, tier_blocks, admission)
        self._admission = Admission(admission, block_tokens)
        self._memory, self._tier = Lru[int](memory_blocks), Lru[int](tier_blocks)

    def admit(self, keys: list[int]) -> None:
        result, memory, tier = self.result, self._memory, self._tier
        result.num_blocks += len(keys)
        num_found = 0
        for key in keys:
            if key in memory:
                result.memory_hits += 1
            elif key in tier:
                result.tier_hits += 1
            else:
                break
            num_found += 1
        for number, key in enumerate(keys):
            memory.use(key)
            if key in tier:
                tier.use(key)
            elif number >= num_found:  # only blocks that were computed are offered to the tier
                self._store(number, key)
        memory.shrink()
        tier.shrink()

    def _store(self, number: int, key: int) -> None:
        if self._admission.admits(number, key, has_room=not self._tier.is_full):
            self._tier.use(key)
            self.result.num_written += 1


def replay_tiers(
    requests: Iterable[RecordedRequest], memories: list[Capacity], tier: Capacity, block_tokens: int
) -> list[TierReplay]:
    """Replay the requests for each pair of a memory size and a rule of admission. Reads `requests` only once."""
    levels = [
        TwoLevels(memory.num_blocks, tier.num_blocks, admission, block_tokens)
        for memory in memories
        for admission in ADMISSIONS
    ]
    for request in requests:
        keys = request.keys.tolist()
        for level in levels:
            level.admit(keys)
    return [level.result for level in levels]

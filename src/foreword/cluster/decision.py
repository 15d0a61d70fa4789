"""A request as a router sees it, and a decision that explains itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import TokenSequence
from foreword.cache.block_ids import Int64Array
from foreword.cluster.holders import CopiedRun, Key, SourceHits
from foreword.cluster.reuse_ages import FloatArray


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A prompt by its block keys, which include adapter, salt and media: other tenants' blocks cannot match."""

    request_id: str
    keys: list[Key]
    num_tokens: int
    stable_blocks: int | None = None
    """Leading blocks up to the deepest boundary that later requests share, such as the end of the system prompt and the
    tools. Used only where nothing is known of the caches; None: all blocks."""
    session: str | None = None
    """Replaces the boundary if there is one."""
    runs: tuple[CopiedRun, ...] = ()
    """Of a linked prompt, in the order of the prompt."""

    @classmethod
    def of_sequence(
        cls,
        sequence: TokenSequence,
        stable_tokens: int | None = None,
        session: str | None = None,
        runs: Sequence[CopiedRun] = (),
    ) -> RoutingRequest:
        """The request of a tokenised prompt, with the engine's own keys."""
        stable = None if stable_tokens is None else stable_tokens // sequence.block_size
        return cls(sequence.request_id, list(sequence.block_hashes()), len(sequence), stable, session, tuple(runs))

    @property
    def most_hit_tokens(self) -> int:
        """The most tokens that can be hits: the last one is computed, and none is a hit from the first link on."""
        return min([self.num_tokens - 1, *(run.begin for run in self.runs[:1])])

    def without_keys(self) -> RoutingRequest:
        """The same numbers, for a log."""
        return replace(self, keys=[], runs=tuple(run._replace(keys=[]) for run in self.runs[:1]))

    def affinity(self) -> object:
        """What the hash ring places: the session, else the stable boundary, else the request itself."""
        if self.session is not None:
            return self.session
        known = self.keys[: self.stable_blocks]
        return known[-1] if known else self.request_id


class Reservation(NamedTuple):
    """Work that a router has placed on a replica; also its key in every later call."""

    router: str
    request_id: str
    attempt: int
    """1, or more after a rejection or a death. A late echo of an earlier attempt therefore releases nothing."""
    replica: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Arrays with one entry for each slot, as a rule sees them for one request. Read only.

    Those after `decode_s` are views, valid until the next call of the core.
    """

    request: RoutingRequest
    block_tokens: int
    usable: npt.NDArray[np.bool_]
    """Whether the replica may be chosen."""
    hit_blocks: Int64Array
    computed_tokens: Int64Array
    """Tokens that the replica would have to compute: the rest of the prompt; of a linked one, the rest that is not
    copied, and what is missing of its sources."""
    backlog_s: FloatArray
    """Time until the replica has computed the prompts that it already has."""
    prefill_s: FloatArray
    """Time of the tokens to compute."""
    reuse_s: FloatArray
    """What computing once more what another replica holds costs the requests that wait, less what it saves those that
    will want it here; at least minus the prefill seconds."""
    price_s: FloatArray
    """Time to compute the evicted blocks again, times the chance that they would have been used."""
    decode_s: FloatArray
    """Delay by the answers that the replica generates meanwhile."""
    num_waiting: Int64Array
    """Requests without a first token."""
    num_open: Int64Array
    """Requests without an end."""
    waiting_tokens: FloatArray
    """Prompt tokens to compute before the first tokens of the requests that wait."""
    free_blocks: Int64Array
    num_blocks: Int64Array
    """Capacity."""
    sources: SourceHits | None = None
    """Of a linked prompt."""


class Standing(StrEnum):
    """Whether a replica could be chosen, and whether its hit is known."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    """It could be chosen, but what its cache holds is not known, so it counts as no hit."""
    EXCLUDED = "excluded"
    """The caller excluded it, usually after a rejection or a death."""
    RETIRED = "retired"
    """It takes no more requests."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica in the eyes of one decision."""

    chosen: bool
    replica: str
    standing: Standing
    hit_tokens: int
    source_tokens: int
    """The part of a linked prompt's sources that it has, or does not need; 0 of other prompts."""
    uncached_tokens: int
    """Tokens to compute: the rest of the prompt; of a linked one, what is not copied, and the rest of its sources."""
    backlog_s: float
    prefill_s: float
    reuse_s: float
    price_s: float
    decode_s: float
    cost_s: float
    """Infinite: the replica was not usable."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen replica, with the reservation that was made in the same call."""

    reservation: Reservation
    slot: int
    degraded: bool
    """No usable replica's cache was known, so the hash ring decided."""
    hit_tokens: int
    """The part of the prompt that the chosen replica is expected to have."""
    fleet: Fleet
    costs: FloatArray
    names: tuple[str, ...]
    """The replica in each slot; empty for slots in no use."""
    known: int
    """Bits of the slots whose caches were known."""
    excluded: tuple[int, ...]
    """Slots that the caller excluded."""

    @property
    def replica(self) -> str:
        """The chosen replica's name."""
        return self.reservation.replica

    @property
    def source_tokens(self) -> int:
        """The tokens of a linked prompt's sources that are not the prompt's own; 0 of other prompts."""
        sources = self.fleet.sources
        return 0 if sources is None else sources.num_blocks * self.fleet.block_tokens

    @property
    def predicted_ttft_s(self) -> float:
        """The expected time to the first token; for admission and Retry-After."""
        return float(self.fleet.backlog_s[self.slot] + self.fleet.prefill_s[self.slot])

    def candidates(self) -> list[Candidate]:
        """Every replica with the parts of its cost, the cheapest first."""
        fleet, size = self.fleet, self.fleet.block_tokens
        missing = np.zeros_like(fleet.hit_blocks) if fleet.sources is None else fleet.sources.missing_blocks
        columns = (
            np.minimum(fleet.hit_blocks * size, fleet.request.most_hit_tokens),
            self.source_tokens - missing * size,
            np.maximum(fleet.computed_tokens, 1),
            fleet.backlog_s,
            fleet.prefill_s,
            fleet.reuse_s,
            fleet.price_s,
            fleet.decode_s,
            self.costs,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found = [
            Candidate(slot == self.slot, name, self._standing(slot), *row)
            for slot, (name, row) in enumerate(zip(self.names, rows, strict=True))
            if name
        ]
        return sorted(found, key=lambda each: (each.cost_s, not each.chosen, each.replica))

    def _standing(self, slot: int) -> Standing:
        if slot in self.excluded:
            return Standing.EXCLUDED
        if not self.fleet.usable[slot]:
            return Standing.RETIRED
        return Standing.KNOWN if self.known >> slot & 1 else Standing.UNKNOWN

"""A request as a router sees it, the decision about it, the reason, and whether the predicted hit came true.

A decision has one of four reasons:

    hit       no usable replica has fewer tokens to compute than the chosen one
    load      another usable replica has fewer tokens to compute, but its other costs are higher
    no hit    no usable replica is known to hold a part of the prompt or its sources: the least work decided
    hashed    no cache is known: the hash ring decided (degraded)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from foreword.cache import TokenSequence
from foreword.cache.block_ids import Int64Array
from foreword.cluster.holders import CopiedRun, Key, SourceHits
from foreword.cluster.reuse_ages import FloatArray
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A prompt as block keys. A key includes adapter, salt and media, so other tenants' blocks cannot match."""

    request_id: str
    keys: list[Key]
    num_tokens: int
    stable_blocks: int | None = None
    """The number of leading blocks that later requests probably share, such as those of the system prompt and the
    tools; None: all blocks. Used only if the router does not know what any replica has cached."""
    session: str | None = None
    """The session, which is used instead of `stable_blocks`; None: no session."""
    runs: tuple[CopiedRun, ...] = ()
    """The runs of a linked prompt that are copied, in the order of the prompt."""

    @classmethod
    def of_sequence(
        cls,
        sequence: TokenSequence,
        stable_tokens: int | None = None,
        session: str | None = None,
        runs: Sequence[CopiedRun] = (),
    ) -> RoutingRequest:
        """Make the request for a tokenised prompt, with the engine's own keys."""
        stable = None if stable_tokens is None else stable_tokens // sequence.block_size
        return cls(sequence.request_id, list(sequence.block_hashes()), len(sequence), stable, session, tuple(runs))

    @property
    def most_hit_tokens(self) -> int:
        """The most tokens that can be hits: never the last token, and no token from the first copied run on."""
        return min([self.num_tokens - 1, *(run.begin for run in self.runs[:1])])

    def affinity(self) -> object:
        """The value that the hash ring hashes: the session, else the last stable block's key, else the request id."""
        if self.session is not None:
            return self.session
        stable = self.keys[: self.stable_blocks]
        return stable[-1] if stable else self.request_id


class Reservation(NamedTuple):
    """Work that a router has placed on a replica. Every later call about this work passes this value."""

    router: str
    request_id: str
    attempt: int
    """The number of the attempt, from 1. A late message about an earlier attempt therefore releases nothing."""
    replica: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas as a rule sees them for one request: arrays with one entry for each slot. Read only.

    Some of the arrays after `decode_s` are views, valid until the next call of the core.
    """

    request: RoutingRequest
    block_tokens: int
    usable: npt.NDArray[np.bool_]
    """Whether the replica may be chosen."""
    hit_blocks: Int64Array
    computed_tokens: Int64Array
    """Tokens that the replica would have to compute: the rest of the prompt. For a linked prompt: the part of the rest
    that is not copied, and the missing blocks of its sources."""
    backlog_s: FloatArray
    """Seconds until the replica has computed the prompts that it already has."""
    prefill_s: FloatArray
    """Seconds to prefill `computed_tokens`."""
    reuse_s: FloatArray
    """Seconds that waiting requests lose because blocks of another replica are computed once more here, minus the
    seconds that later requests save with the new copy. The value is at least `-prefill_s`."""
    price_s: FloatArray
    """Seconds to recompute the blocks that the request would evict, times the chance that they would have been used."""
    decode_s: FloatArray
    """Seconds by which answers that the replica generates delay the request."""
    num_waiting: Int64Array
    """Requests without a first token."""
    num_open: Int64Array
    """Unfinished requests."""
    waiting_tokens: FloatArray
    """Prompt tokens to compute for the requests without a first token."""
    free_blocks: Int64Array
    num_blocks: Int64Array
    """Capacity of each replica, in blocks."""
    sources: SourceHits | None = None
    """The sources of a linked prompt; None for other prompts."""


class Standing(StrEnum):
    """Whether a replica could be chosen, and whether its hit is known."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    """The replica could be chosen, but the router does not know its cache, so its hit counts as 0 tokens."""
    EXCLUDED = "excluded"
    """The caller excluded the replica, usually after a rejection or a death."""
    RETIRED = "retired"
    """The replica takes no more requests."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as one decision saw it."""

    chosen: bool
    replica: str
    standing: Standing
    hit_tokens: int
    source_tokens: int
    """Tokens of a linked prompt's sources that the replica need not compute; 0 for other prompts."""
    uncached_tokens: int
    """Tokens to compute, at least 1; see `Fleet.computed_tokens`."""
    backlog_s: float
    prefill_s: float
    reuse_s: float
    price_s: float
    decode_s: float
    cost_s: float
    """Sum of the costs, in seconds; infinite if the replica was not usable."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen replica, with the reservation that was made in the same call.

    `as_dict` is ready for JSON, `text` for a header.
    """

    reservation: Reservation
    slot: int
    degraded: bool
    """True if the router knew the cache of no usable replica, so that the hash ring decided."""
    hit_tokens: int
    """Prompt tokens that the chosen replica is expected to have."""
    fleet: Fleet
    costs: FloatArray
    names: tuple[str, ...]
    """The replica in each slot; empty for unused slots."""
    known: int
    """A bit for each slot whose cache was known."""
    excluded: tuple[int, ...]
    """Slots that the caller excluded."""
    delivered_tokens: int | None = None
    """Prompt tokens that the replica had; None until the first token has come."""

    @property
    def replica(self) -> str:
        return self.reservation.replica

    @property
    def reason(self) -> Reason:
        if self.degraded:
            return Reason.HASHED
        sources, usable = self.fleet.sources, self.fleet.usable
        has_source = sources is not None and bool((sources.missing_blocks[usable] < sources.num_blocks).any())
        if not self.fleet.hit_blocks[usable].any() and not has_source:
            return Reason.NO_HIT
        computed = self.fleet.computed_tokens
        return Reason.HIT if computed[self.slot] == computed[usable].min() else Reason.LOAD

    @property
    def source_tokens(self) -> int:
        """Tokens of a linked prompt's sources, without the blocks that the prompt has too; 0 for other prompts."""
        sources = self.fleet.sources
        return 0 if sources is None else sources.num_blocks * self.fleet.block_tokens

    @property
    def predicted_ttft_s(self) -> float:
        """The expected seconds to the first token, for admission and Retry-After."""
        return float(self.fleet.backlog_s[self.slot] + self.fleet.prefill_s[self.slot])

    def candidates(self) -> list[Candidate]:
        """Every replica with the parts of its cost, the cheapest first; those that could not be chosen come last."""
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
        candidates = [
            Candidate(slot == self.slot, name, self._standing(slot), *row)
            for slot, (name, row) in enumerate(zip(self.names, rows, strict=True))
            if name
        ]
        return sorted(candidates, key=lambda each: (each.cost_s, not each.chosen, each.replica))

    def as_dict(self) -> dict[str, Any]:
        """The decision as JSON values. The cost of a replica that could not be chosen is None."""
        router, request_id, attempt, replica = self.reservation
        return {
            "request_id": request_id,
            "router": router,
            "attempt": attempt,
            "replica": replica,
            "reason": self.reason.value,
            "degraded": self.reason is Reason.HASHED,
            "prompt_tokens": self.fleet.request.num_tokens,
            "predicted_tokens": self.hit_tokens,
            "source_tokens": self.source_tokens,
            "delivered_tokens": self.delivered_tokens,
            "predicted_ttft_s": self.predicted_ttft_s,
            "candidates": [
                {
                    **asdict(each),
                    "standing": each.standing.value,
                    "cost_s": each.cost_s if isfinite(each.cost_s) else None,
                }
                for each in self.candidates()
            ],
        }

    def text(self) -> str:
        """One line of ASCII, `name=value` with spaces between; names of replicas are percent-encoded."""
        candidates, (router, _, attempt, replica) = self.candidates(), self.reservation
        chosen = next(each for each in candidates if each.chosen)
        parts = [
            f"replica={_quoted(replica)}",
            f"reason={self.reason}",
            f"hit={self.hit_tokens}/{self.fleet.request.num_tokens}",
            *([f"sources={chosen.source_tokens}/{self.source_tokens}"] if self.source_tokens else []),
            f"backlog_s={chosen.backlog_s:.3f}",
            f"reuse_s={chosen.reuse_s:.3f}",
            f"price_s={chosen.price_s:.3f}",
            f"decode_s={chosen.decode_s:.3f}",
            f"cost_s={chosen.cost_s:.3f}",
        ]
        other = next((each for each in candidates if not each.chosen and isfinite(each.cost_s)), None)
        if other is not None:
            parts += [
                f"next={_quoted(other.replica)}",
                f"next_hit={other.hit_tokens}",
                *([f"next_sources={other.source_tokens}"] if self.source_tokens else []),
                f"next_cost_s={other.cost_s:.3f}",
            ]
        if self.delivered_tokens is not None:
            parts.append(f"delivered={self.delivered_tokens}")
        return " ".join([*parts, f"attempt={attempt}", f"router={_quoted(router)}"])

    def _standing(self, slot: int) -> Standing:
        if slot in self.excluded:
            return Standing.EXCLUDED
        if not self.fleet.usable[slot]:
            return Standing.RETIRED
        return Standing.KNOWN if self.known >> slot & 1 else Standing.UNKNOWN


class Reason(StrEnum):
    """The reason of a choice; the module's docstring explains the values."""

    HIT = "hit"
    LOAD = "load"
    NO_HIT = "no_hit"
    HASHED = "hashed"


def _quoted(name: str) -> str:
    return quote(name, safe="/:@#+", errors="surrogatepass")


@dataclass(slots=True)
class RoutingCounts:
    """Sums over a router's decisions since the start."""

    decisions: int = 0
    delivered: int = 0
    """Decisions whose first token has come. The sums below are over these decisions."""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    delivered_tokens: int = 0
    overcredited_tokens: int = 0
    """Predicted tokens that the replica did not have."""


class DecisionLog:
    """Keeps the newest decisions and the hits that their replicas delivered."""

    def __init__(self, capacity: int = 256) -> None:
        """Keeps the decisions of the newest `capacity` attempts. Raises ConfigError if `capacity` is below 1."""
        if capacity < 1:
            raise ConfigError(f"a log of {capacity} decisions keeps nothing; use at least 1")
        self._decisions: deque[Decision] = deque(maxlen=capacity)
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._decisions)

    def __iter__(self) -> Iterator[Decision]:
        """The decisions, the newest first."""
        return reversed(self._decisions)

    def add(self, decision: Decision) -> None:
        """Keep a decision without its block keys. If there are too many, the oldest decision is dropped."""
        fleet, request = decision.fleet, decision.fleet.request
        request = replace(request, keys=[], runs=tuple(run._replace(keys=[]) for run in request.runs[:1]))
        sources = None if fleet.sources is None else fleet.sources.counts()
        self._decisions.append(replace(decision, fleet=replace(fleet, request=request, sources=sources)))

    def note_delivered(self, reservation: Reservation, cached_tokens: int) -> None:
        """Record that an attempt's first token has come, and that the replica had `cached_tokens` of the prompt."""
        for at in reversed(range(len(self._decisions))):
            decision = self._decisions[at]
            if decision.reservation == reservation and decision.delivered_tokens is None:
                self._decisions[at] = replace(decision, delivered_tokens=cached_tokens)
                return

    def of_request(self, request_id: str) -> list[Decision]:
        """The decisions of a request's attempts, oldest first; empty if the log has none of them."""
        return [decision for decision in self._decisions if decision.reservation.request_id == request_id]

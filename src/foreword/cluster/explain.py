"""Why a request went where it went, and whether the replica had what the decision counted on.

A decision has one of four reasons:

    hit       no replica that could be chosen has less to compute: none holds more of the prompt, or of its sources
    load      another one holds more, but its work costs more than the difference
    no hit    no replica that could be chosen is known to hold any of it: the least work
    hashed    no cache is known: the hash ring decided (degraded)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any
from urllib.parse import quote

from foreword.cluster.decision import Candidate, Decision, Reservation
from foreword.errors import ConfigError


class Reason(StrEnum):
    """What decided."""

    HIT = "hit"
    LOAD = "load"
    NO_HIT = "no_hit"
    HASHED = "hashed"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision in plain values. `as_dict` is ready for JSON, `text` for a header."""

    reservation: Reservation
    reason: Reason
    prompt_tokens: int
    predicted_tokens: int
    """The part of the prompt that the chosen replica is expected to have."""
    source_tokens: int
    """Tokens of a linked prompt's sources, each once; 0 of other prompts."""
    delivered_tokens: int | None
    """The part that it had; None until the first token has come."""
    predicted_ttft_s: float
    candidates: tuple[Candidate, ...]
    """Every replica, the cheapest first; those that could not be chosen last."""

    @classmethod
    def of_decision(cls, decision: Decision, delivered_tokens: int | None = None) -> Explanation:
        """Explain a decision."""
        return cls(
            decision.reservation,
            _reason(decision),
            decision.fleet.request.num_tokens,
            decision.hit_tokens,
            decision.source_tokens,
            delivered_tokens,
            decision.predicted_ttft_s,
            tuple(decision.candidates()),
        )

    @property
    def chosen(self) -> Candidate:
        """The chosen replica."""
        return next(each for each in self.candidates if each.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Values of JSON; the cost of a replica that could not be chosen is None."""
        router, request_id, attempt, replica = self.reservation
        return {
            "request_id": request_id,
            "router": router,
            "attempt": attempt,
            "replica": replica,
            "reason": self.reason.value,
            "degraded": self.reason is Reason.HASHED,
            "prompt_tokens": self.prompt_tokens,
            "predicted_tokens": self.predicted_tokens,
            "source_tokens": self.source_tokens,
            "delivered_tokens": self.delivered_tokens,
            "predicted_ttft_s": self.predicted_ttft_s,
            "candidates": [
                {
                    **asdict(each),
                    "standing": each.standing.value,
                    "cost_s": each.cost_s if isfinite(each.cost_s) else None,
                }
                for each in self.candidates
            ],
        }

    def text(self) -> str:
        """One line of ASCII, `name=value` with spaces between; names of replicas are percent-encoded."""
        chosen, (router, _, attempt, replica) = self.chosen, self.reservation
        parts = [
            f"replica={_quoted(replica)}",
            f"reason={self.reason}",
            f"hit={self.predicted_tokens}/{self.prompt_tokens}",
            *([f"sources={chosen.source_tokens}/{self.source_tokens}"] if self.source_tokens else []),
            f"backlog_s={chosen.backlog_s:.3f}",
            f"reuse_s={chosen.reuse_s:.3f}",
            f"price_s={chosen.price_s:.3f}",
            f"decode_s={chosen.decode_s:.3f}",
            f"cost_s={chosen.cost_s:.3f}",
        ]
        other = next((each for each in self.candidates if not each.chosen and isfinite(each.cost_s)), None)
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


def _reason(decision: Decision) -> Reason:
    fleet = decision.fleet
    if decision.degraded:
        return Reason.HASHED
    sources, usable = fleet.sources, fleet.usable
    has_source = sources is not None and bool((sources.missing_blocks[usable] < sources.num_blocks).any())
    if not fleet.hit_blocks[usable].any() and not has_source:
        return Reason.NO_HIT
    computed = fleet.computed_tokens
    return Reason.HIT if computed[decision.slot] == computed[usable].min() else Reason.LOAD


def _quoted(name: str) -> str:
    return quote(name, safe="/:@#+", errors="surrogatepass")


@dataclass(slots=True)
class LogCounts:
    """Sums over the decisions with one reason, since the start."""

    decisions: int = 0
    delivered: int = 0
    """Of them, those whose first token has come; the sums below are theirs."""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    delivered_tokens: int = 0
    overcredited_tokens: int = 0
    """Predicted tokens that the replica did not have."""


@dataclass(slots=True)
class _Entry:
    decision: Decision
    delivered_tokens: int | None = None


class DecisionLog:
    """The newest decisions, by request, with what their replicas delivered. Explains on demand, not at the decision."""

    def __init__(self, capacity: int = 256) -> None:
        """Keeps the decisions of the newest `capacity` attempts. Raises ConfigError if that is below 1."""
        if capacity < 1:
            raise ConfigError(f"a log of {capacity} decisions keeps nothing; use at least 1")
        self.capacity = capacity
        self.counts: dict[Reason, LogCounts] = {reason: LogCounts() for reason in Reason}
        self.num_late = 0
        """First tokens of attempts that had left the log. They are in no sum here; `RoutingCounts` has them."""
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._numbers: dict[str, list[int]] = {}
        """Numbers of each request's entries, the oldest first."""
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Explanation]:
        """The explanations, the newest first."""
        return map(_explanation, reversed(self._entries.values()))

    def add(self, decision: Decision) -> None:
        """Keep a decision; the oldest one goes if there are too many. Keys of blocks are not kept."""
        self.counts[_reason(decision)].decisions += 1
        fleet, request = decision.fleet, decision.fleet.request.without_keys()
        sources = None if fleet.sources is None else fleet.sources.counts()
        entry = _Entry(replace(decision, fleet=replace(fleet, request=request, sources=sources)))
        self._entries[self._next_number] = entry
        self._numbers.setdefault(request.request_id, []).append(self._next_number)
        self._next_number += 1
        if len(self._entries) > self.capacity:
            number, oldest = self._entries.popitem(last=False)
            request_id = oldest.decision.reservation.request_id
            self._numbers[request_id].remove(number)
            if not self._numbers[request_id]:
                del self._numbers[request_id]

    def note_delivered(self, reservation: Reservation, cached_tokens: int) -> None:
        """The first token of an attempt has come; the replica had `cached_tokens` of the prompt."""
        for number in reversed(self._numbers.get(reservation.request_id, ())):
            entry = self._entries[number]
            if entry.decision.reservation == reservation and entry.delivered_tokens is None:
                break
        else:
            self.num_late += 1
            return
        entry.delivered_tokens = cached_tokens
        predicted, counts = entry.decision.hit_tokens, self.counts[_reason(entry.decision)]
        counts.delivered += 1
        counts.prompt_tokens += entry.decision.fleet.request.num_tokens
        counts.predicted_tokens += predicted
        counts.delivered_tokens += cached_tokens
        counts.overcredited_tokens += max(0, predicted - cached_tokens)

    def of_request(self, request_id: str) -> list[Explanation]:
        """The explanations of a request's attempts, the first one first; empty if none is kept."""
        return [_explanation(self._entries[number]) for number in self._numbers.get(request_id, ())]


def _explanation(entry: _Entry) -> Explanation:
    return Explanation.of_decision(entry.decision, entry.delivered_tokens)

"""How a router weighs its replicas, and the facts that a replica gives when it joins.

Knows numbers and their ranges; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from foreword.errors import ConfigError

TURN_S = 0.005
FIRST_RATE = 1000.0
"""Prefill tokens a second that a router assumes for an engine until it has measurements."""
DECODE_TOKENS = 32.0
"""The weight of an answer under way, in prompt tokens. Without it, all requests with a common prompt would go to the
replica that has the prompt."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How a router weighs its replicas."""

    block_tokens: int = 16
    """Tokens per block, the same on all replicas."""
    price_weight: float = 1.0
    """Factor of `Fleet.price_s`, the cost of the blocks that are evicted; 0 leaves that cost out."""
    load_slack: float = 0.25
    """If the router knows no replica's cache, a replica gets at most 1 + `load_slack` times its share of the
    requests."""
    expectation_s: float = 60.0
    """Seconds after a request's first token. A block that no event has reported by then is no longer expected."""
    share_load: bool = False
    """Whether `take_updates` has updates for other routers."""
    peer_silence_s: float = 5.0
    """Seconds without an update after which another router's reservations end."""
    turn_s: float = TURN_S
    """Seconds of a router's time slot, in which it decides before the others if requests come at once. Must exceed the
    time that updates take to reach other routers, and the difference between the routers' clocks. 0: routers do not
    wait for slots."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens={self.block_tokens} is too small; use at least 1")
        for name in ("price_weight", "load_slack", "expectation_s", "peer_silence_s", "turn_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use a number of at least 0")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The facts that a replica gives when it joins."""

    num_blocks: int
    tokens_per_s: float
    """Prefill tokens a second; measurements correct this rate."""
    is_rate_known: bool = True
    """False: the rate is a guess. The mean of measurements at all replicas with guessed rates replaces it
    (`loads.py`)."""
    decode_s: float = 0.0
    """Seconds by which each answer that the replica generates delays a new request's first token."""
    decode_tokens: float = 0.0
    """A further delay by each request at the replica, answering or not: the time to compute this number of prompt
    tokens."""
    is_prefix_closed: bool = False
    """Whether the replica never holds a block without the blocks before it, as with foreword's radix index. Decisions
    are faster if that is true of all replicas."""

    @classmethod
    def of_engine(cls, num_blocks: int, *, is_prefix_closed: bool) -> ReplicaSpec:
        """The facts of an engine that does not know its speed."""
        return cls(
            num_blocks,
            FIRST_RATE,
            is_rate_known=False,
            decode_tokens=DECODE_TOKENS,
            is_prefix_closed=is_prefix_closed,
        )

    def __post_init__(self) -> None:
        delays = (self.decode_s, self.decode_tokens)
        if self.num_blocks < 1 or not 0 < self.tokens_per_s < inf or not all(0 <= each < inf for each in delays):
            raise ConfigError(
                f"a replica with num_blocks={self.num_blocks}, tokens_per_s={self.tokens_per_s}, decode_s="
                f"{self.decode_s} and decode_tokens={self.decode_tokens} cannot serve; use at least 1 block, a rate "
                "above 0 and delays of at least 0"
            )


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica, as far as its routers know."""

    num_blocks: int
    num_open: int
    """Unfinished requests."""
    waiting_tokens: int
    """Prompt tokens that wait to be computed."""
    tokens_per_s: float

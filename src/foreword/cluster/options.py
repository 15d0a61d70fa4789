"""How a router weighs its replicas, and what a replica says of itself.

Knows numbers and their ranges; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from foreword.errors import ConfigError

TURN_S = 0.005
FIRST_RATE = 1000.0
"""Prefill tokens a second that a router assumes of an engine until it has measured."""
DECODE_TOKENS = 32.0
"""Prompt tokens that an answer under way weighs as much as: without a weight, a common prompt would gather all answers
at the replica that has it."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How a router weighs its replicas."""

    block_tokens: int = 16
    """Tokens per block, the same on all replicas."""
    price_weight: float = 1.0
    """Weight of the evicted blocks' price; 0 leaves it out."""
    load_slack: float = 0.25
    """Without knowledge of the caches: a replica may have this share more than its fair part of the open requests."""
    expectation_s: float = 60.0
    """Time from the first token until blocks that no event has reported are no longer expected."""
    share_load: bool = False
    """Whether `take_updates` has updates for other routers."""
    peer_silence_s: float = 5.0
    """Time after which the reservations of a silent router end."""
    turn_s: float = TURN_S
    """Length of a router's turn in a burst; longer than updates take to reach other routers, and than their clocks
    differ. 0: routers take no turns."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens={self.block_tokens} is too small; use at least 1")
        for name in ("price_weight", "load_slack", "expectation_s", "peer_silence_s", "turn_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use a number of at least 0")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica says when it joins."""

    num_blocks: int
    tokens_per_s: float
    """Prefill tokens a second; corrected by what is measured."""
    is_rate_known: bool = True
    """False: the rate is a guess; the mean of what is measured at such replicas takes its place (`loads.py`)."""
    decode_s: float = 0.0
    """Delay of a new request's first token by each answer that the replica generates."""
    decode_tokens: float = 0.0
    """Prompt tokens that the answer of each request there weighs as much as, begun or not; besides `decode_s`."""
    is_prefix_closed: bool = False
    """Whether the replica never holds a block without those before it, as foreword's radix index; decisions are faster
    if all replicas say so."""

    @classmethod
    def of_engine(cls, num_blocks: int, *, is_prefix_closed: bool) -> ReplicaSpec:
        """What an engine says that knows nothing of its speed."""
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
    """What one replica has to do, as far as its routers know."""

    num_blocks: int
    num_open: int
    """Requests without an end."""
    waiting_tokens: int
    """Prompt tokens to compute."""
    tokens_per_s: float

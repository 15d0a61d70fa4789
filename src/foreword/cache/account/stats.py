"""Counters of lookups, hits and misses."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields

from foreword.cache.account.ledger import MissReason


def _counter(meaning: str) -> int:
    """A field that everybody may see: /metrics and the cache's API show it under its own name."""
    counter: int = field(default=0, metadata={"meaning": meaning})
    return counter


@dataclass(slots=True)
class PrefixCacheStats:
    """Totals since the last reset. To add a total, add a field and a line that counts: readers iterate over all fields.

    `requests`, `queries` and `hits` count each prompt once, when it is first admitted, so they show what earlier
    traffic left in the cache. Two kinds of lookups find a prompt's own tokens, and have counters of their own:

        preempted_*   a request that resumes after preemption looks its own tokens up again (as in vLLM)
        forked_*      of `n` answers to one prompt, the second and later answers find tokens that the first computes
    """

    requests: int = 0
    """Prompts admitted."""
    queries: int = _counter("Prompt tokens that were looked up.")
    hits: int = _counter("Prompt tokens that were found: prefill saved.")
    tail_hits: int = _counter("Found tokens that were in tails, the partly filled last blocks of requests.")
    """A tail is the partly filled last block of an earlier request."""
    preempted_requests: int = _counter("Lookups of requests that resumed after preemption; in no other count.")
    preempted_queries: int = _counter("Tokens of those lookups.")
    preempted_hits: int = _counter("Tokens that those lookups found.")
    forked_requests: int = 0
    forked_queries: int = 0
    forked_hits: int = 0
    evictions: int = 0
    """Full cached blocks whose memory was given to other content."""
    tail_evictions: int = _counter("Tails whose memory was given to other content.")

    # The fields below need a ledger.
    ghost_hits: int = _counter("Missed tokens that twice the blocks would have found.")
    misses: Counter[MissReason] = field(
        default_factory=Counter, metadata={"meaning": "Requests that missed something."}
    )
    missed_tokens: Counter[MissReason] = field(
        default_factory=Counter, metadata={"meaning": "Tokens that those requests missed."}
    )

    def count_lookup(self, kind: str, num_tokens: int, num_hit_tokens: int) -> None:
        """Count the lookup of an admitted request in the fields that begin with `kind`."""
        for name, count in (("requests", 1), ("queries", num_tokens), ("hits", num_hit_tokens)):
            setattr(self, kind + name, getattr(self, kind + name) + count)

    def __add__(self, other: PrefixCacheStats) -> PrefixCacheStats:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, earlier: PrefixCacheStats) -> PrefixCacheStats:
        return type(self)(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def meanings(self) -> dict[str, str]:
        """The meaning of each field that everybody may see, by the field's name."""
        return {f.name: f.metadata["meaning"] for f in fields(self) if "meaning" in f.metadata}

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hits; 0.0 before the first query."""
        return self.hits / self.queries if self.queries else 0.0

    @property
    def hit_rate_with_twice_the_blocks(self) -> float:
        """The `hit_rate` that a pool with twice the blocks would have, estimated from the ghosts."""
        return (self.hits + self.ghost_hits) / self.queries if self.queries else 0.0


class CachingMetrics:
    """Hit rate over the most recent requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._max_recent = max_recent_requests
        self._queries = 0
        self._hits = 0

    def observe(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count one admitted request, and forget the oldest request beyond the limit."""
        self._recent.append((num_queried_tokens, num_hit_tokens))
        self._queries += num_queried_tokens
        self._hits += num_hit_tokens
        if len(self._recent) > self._max_recent:
            queries, hits = self._recent.popleft()
            self._queries -= queries
            self._hits -= hits

    def reset(self) -> None:
        self._recent.clear()
        self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        return self._hits / self._queries if self._queries else 0.0

"""What happened to each request: the one account from which metrics, explanations and the dashboard are drawn.

Knows tenants, token counts and moments; knows nothing of HTTP. A record is opened on the event loop when a
request is accepted, filled by the engine's thread while it runs, and closed there. Single fields may be read from
any thread at any time; a closed record does not change any more.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt

from foreword.cache import LookupExplanation
from foreword.server.listeners import Listener, ListenerHealth

MAX_RECORDS = 1000
MAX_RECORD_BYTES = 128 * 2**20
"""Of all finished records; the oldest are dropped when there are more."""
RECORD_BYTES = 2048
"""What a record takes besides its prompt and times."""
TIME_BYTES = 32


@dataclass(slots=True)
class RequestRecord:
    """One prompt's life. Moments are `time.monotonic()` seconds."""

    response_id: str
    """The id that the client sees; several prompts of one call share it."""
    request_id: str
    """The engine's id."""
    tenant: str
    endpoint: str
    prompt_token_ids: npt.NDArray[np.int32]
    salt: str | None = None
    """Cache namespace; never shown."""
    prompt_cache_key: str | None = None
    trace_parent: str | None = None
    """W3C `traceparent` header of the call, if it came with one."""
    template_digests: Mapping[str, str] = field(default_factory=dict)
    """What the chat template was given besides the messages: by name, a digest of each."""
    num_choices: int = 1
    stream: bool = False
    created: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each step that brought tokens ended: the first entry is the time of the first token."""
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    explanation: LookupExplanation | None = None
    """How its lookup went. `salt_differs` must be told to clients as `never_seen`."""
    outcome: str | None = None
    """Finish reason of its last choice, or "refused", "failed", "disconnected", "timeout"; None while it runs."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not found in the cache."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""
        return RECORD_BYTES + self.prompt_token_ids.nbytes + TIME_BYTES * len(self.token_times)

    @property
    def time_to_first_token(self) -> float | None:
        """Arrival to first token, seconds."""
        return self.token_times[0] - self.arrival_time if self.token_times else None


@dataclass(slots=True)
class TenantStats:
    """Totals of one tenant since the start."""

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class Records:
    """Running requests, the most recent finished ones, and totals by tenant. Safe to use from any thread."""

    def __init__(self, max_finished: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._lock = Lock()
        self._running: dict[str, RequestRecord] = {}
        self._finished: deque[RequestRecord] = deque()
        self._by_response: dict[str, RequestRecord] = {}
        self._max = max_finished
        self._max_bytes = max_bytes
        self.num_finished_bytes = 0
        """Memory of the finished records, roughly."""
        self._tenants: dict[str, TenantStats] = {}
        self._listeners: list[Listener[RequestRecord]] = []

    def on_finished(self, listener: Listener[RequestRecord]) -> None:
        """Have every closed record handed to `listener`, on the engine's thread: it must be quick."""
        self._listeners.append(listener)

    def listeners(self) -> list[ListenerHealth]:
        """How those do that are told of closed records."""
        return [listener.health for listener in self._listeners]

    def open(self, record: RequestRecord) -> None:
        """A request was accepted."""
        with self._lock:
            self._running[record.request_id] = record

    def close(self, record: RequestRecord, outcome: str) -> None:
        """A request ended. Closing it again changes nothing."""
        with self._lock:
            if self._running.pop(record.request_id, None) is None:
                return
            record.finished_time = time.monotonic()
            record.outcome = outcome
            self._keep(record)
            stats = self._tenants.setdefault(record.tenant, TenantStats())
            stats.outcomes[outcome] += 1
            if record.first_scheduled_time is not None:
                stats.requests += 1
                stats.queried_tokens += record.num_prompt_tokens
                stats.hit_tokens += record.num_cached_tokens
                stats.output_tokens += record.num_output_tokens
        for listener in self._listeners:
            listener(record)

    def _keep(self, record: RequestRecord) -> None:
        """Add a finished record, and drop the oldest beyond the limits."""
        self._finished.append(record)
        self._by_response.setdefault(record.response_id, record)
        self.num_finished_bytes += record.num_bytes
        while len(self._finished) > self._max or self.num_finished_bytes > self._max_bytes:
            dropped = self._finished.popleft()
            self.num_finished_bytes -= dropped.num_bytes
            if self._by_response.get(dropped.response_id) is dropped:
                del self._by_response[dropped.response_id]

    def recent(self, count: int, tenant: str | None = None) -> list[RequestRecord]:
        """Finished records, the latest first; of one tenant, if it is named."""
        with self._lock:
            finished: Iterator[RequestRecord] = reversed(list(self._finished))
        return [record for record in finished if tenant is None or record.tenant == tenant][:count]

    def running(self) -> list[RequestRecord]:
        """Records of requests that are not finished."""
        with self._lock:
            return list(self._running.values())

    def of_response(self, response_id: str, tenant: str) -> RequestRecord | None:
        """The (first) record of a finished response, if it is this tenant's and recent enough."""
        with self._lock:
            record = self._by_response.get(response_id)
        return record if record is not None and record.tenant == tenant else None

    def totals(self) -> TenantStats:
        """All tenants together since the start, with what running requests have had so far."""
        total = TenantStats()
        with self._lock:
            for stats in self._tenants.values():
                total.outcomes += stats.outcomes
                total.requests += stats.requests
                total.queried_tokens += stats.queried_tokens
                total.hit_tokens += stats.hit_tokens
                total.output_tokens += stats.output_tokens
            for record in self._running.values():
                if record.first_scheduled_time is not None:
                    total.requests += 1
                    total.queried_tokens += record.num_prompt_tokens
                    total.hit_tokens += record.num_cached_tokens
                    total.output_tokens += record.num_output_tokens
        return total

    def tenants(self) -> dict[str, TenantStats]:
        """Totals by tenant."""
        with self._lock:
            return dict(self._tenants)

"""Records: the life of each request. Metrics, explanations and the dashboard read them.

The event loop opens a record when it accepts a request. The engine's thread fills the record while the request runs,
and closes it. Any thread may read single fields at any time. A closed record never changes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache import LookupExplanation
from foreword.request import LinkReport

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LOGS = 60.0
T = TypeVar("T")
FIRST, LATER, NO_SESSION = "first", "later", "none"
MAX_RECORDS = 1000
MAX_SESSIONS = 10_000
"""Limit of the sessions with totals, which take about 5 MB. The least recently used sessions are dropped."""
PACE_S = 60.0
"""The server's recent pace is measured over the requests that ended less than this many seconds ago."""
MAX_RECORD_BYTES = 128 * 2**20
"""Limit of the bytes of all finished records. Beyond this limit, the oldest are dropped."""
RECORD_BYTES = 2048
"""Estimated bytes of a record without its prompt and times."""
TIME_BYTES = 32
JUMP_BYTES = 128


class ListenerHealth:
    """The state of one listener. One thread writes it, any thread may read it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_failures = 0
        self.num_lost = 0
        """The number of requests that the listener lost."""
        self.failure: str | None = None
        """Why the last attempt failed; None if it succeeded."""
        self._logged: float | None = None

    def failed(self, error: Exception | str) -> None:
        """Record a failed attempt, with its exception or a reason."""
        self.num_failures += 1
        self.failure = error if isinstance(error, str) else what_failed(error)
        now = time.monotonic()
        if self._logged is None or now - self._logged >= SECONDS_BETWEEN_LOGS:
            self._logged = now
            logger.error(
                "listener %s failed: %s (%d failures so far); requests are served all the same",
                self.name,
                error,
                self.num_failures,
                exc_info=error if isinstance(error, Exception) else None,
            )

    def worked(self) -> None:
        if self.failure is not None:
            self.failure = None
            self._logged = None
            logger.info("listener %s works again; it lost %d requests so far", self.name, self.num_lost)


class Listener(Generic[T]):
    """Calls a function with events. The function's exceptions are recorded, not raised."""

    def __init__(self, name: str, tell: Callable[[T], None]) -> None:
        self.health = ListenerHealth(name)
        self._tell = tell

    def __call__(self, what: T) -> None:
        try:
            self._tell(what)
        except Exception as error:
            self.health.num_lost += 1
            self.health.failed(error)
        else:
            self.health.worked()


def what_failed(error: Exception) -> str:
    """Describe an error for people without a key: the system's message, without paths or values."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    cause = error.__cause__
    return what_failed(cause) if isinstance(cause, Exception) else type(error).__name__


@dataclass(slots=True)
class RequestRecord:
    """The life of one prompt. Times are seconds of `time.monotonic()`, except `created`."""

    response_id: str
    """The id that the client sees. All prompts of one call have the same id."""
    request_id: str
    """The engine's id."""
    tenant: str
    endpoint: str
    prompt_token_ids: npt.NDArray[np.int32]
    salt: str | None = None
    """The salt that separates the prompt's KV in the cache from other tenants' KV; no client ever sees it."""
    session_id: str | None = None
    trace_parent: str | None = None
    """W3C `traceparent` header of the call; None without this header."""
    template_digests: Mapping[str, str] = field(default_factory=dict)
    """Name of a chat template's input (except the messages) -> digest of the input."""
    num_choices: int = 1
    stream: bool = False
    is_uncached: bool = False
    """Whether the call asked to bypass the cache."""
    created: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    """The end of each step that produced tokens. The first entry is the time of the first token."""
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    explanation: LookupExplanation | None = None
    """The result of the prompt's cache lookup. Clients must be shown `never_seen` in place of `salt_differs`."""
    adapter: str | None = None
    """The digest of the adapter that computes all tokens; None if no adapter begins at token 0."""
    adapter_begins_inside: bool = False
    link_method: str | None = None
    """The method of linking that the call asked for; None for a plain prompt."""
    linked_from: int | None = None
    """The index of the first linked token; None: no token is linked."""
    has_gaps: bool = False
    """Whether tokens have other positions than in the plain prompt."""
    jumps: tuple[tuple[int, int], ...] = ()
    """For each gap between positions, up to the first linked token: index and position of the token after the gap."""
    spans: tuple[tuple[int, str], ...] = ()
    """For each picture or embedding: the index of its first token, and the digest of its content."""
    link: LinkReport | None = None
    """Counts of the linked, computed and cached tokens of a prompt with `link_method`."""
    route: str | None = None
    """Why the request went to its replica, in a line; None if there is only one engine."""
    outcome: str | None = None
    """Finish reason of its last choice, or "refused", "failed", "disconnected", "timeout"; None while it runs."""

    @property
    def namespace(self) -> str:
        """The namespace of the prompt. Prompts of one namespace may share KV."""
        return namespace_of(self.salt, self.adapter)

    @property
    def is_plain(self) -> bool:
        """Whether the keys of the prompt's KV depend only on its tokens and its salt."""
        return not (self.spans or self.jumps or self.link_method or self.adapter or self.adapter_begins_inside)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def approximate(self) -> str | None:
        """The method of linking, if tokens are linked or positions have gaps; None: the answer is exact."""
        return self.link_method if self.linked_from is not None or self.has_gaps else None

    @property
    def num_queried_tokens(self) -> int:
        """The number of prompt tokens that the prefix cache could have had: all tokens before the first link."""
        return self.num_prompt_tokens if self.linked_from is None else self.linked_from

    @property
    def num_computed_tokens(self) -> int:
        """The number of prompt tokens that were neither found in the cache nor linked."""
        return self.num_prompt_tokens - self.num_cached_tokens - (0 if self.link is None else self.link.linked_tokens)

    @property
    def num_bytes(self) -> int:
        return (
            RECORD_BYTES
            + self.prompt_token_ids.nbytes
            + TIME_BYTES * len(self.token_times)
            + JUMP_BYTES * (len(self.jumps) + 2 * len(self.spans))
        )

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival_time if self.token_times else None


def namespace_of(salt: str | None, adapter: str | None) -> str:
    """Return the name of the namespace of a salt and an adapter; the adapter computes all tokens of the prompt."""
    return (salt or "") + ("" if adapter is None else f" under adapter {adapter}")


@dataclass(slots=True)
class Totals:
    """Totals of requests."""

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0

    def count(self, record: RequestRecord) -> None:
        if record.first_scheduled_time is not None:
            self.requests += 1
            self.queried_tokens += record.num_queried_tokens
            self.hit_tokens += record.num_cached_tokens
            self.output_tokens += record.num_output_tokens

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were found in the cache."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def report(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in (*(each.name for each in fields(Totals)), "hit_rate")}


@dataclass(slots=True)
class TenantStats(Totals):
    """Totals of one tenant since the start."""

    outcomes: Counter[str] = field(default_factory=Counter)

    def since(self, before: TenantStats) -> TenantStats:
        """Return the difference between these totals and the earlier totals `before`."""
        return TenantStats(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@dataclass(slots=True)
class SessionStats(Totals):
    """Totals of one session. Times are seconds since 1970."""

    first_time: float = field(default_factory=time.time)
    last_time: float = 0.0
    """The time at which its last request ended."""


class Records:
    """Running requests, the most recent finished requests, and totals by tenant. Any thread may use it."""

    def __init__(self, max_finished: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._lock = Lock()
        self._running: dict[str, RequestRecord] = {}
        self._finished: deque[RequestRecord] = deque()
        self._by_response: dict[str, RequestRecord] = {}
        self._max = max_finished
        self._max_bytes = max_bytes
        self.num_finished_bytes = 0
        """The estimated bytes of the finished records."""
        self._tenants: dict[str, TenantStats] = {}
        self._sessions: OrderedDict[tuple[str, str], SessionStats] = OrderedDict()
        """Totals of sessions by tenant and id. The last used session comes last."""
        self._turns: dict[str, Totals] = {turn: Totals() for turn in (FIRST, LATER, NO_SESSION)}
        self._listeners: list[Listener[RequestRecord]] = []

    def on_finished(self, listener: Listener[RequestRecord]) -> None:
        """Call `listener` with every closed record. It runs on the engine's thread, so the listener must be quick."""
        self._listeners.append(listener)

    def listeners(self) -> list[ListenerHealth]:
        """Return the health of the listeners to closed records."""
        return [listener.health for listener in self._listeners]

    def open(self, record: RequestRecord) -> None:
        with self._lock:
            self._running[record.request_id] = record

    def close(self, record: RequestRecord, outcome: str) -> None:
        """Close the record of a request that ended. A second call changes nothing."""
        with self._lock:
            if self._running.pop(record.request_id, None) is None:
                return
            record.finished_time = time.monotonic()
            record.outcome = outcome
            self._keep(record)
            stats = self._tenants.setdefault(record.tenant, TenantStats())
            stats.outcomes[outcome] += 1
            stats.count(record)
            self._turns[self._count_session(record)].count(record)
        for listener in self._listeners:
            listener(record)

    def _count_session(self, record: RequestRecord) -> str:
        """Count a record for its session, if the request ran. Returns FIRST, LATER or NO_SESSION."""
        if record.session_id is None or record.first_scheduled_time is None:
            return NO_SESSION
        stats = self._sessions.setdefault((record.tenant, record.session_id), SessionStats())
        turn = LATER if stats.requests else FIRST
        stats.count(record)
        stats.last_time = time.time()
        self._sessions.move_to_end((record.tenant, record.session_id))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return turn

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
        """Return up to `count` finished records, the latest first. `tenant`: return only this tenant's records."""
        with self._lock:
            finished: Iterator[RequestRecord] = reversed(list(self._finished))
        return [record for record in finished if tenant is None or record.tenant == tenant][:count]

    def of_session(self, tenant: str, session_id: str | None) -> Iterator[RequestRecord]:
        """Yield a session's finished requests, the latest first, without the requests that never ran."""
        records = self.recent(MAX_RECORDS, tenant)
        return (each for each in records if each.session_id == session_id and each.first_scheduled_time)

    def expected_wait_s(self, num_ahead: int) -> int:
        """Estimate the seconds (1 to 600) until the server has answered `num_ahead` choices, at its recent pace.

        If no request has ended recently, return the age of the oldest running request as a lower bound.
        """
        now = time.monotonic()
        ended = [record for record in self.recent(32) if record.finished_time and now - record.finished_time < PACE_S]
        since = min((record.arrival_time for record in ended or self.running()), default=now)
        num_ended = sum(record.num_choices for record in ended)
        wait_s = (now - since) * (num_ahead / num_ended if num_ended else 1)
        return max(1, min(600, math.ceil(wait_s)))

    def running(self) -> list[RequestRecord]:
        with self._lock:
            return list(self._running.values())

    def of_response(self, response_id: str, tenant: str) -> RequestRecord | None:
        """Return the first record of a finished response; None if it is another tenant's or no longer kept."""
        with self._lock:
            record = self._by_response.get(response_id)
        return record if record is not None and record.tenant == tenant else None

    def totals(self) -> TenantStats:
        """Return the totals of all tenants since the start, including running requests so far."""
        total = TenantStats()
        with self._lock:
            for stats in self._tenants.values():
                for attribute in fields(stats):
                    setattr(total, attribute.name, getattr(total, attribute.name) + getattr(stats, attribute.name))
            for record in self._running.values():
                total.count(record)
        return total

    def tenants(self) -> dict[str, TenantStats]:
        with self._lock:
            return dict(self._tenants)

    def sessions(self, limit: int | None, tenant: str | None = None) -> list[tuple[str, str, SessionStats]]:
        """Return tenant, id and totals of sessions, the last used first. `tenant`: return only its sessions."""
        with self._lock:
            newest_first = list(reversed(self._sessions.items()))
        return [(owner, name, stats) for (owner, name), stats in newest_first if tenant in (None, owner)][:limit]

    def session(self, tenant: str, session_id: str) -> SessionStats | None:
        """Return the totals of a session; None if none of its requests has ended, or if the totals were dropped."""
        with self._lock:
            return self._sessions.get((tenant, session_id))

    def drop_session(self, tenant: str, session_id: str) -> None:
        with self._lock:
            self._sessions.pop((tenant, session_id), None)

    def turns(self) -> dict[str, Totals]:
        """Return the totals of requests by their place in a session: FIRST, LATER or NO_SESSION."""
        with self._lock:
            return dict(self._turns)

"""Metrics in Prometheus' text format, under vLLM's names where vLLM has them.

Counters never go back, even when the cache is reset. Hits are counted in tokens. A request's label `cache` is "hit" if
at least half of the prompt was found. A smaller part is no sign of reuse: most prompts share a template's first tokens.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from foreword import __version__
from foreword.cache import PIN, BlockState, EvictionCause, MissReason
from foreword.engine import BREAKPOINT, RESOURCE, Snapshot, TierReport, TiersReport
from foreword.llm import LLM
from foreword.server.arrival import HttpRequests
from foreword.server.engine_door import Number
from foreword.server.observe.insight import Insight
from foreword.server.records import ListenerHealth, Records, RequestRecord
from foreword.tiers.ticket import Outcome

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
Metric = CounterMetricFamily | GaugeMetricFamily
MOST_METHODS = 32
"""Limit of the methods of linking with their own label, because clients may name any number of methods. Further methods
count as "other"."""


class TierNumber(NamedTuple):
    """A metric with one number for each tier."""

    name: str
    meaning: str
    read: Callable[[TierReport], float]


GAUGES = (
    TierNumber("blocks", "Blocks that can be looked up.", lambda tier: tier.stats.num_blocks),
    TierNumber("bytes", "Physical bytes, those of other processes included.", lambda tier: tier.stats.shared_bytes),
    TierNumber("budget_bytes", "Physical bytes that the tier may take.", lambda tier: tier.stats.budget_bytes),
    TierNumber(
        "seconds_saved",
        "Estimated seconds to compute what was loaded, less the seconds of loads. Falls when loads are in vain.",
        lambda tier: tier.loads.saved_s,
    ),
    TierNumber(
        "breaker_open", "1 while a server that failed is left alone.", lambda tier: tier.stats.breaker != "closed"
    ),
)
COUNTERS = (
    TierNumber("loads", "Loads that ended.", lambda tier: tier.loads.num_loads),
    TierNumber("loaded_tokens", "Tokens by which loads made hits longer.", lambda tier: tier.loads.num_tokens),
    TierNumber("loaded_bytes", "Bytes of loads that made hits longer.", lambda tier: tier.loads.num_bytes),
    TierNumber("load_seconds", "Seconds of loads.", lambda tier: tier.loads.seconds),
    TierNumber("declined", "Prefixes computed because a load is no faster.", lambda tier: tier.loads.num_declined),
    TierNumber("regretted", "Loads that took longer than computing.", lambda tier: tier.loads.num_regretted),
    TierNumber("cancelled", "Loads that were given up.", lambda tier: tier.loads.num_cancelled),
    TierNumber("lookups", "Blocks looked up, for loads and for stores.", lambda tier: tier.stats.num_looked_up),
    TierNumber("found", "Blocks of lookups that were there.", lambda tier: tier.stats.num_found),
    TierNumber("written_bytes", "Physical bytes written.", lambda tier: tier.stats.written_bytes),
)


class OutcomeNumber(NamedTuple):
    """A metric with one number for each tier and outcome."""

    name: str
    meaning: str
    outcomes: tuple[Outcome, ...]
    """Outcomes that are reported even if their count is 0."""
    read: Callable[[TierReport], Mapping[str, int]]


_FAILED = (Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.QUEUE_FULL)
OUTCOMES = (
    OutcomeNumber(
        "load_blocks",
        "Blocks of loads that ended.",
        (Outcome.DONE, Outcome.MISSING, *_FAILED),
        lambda tier: tier.loads.blocks_by_outcome,
    ),
    OutcomeNumber(
        "store_blocks",
        "Blocks written, and blocks dropped instead.",
        (Outcome.DONE, Outcome.NO_ROOM, *_FAILED),
        lambda tier: {"done": tier.stats.num_written, **tier.stats.not_stored},
    ),
)


def mostly_found(record: RequestRecord) -> bool:
    """Say whether at least half of the prompt was found."""
    return 2 * record.num_cached_tokens >= record.num_prompt_tokens


def infos_of(llm: LLM, now: Snapshot) -> dict[str, dict[str, object]]:
    """Return facts about the server and its options, by the name of their metric."""
    model, cache, scheduler = llm.config.model, llm.config.cache, llm.config.scheduler
    return {
        "build_info": {"version": __version__, "python": platform.python_version(), "machine": platform.machine()},
        "config_info": {
            "device": model.device,
            "kv_format": llm.layout.kv_format.name,
            "max_model_len": llm.engine.limits.max_model_len,
            "num_blocks": now.num_blocks,
            "block_size": now.block_size,
            "pool_tokens": llm.layout.tokens_in(now.num_blocks),
            "prefix_caching": cache.enable_prefix_caching,
            "eviction_policy": cache.eviction_policy,
            "scheduling_policy": scheduler.scheduling_policy,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        },
    }


class Scrape(NamedTuple):
    """The inputs of one answer of `/metrics`, except the counts of requests."""

    look: Snapshot
    records: Records
    listeners: Sequence[ListenerHealth]
    kept_bytes: Mapping[str, int]
    numbers: Sequence[Number] = ()


class Metrics(Collector):
    """One server's registry. The engine's thread fills the histograms. All other metrics are computed on demand."""

    def __init__(
        self, model_name: str, insight: Insight, infos: Mapping[str, Mapping[str, object]], calls: HttpRequests
    ) -> None:
        """`infos`: constant facts about the server, by the name of their metric."""
        self._model, self._insight, self._calls = model_name, insight, calls
        self._scrape: Scrape | None = None
        self._outcomes, self._requests = Counter[str](), Counter(hit=0, miss=0)
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._linked, self._recomputed = Counter[str](), Counter[str]()
        """Numbers of tokens by method. Both counters have the same methods."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for name, facts in infos.items():
            labels = {"model_name": model_name, **{fact: str(value) for fact, value in facts.items()}}
            info = Gauge(f"foreword_{name}", "Always 1; the labels say it.", labels, registry=self._registry)
            info.labels(**labels).set(1)
        self._registry.register(self)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> tuple[Histogram, Histogram]:
            """Make a histogram, and return its children for misses and for hits."""
            family = Histogram(name, documentation, ("model_name", "cache"), buckets=buckets, registry=self._registry)
            return family.labels(model_name, "miss"), family.labels(model_name, "hit")

        self._ttft = histogram("foreword_time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._inter_token = histogram("foreword_inter_token_latency_seconds", "Between two tokens.", _INTER_TOKEN)
        self._e2e = histogram("foreword_e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = histogram("foreword_request_queue_time_seconds", "Arrival to first step.", _LATENCY)
        self._prompt = histogram("foreword_request_prompt_tokens", "Length of prompts.", _LENGTH)
        self._answer = histogram("foreword_request_generation_tokens", "Length of answers, of all choices.", _LENGTH)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._outcomes[str(record.outcome)] += 1
        self._num_output_tokens += record.num_output_tokens
        if record.link is not None:
            method = record.link.method
            if method not in self._linked and len(self._linked) >= MOST_METHODS:
                method = "other"
            self._linked[method] += record.link.linked_tokens
            self._recomputed[method] += record.link.recomputed_tokens
        if record.first_scheduled_time is None or record.finished_time is None:
            return
        hit = mostly_found(record)
        self._num_prompt_tokens += record.num_prompt_tokens
        self._requests["hit" if hit else "miss"] += 1
        self._prompt[hit].observe(record.num_prompt_tokens)
        self._answer[hit].observe(record.num_output_tokens)
        self._queue[hit].observe(record.first_scheduled_time - record.arrival_time)
        self._e2e[hit].observe(record.finished_time - record.arrival_time)
        if record.time_to_first_token is not None:
            self._ttft[hit].observe(record.time_to_first_token)
        for before, after in pairwise(record.token_times):
            self._inter_token[hit].observe(after - before)

    def write(self, scrape: Scrape) -> tuple[bytes, str]:
        """Return all metrics as text, and the text's media type."""
        self._scrape = scrape
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._scrape is None:
            return
        look = self._scrape.look
        yield from self._requests_and_queue(look)
        yield from self._prefix_cache(look)
        yield from self._pool(look)
        yield from self._tiers(look.tiers)
        yield from self._tenants_and_sessions(self._scrape.records)
        yield from self._of_listeners(self._scrape)
        family = CounterMetricFamily(
            "foreword_http_requests",
            "Calls, refused ones too. Status 499: the client left before its answer.",
            labels=("model_name", "endpoint", "status"),
        )
        for (endpoint, status), count in self._calls.counts.copy().items():
            family.add_metric((self._model, endpoint, status), count)
        yield family
        for number in self._scrape.numbers:
            make = self._counters if number.is_counter else self._gauges
            yield make(number.name, number.meaning, number.label, number.values)

    def _requests_and_queue(self, look: Snapshot) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that hold blocks.", look.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", look.num_waiting)
        yield self._counter("num_preemptions", "Requests put back because blocks were short.", look.num_preemptions)
        yield self._counters("request_success", "Requests that ended.", "finished_reason", self._outcomes)
        yield self._counter("prompt_tokens", "Tokens of prompts that ran.", self._num_prompt_tokens)
        yield self._counters("linked_tokens", "Prompt tokens copied from a source: no hits.", "method", self._linked)
        yield self._counters(
            "link_recomputed_tokens", "Tokens that could be linked and were computed.", "method", self._recomputed
        )
        yield self._counter("generation_tokens", "Tokens that were generated.", self._num_output_tokens)
        yield self._counter("computed_tokens", "Tokens that went through the model.", look.num_computed_tokens)
        yield self._counters("picture_rows", "Rows of pictures that steps got.", "source", look.picture_rows)
        accepted, rejected = look.drafts.accepted, look.drafts.rejected
        drafted = {source: accepted.get(source, 0) + rejected.get(source, 0) for source in {**accepted, **rejected}}
        yield self._counters("spec_decode_num_draft_tokens", "Tokens that were drafted.", "source", drafted)
        yield self._counters(
            "spec_decode_num_accepted_tokens", "Drafted tokens that became part of answers.", "source", accepted
        )

    def _prefix_cache(self, look: Snapshot) -> Iterator[Metric]:
        totals = look.totals
        for name, meaning in totals.meanings().items():
            counted = getattr(totals, name)
            if isinstance(counted, Mapping):
                reasons = {str(reason): counted[reason] for reason in MissReason}
                yield self._counters(f"prefix_cache_{name}", meaning, "reason", reasons)
            else:
                yield self._counter(f"prefix_cache_{name}", meaning, counted)
        yield self._counter(
            "prefix_cache_computed_tokens", "Prompt tokens that were not found.", totals.queries - totals.hits
        )
        yield self._gauge(
            "prefix_cache_hit_rate",
            "Share of the looked-up tokens that were found since the last reset, 0 to 1.",
            look.stats.hit_rate,
        )
        yield self._counters(
            "prefix_cache_requests",
            "Requests by what was found: a hit is at least half of the prompt.",
            "cache",
            self._requests,
        )
        yield self._counter(
            "prefix_cache_prefill_seconds_saved",
            "Estimate: found tokens, times the mean seconds of a computed one.",
            self._insight.num_saved_seconds,
        )
        evictions = {str(cause): look.evictions[cause] for cause in EvictionCause}
        yield self._counters("prefix_cache_evictions", "Cached blocks that were forgotten.", "cause", evictions)

    def _pool(self, look: Snapshot) -> Iterator[Metric]:
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that requests hold, 0 to 1.", look.usage)
        states = {state.name.lower(): look.num_in_state(state) for state in BlockState}
        yield self._gauges("kv_cache_blocks", "Blocks by state.", "state", states)
        yield self._gauge("kv_cache_tail_blocks", "Cached blocks that are only partly filled.", look.num_tails)
        yield from self._entries(look)

    def _entries(self, look: Snapshot) -> Iterator[Metric]:
        """Yield metrics of the prefixes that are kept on request, by source."""
        sources = sorted({PIN, BREAKPOINT, RESOURCE, *(entry.source for entry in look.entries)})
        of = {source: [entry for entry in look.entries if entry.source == source] for source in sources}
        for name, meaning, values in (
            ("cache_entries", "Prefixes to be kept on request (entries).", {s: len(of[s]) for s in of}),
            (
                "cache_entries_broken",
                "Entries that are not kept whole.",
                {s: sum(not e.is_whole for e in of[s]) for s in of},
            ),
            (
                "cache_entry_tokens",
                "Tokens that entries keep; a token of two entries counts twice.",
                {s: sum(e.num_kept_tokens for e in of[s]) for s in of},
            ),
        ):
            yield self._gauges(name, meaning, "source", values)
        yield self._counter(
            "cache_entry_blocks_broken", "Blocks of entries that running requests took.", look.num_broken_pins
        )

    def _tiers(self, report: TiersReport) -> Iterator[Metric]:
        """Yield metrics of the tiers, if there are tiers."""
        tiers = report.tiers
        if not tiers:
            return
        for number in GAUGES:
            values = {tier.name: number.read(tier) for tier in tiers}
            yield self._gauges(f"tier_{number.name}", number.meaning, "tier", values)
        for number in COUNTERS:
            values = {tier.name: number.read(tier) for tier in tiers}
            yield self._counters(f"tier_{number.name}", number.meaning, "tier", values)
        for by_outcome in OUTCOMES:
            name, labels = f"foreword_tier_{by_outcome.name}", ("model_name", "tier", "outcome")
            family = CounterMetricFamily(name, by_outcome.meaning, labels=labels)
            for tier in tiers:
                zeros = {outcome.name.lower(): 0 for outcome in by_outcome.outcomes}
                for outcome, count in {**zeros, **by_outcome.read(tier)}.items():
                    family.add_metric((self._model, tier.name, outcome), count)
            yield family
        yield self._gauge("tier_store_queue", "Sequences that wait to be stored.", report.num_waiting_stores)
        yield self._counter(
            "tier_dropped_sequences", "Sequences that were to be stored and were not.", report.stores.num_dropped_offers
        )
        yield self._counter("tier_refused_blocks", "Blocks refused by cache_admission.", report.stores.num_not_admitted)
        yield self._gauge("tier_written_bytes_today", "Bytes stored since the day began.", report.bytes_today)

    def _tenants_and_sessions(self, records: Records) -> Iterator[Metric]:
        tenants = records.tenants()
        for name, documentation, counts in (
            ("tenant_requests", "Requests that ran.", {t: stats.requests for t, stats in tenants.items()}),
            ("tenant_queried_tokens", "Prompt tokens.", {t: stats.queried_tokens for t, stats in tenants.items()}),
            ("tenant_hit_tokens", "Prompt tokens found.", {t: stats.hit_tokens for t, stats in tenants.items()}),
        ):
            yield self._counters(name, documentation, "tenant", counts)
        for name, documentation in (
            ("requests", "Requests that ran, by their place in their session."),
            ("queried_tokens", "Prompt tokens of these."),
            ("hit_tokens", "Prompt tokens found of these."),
        ):
            of_turns = {turn: getattr(stats, name) for turn, stats in records.turns().items()}
            yield self._counters(f"session_{name}", documentation, "turn", of_turns)

    def _of_listeners(self, scrape: Scrape) -> Iterator[Metric]:
        """Yield the health of the listeners to requests (records, traces, these metrics), and bytes of kept data."""
        failures = {listener.name: listener.num_failures for listener in scrape.listeners}
        yield self._counters("listener_failures", "Failed attempts of a listener.", "listener", failures)
        lost = {listener.name: listener.num_lost for listener in scrape.listeners}
        yield self._counters("listener_lost_requests", "Requests that a listener missed.", "listener", lost)
        failing = {listener.name: listener.failure is not None for listener in scrape.listeners}
        yield self._gauges("listener_failing", "1 where a listener's last attempt failed.", "listener", failing)
        yield self._gauges("kept_bytes", "Memory of what requests leave behind, roughly.", "what", scrape.kept_bytes)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        return self._add(GaugeMetricFamily(f"foreword_{name}", documentation, labels=("model_name",)), {None: value})

    def _gauges(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._add(GaugeMetricFamily(f"foreword_{name}", documentation, labels=("model_name", label)), values)

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        return self._add(CounterMetricFamily(f"foreword_{name}", documentation, labels=("model_name",)), {None: value})

    def _counters(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._add(CounterMetricFamily(f"foreword_{name}", documentation, labels=("model_name", label)), values)

    def _add(self, family: Metric, values: Mapping[Any, float]) -> Metric:
        """Add values by label. The key None stands for a value without a label."""
        for label, value in dict(values).items():
            family.add_metric((self._model,) if label is None else (self._model, label), value)
        return family

"""Metrics in Prometheus' text format. Metrics that vLLM has too have vLLM's names.

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
from foreword.server.engine_thread import Number
from foreword.server.observe.insight import Insight
from foreword.server.records import ListenerHealth, Records, RequestRecord
from foreword.tiers.ticket import Outcome

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_OF_SESSIONS = (
    "Requests that ran, by their place in their session.",
    "Prompt tokens of these.",
    "Prompt tokens found of these.",
)
Metric = CounterMetricFamily | GaugeMetricFamily
Labels = str | tuple[str, ...]
Values = float | Mapping[Any, float]
"""One number without a label, or numbers by the texts of their labels (`Labels`)."""
MOST_METHODS = 32
"""Limit of the linking methods that get a label. Clients may name any number of methods, so further methods count as
"other"."""


TierNumber = tuple[str, str, Callable[[TierReport], float]]
"""Name and meaning of a metric with one number for each tier, and the function that reads the number."""
GAUGES: tuple[TierNumber, ...] = (
    ("blocks", "Blocks that can be looked up.", lambda tier: tier.stats.num_blocks),
    ("bytes", "Physical bytes, those of other processes included.", lambda tier: tier.stats.shared_bytes),
    ("budget_bytes", "Physical bytes that the tier may take.", lambda tier: tier.stats.budget_bytes),
    (
        "seconds_saved",
        "Estimated seconds to compute what was loaded, less the seconds of loads. Falls when loads are in vain.",
        lambda tier: tier.loads.saved_s,
    ),
    ("breaker_open", "1 while a server that failed is left alone.", lambda tier: tier.stats.breaker != "closed"),
)
COUNTERS: tuple[TierNumber, ...] = (
    ("loads", "Loads that ended.", lambda tier: tier.loads.num_loads),
    ("loaded_tokens", "Tokens by which loads made hits longer.", lambda tier: tier.loads.num_tokens),
    ("loaded_bytes", "Bytes of loads that made hits longer.", lambda tier: tier.loads.num_bytes),
    ("load_seconds", "Seconds of loads.", lambda tier: tier.loads.seconds),
    ("declined", "Prefixes computed because a load is no faster.", lambda tier: tier.loads.num_declined),
    ("regretted", "Loads that took longer than computing.", lambda tier: tier.loads.num_regretted),
    ("cancelled", "Loads that were given up.", lambda tier: tier.loads.num_cancelled),
    ("lookups", "Blocks looked up, for loads and for stores.", lambda tier: tier.stats.num_looked_up),
    ("found", "Blocks of lookups that were there.", lambda tier: tier.stats.num_found),
    ("written_bytes", "Physical bytes written.", lambda tier: tier.stats.written_bytes),
)
_FAILED = (Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.QUEUE_FULL)


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
        meaning = "Calls, refused ones too. Status 499: the client left before its answer."
        yield self._counter("http_requests", meaning, self._calls.counts, ("endpoint", "status"))
        for number in self._scrape.numbers:
            make = self._counter if number.is_counter else self._gauge
            yield make(number.name, number.meaning, number.values, number.label)

    def _requests_and_queue(self, look: Snapshot) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that hold blocks.", look.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", look.num_waiting)
        yield self._counter("num_preemptions", "Requests put back because blocks were short.", look.num_preemptions)
        yield self._counter("request_success", "Requests that ended.", self._outcomes, "finished_reason")
        yield self._counter("prompt_tokens", "Tokens of prompts that ran.", self._num_prompt_tokens)
        yield self._counter("linked_tokens", "Prompt tokens copied from a source: no hits.", self._linked, "method")
        meaning = "Tokens that could be linked and were computed."
        yield self._counter("link_recomputed_tokens", meaning, self._recomputed, "method")
        yield self._counter("generation_tokens", "Tokens that were generated.", self._num_output_tokens)
        yield self._counter("computed_tokens", "Tokens that went through the model.", look.num_computed_tokens)
        yield self._counter("picture_rows", "Rows of pictures that steps got.", look.picture_rows, "source")
        yield self._counter(
            "spec_decode_num_draft_tokens", "Tokens that were drafted.", look.drafts.by_source(), "source"
        )
        meaning = "Drafted tokens that became part of answers."
        yield self._counter("spec_decode_num_accepted_tokens", meaning, look.drafts.accepted, "source")

    def _prefix_cache(self, look: Snapshot) -> Iterator[Metric]:
        totals = look.totals
        for name, meaning in totals.meanings().items():
            counted = getattr(totals, name)
            if isinstance(counted, Mapping):
                reasons = {str(reason): counted[reason] for reason in MissReason}
                yield self._counter(f"prefix_cache_{name}", meaning, reasons, "reason")
            else:
                yield self._counter(f"prefix_cache_{name}", meaning, counted)
        num_computed = totals.queries - totals.hits
        yield self._counter("prefix_cache_computed_tokens", "Prompt tokens that were not found.", num_computed)
        meaning = "Share of the looked-up tokens that were found since the last reset, 0 to 1."
        yield self._gauge("prefix_cache_hit_rate", meaning, look.stats.hit_rate)
        meaning = "Requests by what was found: a hit is at least half of the prompt."
        yield self._counter("prefix_cache_requests", meaning, self._requests, "cache")
        meaning = "Estimate: found tokens, times the mean seconds of a computed one."
        yield self._counter("prefix_cache_prefill_seconds_saved", meaning, self._insight.num_saved_seconds)
        evictions = {str(cause): look.evictions[cause] for cause in EvictionCause}
        yield self._counter("prefix_cache_evictions", "Cached blocks that were forgotten.", evictions, "cause")

    def _pool(self, look: Snapshot) -> Iterator[Metric]:
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that requests hold, 0 to 1.", look.usage)
        states = {state.name.lower(): look.num_in_state(state) for state in BlockState}
        yield self._gauge("kv_cache_blocks", "Blocks by state.", states, "state")
        yield self._gauge("kv_cache_tail_blocks", "Cached blocks that are only partly filled.", look.num_tails)
        num_entries = Counter({PIN: 0, BREAKPOINT: 0, RESOURCE: 0})
        num_broken, num_kept_tokens = num_entries.copy(), num_entries.copy()
        for entry in look.entries:
            num_entries[entry.source] += 1
            num_broken[entry.source] += not entry.is_whole
            num_kept_tokens[entry.source] += entry.num_kept_tokens
        yield self._gauge("cache_entries", "Prefixes to be kept on request (entries).", num_entries, "source")
        yield self._gauge("cache_entries_broken", "Entries that are not kept whole.", num_broken, "source")
        meaning = "Tokens that entries keep; a token of two entries counts twice."
        yield self._gauge("cache_entry_tokens", meaning, num_kept_tokens, "source")
        meaning = "Blocks of entries that running requests took."
        yield self._counter("cache_entry_blocks_broken", meaning, look.num_broken_pins)

    def _tiers(self, report: TiersReport) -> Iterator[Metric]:
        tiers = report.tiers
        if not tiers:
            return
        for make, numbers in ((self._gauge, GAUGES), (self._counter, COUNTERS)):
            for name, meaning, read in numbers:
                yield make(f"tier_{name}", meaning, {tier.name: read(tier) for tier in tiers}, "tier")
        loaded, stored = {}, {}
        for tier in tiers:
            written = {"done": tier.stats.num_written, **tier.stats.not_stored}
            loaded.update(_by_outcome(tier, (Outcome.DONE, Outcome.MISSING), tier.loads.blocks_by_outcome))
            stored.update(_by_outcome(tier, (Outcome.DONE, Outcome.NO_ROOM), written))
        yield self._counter("tier_load_blocks", "Blocks of loads that ended.", loaded, ("tier", "outcome"))
        meaning = "Blocks written, and blocks dropped instead."
        yield self._counter("tier_store_blocks", meaning, stored, ("tier", "outcome"))
        yield self._gauge("tier_store_queue", "Sequences that wait to be stored.", report.num_waiting_stores)
        meaning = "Sequences that were to be stored and were not."
        yield self._counter("tier_dropped_sequences", meaning, report.stores.num_dropped_offers)
        yield self._counter("tier_refused_blocks", "Blocks refused by cache_admission.", report.stores.num_not_admitted)
        yield self._gauge("tier_written_bytes_today", "Bytes stored since the day began.", report.bytes_today)

    def _tenants_and_sessions(self, records: Records) -> Iterator[Metric]:
        for group, label, totals, meanings in (
            ("tenant", "tenant", records.tenants(), ("Requests that ran.", "Prompt tokens.", "Prompt tokens found.")),
            ("session", "turn", records.turns(), _OF_SESSIONS),
        ):
            for name, meaning in zip(("requests", "queried_tokens", "hit_tokens"), meanings, strict=True):
                values = {key: getattr(stats, name) for key, stats in totals.items()}
                yield self._counter(f"{group}_{name}", meaning, values, label)

    def _of_listeners(self, scrape: Scrape) -> Iterator[Metric]:
        """Yield the health of each listener to closed records (such as traces), and the bytes of kept data by kind."""
        failures = {listener.name: listener.num_failures for listener in scrape.listeners}
        yield self._counter("listener_failures", "Failed attempts of a listener.", failures, "listener")
        lost = {listener.name: listener.num_lost for listener in scrape.listeners}
        yield self._counter("listener_lost_requests", "Requests that a listener missed.", lost, "listener")
        failing = {listener.name: listener.failure is not None for listener in scrape.listeners}
        yield self._gauge("listener_failing", "1 where a listener's last attempt failed.", failing, "listener")
        yield self._gauge("kept_bytes", "Memory of what requests leave behind, roughly.", scrape.kept_bytes, "what")

    def _gauge(self, name: str, meaning: str, values: Values, labels: Labels = ()) -> Metric:
        return self._filled(GaugeMetricFamily, name, meaning, values, labels)

    def _counter(self, name: str, meaning: str, values: Values, labels: Labels = ()) -> Metric:
        return self._filled(CounterMetricFamily, name, meaning, values, labels)

    def _filled(self, kind: type[Metric], name: str, meaning: str, values: Values, labels: Labels) -> Metric:
        family = kind(f"foreword_{name}", meaning, labels=("model_name", *_texts(labels)))
        by_label = dict(values) if isinstance(values, Mapping) else {(): values}
        for of, value in by_label.items():
            family.add_metric((self._model, *_texts(of)), value)
        return family


def _texts(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


def _by_outcome(
    tier: TierReport, outcomes: tuple[Outcome, ...], counts: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Return a tier's counts, by tier and outcome. Each of `outcomes` and each failure has a count, which may be 0."""
    zeros = {outcome.name.lower(): 0 for outcome in (*outcomes, *_FAILED)}
    return {(tier.name, outcome): count for outcome, count in {**zeros, **counts}.items()}

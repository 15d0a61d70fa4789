"""Log lines of a server: at its start and stop, about its traffic, and, on demand, one for each request.

A failure here is logged and affects nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from foreword.cache import BlockState
from foreword.config import EngineConfig
from foreword.config.sizes import format_bytes
from foreword.engine import Snapshot
from foreword.llm import LLM
from foreword.model.checkpoint.generation import differences
from foreword.server.access.operators import is_loopback
from foreword.server.observe.insight import Insight
from foreword.server.options import ServerConfig
from foreword.server.records import ListenerHealth, Records, RequestRecord, TenantStats

logger = logging.getLogger(__name__)


def log_model(llm: LLM, model_name: str) -> None:
    """Log the model, its precision, its layers by kind, and the longest request."""
    options, layout, engine = llm.config, llm.layout, llm.engine
    dtype, kv_format, kinds = llm.dtype, layout.kv_format.name, layout.layers_by_kind()
    longest = engine.limits.max_model_len
    logger.info(
        "model %s from %s: %s on %s; layers: %s; requests of up to %s tokens",
        model_name,
        options.model.model,
        dtype,
        options.model.device,
        ", ".join(f"{number} {kind}" for kind, number in kinds.items()),
        f"{longest:,}",
        extra={
            "fields": {
                "event": "model",
                "model": model_name,
                "path": options.model.model,
                "dtype": dtype,
                "device": options.model.device,
                "layers": kinds,
                "max_model_len": longest,
            }
        },
    )
    sampling = differences(llm.get_default_sampling_params())
    if sampling:
        logger.info(
            "requests that do not say otherwise sample by %s, as generation_config.json says; "
            "--generation-config none ends that",
            ", ".join(f"{name}={value:g}" for name, value in sampling.items()),
            extra={"fields": {"event": "sampling", **sampling}},
        )
    num_blocks, block_size = engine.snapshot().num_blocks, layout.block_size
    num_bytes, num_tokens = num_blocks * llm.kv_block_bytes, layout.tokens_in(num_blocks)
    caching = f"prefix caching with the policy {options.cache.eviction_policy}"
    logger.info(
        "pool: %s blocks of %d tokens of %s in %s, for %s tokens of text; it may grow to %s; %s",
        f"{num_blocks:,}",
        block_size,
        "all layers" if len(layout.groups) == 1 else f"one of {len(layout.groups)} groups of layers",
        kv_format,
        f"{num_tokens:,}",
        format_bytes(num_bytes),
        caching if options.cache.enable_prefix_caching else "no prefix caching",
        extra={
            "fields": {
                "event": "pool",
                "blocks": num_blocks,
                "block_tokens": block_size,
                "kv_format": kv_format,
                "tokens": num_tokens,
                "groups": len(layout.groups),
                "bytes": num_bytes,
                "prefix_caching": options.cache.enable_prefix_caching,
                "eviction_policy": options.cache.eviction_policy,
            }
        },
    )


def log_addresses(url: str, options: EngineConfig, config: ServerConfig) -> None:
    """Log where the server listens, and which options its operator may want to change."""
    dashboard = f"{url}/dashboard" if config.dashboard else None
    logger.info(
        "API at %s/v1, %s, metrics at %s/metrics",
        url,
        f"dashboard at {dashboard}" if dashboard else "no dashboard",
        url,
        extra={"fields": {"event": "listening", "url": url, "dashboard": dashboard}},
    )
    for advice in _advice(options, config):
        logger.info("to change: %s", advice, extra={"fields": {"event": "advice"}})
    if config.api_key is None and config.keys_file is None and not is_loopback(config.host):
        logger.warning(
            "whoever reaches %s may use this server, because it asks for no key; set --api-key or --keys-file", url
        )


def log_stopping(num_choices: int, timeout_s: float) -> None:
    """Log how many answers the server still finishes after a signal."""
    logger.info(
        "stopping: %d answers are finished first, within %g s",
        num_choices,
        timeout_s,
        extra={"fields": {"event": "stopping", "answers": num_choices, "timeout_s": timeout_s}},
    )


def _advice(options: EngineConfig, config: ServerConfig) -> list[str]:
    found = []
    if options.model.kv_cache_memory_bytes is None and options.cache.num_gpu_blocks_override is None:
        found.append(
            "--kv-cache-memory-bytes sets the pool's memory, such as 4GB; so far it was taken from free memory"
        )
    if options.model.max_model_len is None:
        found.append("--max-model-len limits the tokens of a request, --max-num-seqs the requests that run together")
    if is_loopback(config.host):
        found.append("--host 0.0.0.0 lets other machines in, --api-key or --keys-file says who")
    return found


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of the requests between two moments."""

    seconds: float
    ended: int
    """Requests that ended."""
    failed: int
    """Ended requests that were refused, failed, or timed out."""
    prompt_tokens: int
    """Prompt tokens of requests that began to run."""
    computed_tokens: int
    """Tokens that went through the model, those of requests that still run too."""
    hit_tokens: int
    generated_tokens: int

    @classmethod
    def between(cls, before: TenantStats, after: TenantStats, seconds: float, computed_tokens: int) -> Traffic:
        """The difference of two totals, and the tokens computed meanwhile."""
        outcomes = after.outcomes - before.outcomes
        return cls(
            seconds,
            outcomes.total(),
            sum(outcomes[name] for name in ("refused", "failed", "timeout")),
            after.queried_tokens - before.queried_tokens,
            computed_tokens,
            after.hit_tokens - before.hit_tokens,
            after.output_tokens - before.output_tokens,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found; None without prompts."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


class TrafficLog:
    """Logs a line every `interval_s` seconds while there is traffic. Belongs to the event loop."""

    def __init__(self, insight: Insight, records: Records, interval_s: float) -> None:
        self._insight = insight
        self._records = records
        self._interval_s = interval_s
        self._health = ListenerHealth("traffic_log")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, unless the interval is 0."""
        if self._interval_s:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        before, then, computed = self._records.totals(), time.monotonic(), 0
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                after, now = self._records.totals(), time.monotonic()
                if after != before or self._records.running():
                    look = await self._insight.look()
                    new, computed = max(0, look.num_computed_tokens - computed), look.num_computed_tokens
                    _log_traffic(Traffic.between(before, after, now - then, new), look)
                before, then = after, now
            except Exception as error:
                self._health.failed(error)
            else:
                self._health.worked()


def _log_traffic(traffic: Traffic, look: Snapshot) -> None:
    prompt_rate = traffic.prompt_tokens / traffic.seconds
    computed_rate = traffic.computed_tokens / traffic.seconds
    generation_rate = traffic.generated_tokens / traffic.seconds
    cached = look.num_in_state(BlockState.CACHED) / look.num_blocks
    hit_rate = "no prompts" if traffic.hit_rate is None else f"hit rate {traffic.hit_rate:.1%}"
    fields = {
        "event": "traffic",
        "seconds": round(traffic.seconds, 3),
        "requests_ended": traffic.ended,
        "requests_failed": traffic.failed,
        "requests_running": look.num_running,
        "requests_waiting": look.num_waiting,
        "prompt_tokens_per_s": round(prompt_rate, 1),
        "computed_tokens_per_s": round(computed_rate, 1),
        "generated_tokens_per_s": round(generation_rate, 1),
        "hit_rate": None if traffic.hit_rate is None else round(traffic.hit_rate, 4),
        "hit_rate_of_1000_requests": round(look.recent_hit_rate, 4),
        "pool_in_use": round(look.usage, 4),
        "pool_cached": round(cached, 4),
        "preemptions": look.num_preemptions,
    }
    logger.info(
        "%d requests ended%s, %d running, %d waiting; tokens/s: %.1f of prompts, %.1f computed, %.1f generated; "
        "%s "
        "(%.1f%% of the last 1,000 requests); pool: %.1f%% in use, %.1f%% cached",
        traffic.ended,
        f" ({traffic.failed} failed)" if traffic.failed else "",
        look.num_running,
        look.num_waiting,
        prompt_rate,
        computed_rate,
        generation_rate,
        hit_rate,
        100 * look.recent_hit_rate,
        100 * look.usage,
        100 * cached,
        extra={"fields": fields},
    )


def log_request(record: RequestRecord) -> None:
    """Log a line about a request that has ended. Called on the engine's thread."""
    first_ms = _ms(record.time_to_first_token)
    total_ms = None if record.finished_time is None else _ms(record.finished_time - record.arrival_time)
    reason = record.explanation.reason if record.explanation is not None else None
    fields: dict[str, Any] = {
        "event": "request",
        "request_id": record.request_id,
        "tenant": record.tenant,
        "endpoint": record.endpoint,
        "outcome": record.outcome,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "link": record.link_method,
        "linked_tokens": 0 if record.link is None else record.link.linked_tokens,
        "missed_because": None if reason is None else str(reason),
        "generated_tokens": record.num_output_tokens,
        "choices": record.num_choices,
        "first_token_ms": first_ms,
        "total_ms": total_ms,
    }
    logger.info(
        "request %s of %s to %s: %s; %d prompt tokens, %d of them cached%s%s; %d generated; first after %s ms, "
        "all after %s ms",
        record.request_id,
        record.tenant,
        record.endpoint,
        record.outcome,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        f" ({reason})" if reason is not None else "",
        "" if record.link is None else f", {record.link.linked_tokens} linked by {record.link.method}",
        record.num_output_tokens,
        "-" if first_ms is None else first_ms,
        "-" if total_ms is None else total_ms,
        extra={"fields": fields},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)

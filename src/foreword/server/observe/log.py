"""Log lines of a server: at its start and stop, about its traffic, and, if the operator asks, for each request.

A failure here is logged and affects nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
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


def log_event(event: str, text: str, **fields: Any) -> None:
    """Log a line. People read `text`, a format string that is filled with `fields`. Programs read the fields."""
    line = text.format(**fields)
    logger.info("%s", line, extra={"fields": {"event": event, **fields}})


def log_model(llm: LLM, model_name: str) -> None:
    """Log the model, its precision, its layers by kind, and the most tokens that a request may have."""
    options, layout, engine = llm.config, llm.layout, llm.engine
    kinds = layout.layers_by_kind()
    log_event(
        "model",
        "model {model} from {path}: {dtype} on {device}; layers: "
        + ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        + "; requests of up to {max_model_len:,} tokens",
        model=model_name,
        path=options.model.model,
        dtype=llm.dtype,
        device=options.model.device,
        layers=kinds,
        max_model_len=engine.limits.max_model_len,
    )
    sampling = differences(llm.get_default_sampling_params())
    if sampling:
        settings = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
        log_event(
            "sampling",
            f"requests that do not say otherwise sample by {settings}, as generation_config.json says; "
            "--generation-config none ends that",
            **sampling,
        )
    num_blocks, num_groups = engine.snapshot().num_blocks, len(layout.groups)
    num_bytes, has_cache = num_blocks * llm.kv_block_bytes, options.cache.enable_prefix_caching
    log_event(
        "pool",
        "pool: {blocks:,} blocks of {block_tokens} tokens of "
        + ("all layers" if num_groups == 1 else f"one of {num_groups} groups of layers")
        + " in {kv_format}, for {tokens:,} tokens of text; it may grow to "
        + f"{format_bytes(num_bytes)}; "
        + ("prefix caching with the policy {eviction_policy}" if has_cache else "no prefix caching"),
        blocks=num_blocks,
        block_tokens=layout.block_size,
        kv_format=layout.kv_format.name,
        tokens=layout.tokens_in(num_blocks),
        groups=num_groups,
        bytes=num_bytes,
        prefix_caching=has_cache,
        eviction_policy=options.cache.eviction_policy,
    )


def log_addresses(url: str, options: EngineConfig, config: ServerConfig) -> None:
    """Log the server's addresses, and the options that its operator may want to change."""
    dashboard = f"{url}/dashboard" if config.dashboard else None
    where = "dashboard at {dashboard}" if dashboard else "no dashboard"
    log_event("listening", f"API at {{url}}/v1, {where}, metrics at {{url}}/metrics", url=url, dashboard=dashboard)
    for advice in _advice(options, config):
        log_event("advice", f"to change: {advice}")
    has_keys = config.api_key is not None or config.keys_file is not None
    has_tier = options.tiers.cache_dir is not None or options.tiers.cache_store is not None
    if has_keys and has_tier and config.server_secret is None:
        logger.warning(
            "a restart will not find what is stored now, because the secret of tenants' prefixes is "
            "new at each start; set FOREWORD_SERVER_SECRET, and keep it"
        )
    if not has_keys and not is_loopback(config.host):
        logger.warning(
            "whoever reaches %s may use this server, because it asks for no key; set --api-key or --keys-file", url
        )


def _advice(options: EngineConfig, config: ServerConfig) -> list[str]:
    advice = []
    if options.model.kv_cache_memory_bytes is None and options.cache.num_gpu_blocks_override is None:
        advice.append(
            "--kv-cache-memory-bytes sets the pool's memory, such as 4GB; so far it was taken from free memory"
        )
    if options.model.max_model_len is None:
        advice.append("--max-model-len limits the tokens of a request, --max-num-seqs the requests that run together")
    if is_loopback(config.host):
        advice.append("--host 0.0.0.0 lets other machines in, --api-key or --keys-file says who")
    return advice


class TrafficLog:
    """Logs a line every `interval_s` seconds while there is traffic. Only the event loop may use it."""

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
                    _log_traffic(after.since(before), now - then, new, look)
                before, then = after, now
            except Exception as error:
                self._health.failed(error)
            else:
                self._health.worked()


def _log_traffic(new: TenantStats, seconds: float, num_computed_tokens: int, look: Snapshot) -> None:
    """Log the traffic of the last `seconds`. Computed tokens include the tokens of requests that still run."""
    failed = sum(new.outcomes[name] for name in ("refused", "failed", "timeout"))
    log_event(
        "traffic",
        "{requests_ended} requests ended"
        + (" ({requests_failed} failed)" if failed else "")
        + ", {requests_running} running, {requests_waiting} waiting; tokens/s: {prompt_tokens_per_s} of prompts, "
        "{computed_tokens_per_s} computed, {generated_tokens_per_s} generated; "
        + ("hit rate {hit_rate:.1%}" if new.queried_tokens else "no prompts")
        + " ({hit_rate_of_1000_requests:.1%} of the last 1,000 requests); pool: {pool_in_use:.1%} in use, "
        "{pool_cached:.1%} cached",
        seconds=round(seconds, 3),
        requests_ended=new.outcomes.total(),
        requests_failed=failed,
        requests_running=look.num_running,
        requests_waiting=look.num_waiting,
        prompt_tokens_per_s=round(new.queried_tokens / seconds, 1),
        computed_tokens_per_s=round(num_computed_tokens / seconds, 1),
        generated_tokens_per_s=round(new.output_tokens / seconds, 1),
        hit_rate=round(new.hit_rate, 4) if new.queried_tokens else None,
        hit_rate_of_1000_requests=round(look.recent_hit_rate, 4),
        pool_in_use=round(look.usage, 4),
        pool_cached=round(look.num_in_state(BlockState.CACHED) / look.num_blocks, 4),
        preemptions=look.num_preemptions,
    )


def log_request(record: RequestRecord) -> None:
    """Log a line about a request that has ended. Called on the engine's thread."""
    first_ms, total_ms = _ms(record.time_to_first_token), _ms(record.finished_time, record.arrival_time)
    reason = record.explanation.reason if record.explanation is not None else None
    log_event(
        "request",
        "request {request_id} of {tenant} to {endpoint}: {outcome}; {prompt_tokens} prompt tokens, {cached_tokens} of "
        "them cached"
        + (" ({missed_because})" if reason is not None else "")
        + (", {linked_tokens} linked by {link}" if record.link is not None else "")
        + "; {generated_tokens} generated; first after "
        + f"{'-' if first_ms is None else first_ms} ms, all after {'-' if total_ms is None else total_ms} ms",
        request_id=record.request_id,
        tenant=record.tenant,
        endpoint=record.endpoint,
        outcome=record.outcome,
        prompt_tokens=record.num_prompt_tokens,
        cached_tokens=record.num_cached_tokens,
        link=record.link_method,
        linked_tokens=0 if record.link is None else record.link.linked_tokens,
        missed_because=None if reason is None else str(reason),
        generated_tokens=record.num_output_tokens,
        choices=record.num_choices,
        first_token_ms=first_ms,
        total_ms=total_ms,
    )


def _ms(seconds: float | None, since: float = 0.0) -> float | None:
    return None if seconds is None else round(1000 * (seconds - since), 1)

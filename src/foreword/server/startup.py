"""Log lines when the server starts (model, pool, addresses, advice) and when it stops.

Knows an LLM's configuration and layout, and the server's options.
"""

from __future__ import annotations

import logging

from foreword.config import EngineConfig
from foreword.config.sizes import format_bytes
from foreword.llm import LLM
from foreword.model.checkpoint.generation import differences
from foreword.server.access.operators import is_loopback
from foreword.server.options import ServerConfig

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

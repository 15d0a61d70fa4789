"""Keywords of `LLM(...)`, spelt out so that editors complete them and mypy checks them.

foreword.config has the meanings and defaults, and a test compares the two.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TypedDict

from foreword.config.engine import (
    AdmissionName,
    DraftTokens,
    Dtype,
    EncodingName,
    EvictionName,
    HashesName,
    HashName,
    IndexName,
    KernelName,
    KVCacheDtype,
    Policy,
    WeightArithmetic,
    engine_options,
)


class ModelKeywords(TypedDict, total=False):
    """Fields of `foreword.config.engine.ModelConfig`."""

    revision: str | None
    tokenizer: str | None
    tokenizer_revision: str | None
    chat_template: str | None
    chat_control_tokens: bool
    response_template: str | None
    generation_config: str
    dtype: Dtype
    kv_cache_dtype: KVCacheDtype
    weight_arithmetic: WeightArithmetic
    device: str
    max_model_len: int | None
    kv_cache_memory_bytes: int | str | None
    """A number of bytes, or a text such as "4GB"."""
    gpu_memory_utilization: float | None
    attention_kernel: KernelName
    exact: bool
    cuda_graphs: bool
    allow_links: bool
    trust_remote_code: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_pictures: int
    max_picture_tokens: int
    enable_prompt_embeds: bool
    picture_cache_bytes: int | str
    """A number of bytes, or a text such as "1GB"."""
    self_check: bool


class CacheKeywords(TypedDict, total=False):
    """Fields of `foreword.config.engine.CacheConfig`."""

    block_size: int
    enable_prefix_caching: bool
    prefix_index: IndexName
    eviction_policy: EvictionName
    num_gpu_blocks_override: int | None
    keep_all_kv: bool
    sink_token_ids: Sequence[int]
    state_block_size: int | None
    state_interval: int | None
    deduplicate: bool
    explain_misses: bool
    cache_events: bool
    max_pinned_share: float
    max_pinned_share_per_tenant: float
    hash_function: HashName
    key_salt: str
    cache_exact: bool


class TierKeywords(TypedDict, total=False):
    """Fields of `foreword.config.engine.TierConfig`."""

    cache_host_bytes: int | str | None
    cache_dir: str | os.PathLike[str] | None
    cache_disk_bytes: int | str | None
    cache_key_file: str | os.PathLike[str] | None
    cache_store: str | None
    cache_store_ttl_s: float
    cache_store_key_file: str | os.PathLike[str] | None
    cache_daily_write_bytes: int | str | None
    cache_admission: AdmissionName


class SchedulerKeywords(TypedDict, total=False):
    """Fields of `foreword.config.engine.SchedulerConfig`."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    max_num_seqs: int
    max_num_encoder_input_tokens: int
    scheduling_policy: Policy
    max_overtake_s: float
    coalesce_in_flight: bool
    draft_tokens: DraftTokens


class EventsKeywords(TypedDict, total=False):
    """Fields of `foreword.config.engine.EventsConfig`."""

    kv_events: str | None
    kv_events_replay: str | None
    kv_events_snapshot: str | None
    kv_events_encoding: EncodingName
    kv_events_hashes: HashesName
    kv_events_topic: str


class EngineKeywords(ModelKeywords, CacheKeywords, TierKeywords, SchedulerKeywords, EventsKeywords, total=False):
    """All keywords of an engine."""

    seed: int


def signature() -> inspect.Signature:
    """The signature of `LLM(...)` that help() and notebooks show: all options with their defaults."""
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)]
    for option in engine_options().values():
        if option.name != "model":
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(option.name, kind, default=option.default, annotation=option.kind))
    return inspect.Signature(parameters)

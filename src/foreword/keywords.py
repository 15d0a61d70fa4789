"""Keywords of `LLM(...)` and `LLM.chat(...)`, spelt out so that editors complete them and mypy checks them.

Knows names and types alone; meanings and defaults of an engine's are in foreword.config, and a test keeps the two
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from foreword.config import Dtype, EvictionName, HashName, IndexName, KernelName, Policy
from foreword.errors import InvalidRequestError


class ModelKeywords(TypedDict, total=False):
    """Fields of `foreword.config.ModelConfig`."""

    revision: str | None
    tokenizer: str | None
    tokenizer_revision: str | None
    chat_template: str | None
    dtype: Dtype
    device: str
    max_model_len: int | None
    kv_cache_memory_bytes: int | str | None
    """Such as "4GB"."""
    gpu_memory_utilization: float | None
    attention_kernel: KernelName
    exact: bool
    cuda_graphs: bool
    trust_remote_code: bool
    self_check: bool


class CacheKeywords(TypedDict, total=False):
    """Fields of `foreword.config.CacheConfig`."""

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
    hash_function: HashName
    key_salt: str


class SchedulerKeywords(TypedDict, total=False):
    """Fields of `foreword.config.SchedulerConfig`."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    max_num_seqs: int
    scheduling_policy: Policy
    coalesce_in_flight: bool


class EngineKeywords(ModelKeywords, CacheKeywords, SchedulerKeywords, total=False):
    """All of them."""

    seed: int


class ChatKeywords(TypedDict, total=False):
    """How a conversation is laid out."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions in OpenAI's form."""
    chat_template: str | None
    """Jinja template in place of the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] | None
    """What else the template may use."""
    add_generation_prompt: bool
    """Whether the prompt ends where an answer begins (the default), or after the last message."""
    continue_final_message: bool
    """Have the model go on with the last message, instead of beginning one."""


def template_inputs(rendering: ChatKeywords) -> dict[str, Any]:
    """What a chat template is given besides the messages. Raises InvalidRequestError for unknown or wrong keywords."""
    unknown = sorted(set(rendering) - set(ChatKeywords.__annotations__))
    if unknown:
        raise InvalidRequestError(
            f"unknown argument {unknown[0]!r}; known are {', '.join(ChatKeywords.__annotations__)}"
        )
    inputs, tools = rendering.get("chat_template_kwargs") or {}, rendering.get("tools")
    if not isinstance(inputs, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs={inputs!r:.60} is no mapping; use such as {{'name': value}}")
    if not tools:
        return dict(inputs)
    if isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError(f"tools={tools!r:.60} is no list of tools in OpenAI's form")
    return {**inputs, "tools": [dict(tool) for tool in tools]}

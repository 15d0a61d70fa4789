"""vLLM's options that foreword does not have, so that a command or a script written for vLLM runs as it is.

Values that change nothing here are accepted. All other values are refused by name, with what to do instead. An option
of the same name in `foreword.config.engine` or `foreword.server.options` takes precedence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Renamed:
    """An option that foreword has under another name."""

    name: str
    """Our name."""
    convert: Callable[[Any], Any] | None = None
    """Converts a value of vLLM's option to a value of ours; None: both have the same values."""


def _is_on(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} has the wrong type; use True or False")
    return value


RENAMED: Mapping[str, Renamed] = {
    "prefix_caching_hash_algo": Renamed("hash_function"),
    "enforce_eager": Renamed("cuda_graphs", lambda value: not _is_on(value)),
    "enable_log_requests": Renamed("log_requests", _is_on),
    "disable_log_stats": Renamed("log_interval_s", lambda value: 0.0 if _is_on(value) else None),
}
"""Renamed options by vLLM's names."""


@dataclass(frozen=True, slots=True)
class VllmOption:
    """An option that foreword does not have."""

    harmless: tuple[Any, ...] | Callable[[Any], bool] | None
    """Values that change nothing, or a function that says whether a value does; None: all values change nothing."""
    remedy: str = ""
    """What the user can do instead of giving another value."""
    takes_value: bool = True
    """Whether the flag takes a value; False for a switch."""


def _any() -> VllmOption:
    return VllmOption(None)


def _switch() -> VllmOption:
    return VllmOption(None, takes_value=False)


def _only(*harmless: Any, remedy: str) -> VllmOption:
    return VllmOption(harmless, remedy, takes_value=not any(isinstance(value, bool) for value in harmless))


def _allows_none(limits: Any) -> bool:
    """Whether all limits are 0. Forms: {"image": 0} or {"image": {"count": 0}}, also as JSON, and image=0,video=0."""
    if isinstance(limits, str):
        try:
            limits = json.loads(limits or "{}")
        except ValueError:
            limits = dict(part.partition("=")[::2] for part in limits.split(","))
    if not isinstance(limits, Mapping):
        return False
    counts = (limit.get("count") if isinstance(limit, Mapping) else limit for limit in limits.values())
    return all(str(count).strip() == "0" for count in counts)


_REPLICAS = "`foreword serve --replicas` runs several engines behind one server"
_ONE_DEVICE = f"a model runs in one process on one device; {_REPLICAS}"
_SPLIT = "replies are split in the form that the model's chat template has; response_template chooses another one"
_REASONING = "deepseek_r1 deepseek_v3 gemma4 glm45 kimi_k2 minimax_m2 mistral nemotron_v3 openai_gptoss qwen3".split()
_CALLS = (
    "deepseek_v3 deepseek_v31 functiongemma gemma4 glm45 glm47 granite hermes kimi_k2 llama3_json llama4_json "
    "minimax_m2 mistral openai qwen3_coder qwen3_xml".split()
)
_TLS = "the server speaks plain HTTP; put a proxy before it for TLS"
_MEDIA = "sounds and videos are refused; max_pictures limits pictures, max_picture_tokens their size"
_LATER = "this version has no such thing; leave it out"

ENGINE_OPTIONS: Mapping[str, VllmOption] = {
    "tensor_parallel_size": _only(1, remedy=_ONE_DEVICE),
    "pipeline_parallel_size": _only(1, remedy=_ONE_DEVICE),
    "data_parallel_size": _only(1, remedy=_REPLICAS),
    "decode_context_parallel_size": _only(1, remedy=_ONE_DEVICE),
    "enable_expert_parallel": _only(False, remedy=_ONE_DEVICE),
    "distributed_executor_backend": _only("uni", "mp", remedy=_ONE_DEVICE),
    "disable_custom_all_reduce": _switch(),
    "calculate_kv_scales": _only(False, remedy="scales of kv_cache_dtype=int8 follow from each token's own KV"),
    "quantization": _only(remedy="leave it out, because a checkpoint's config.json says how it is quantized"),
    "swap_space": _any(),  # preempted requests are computed again, as in vLLM
    "preemption_mode": _only("recompute", remedy="preempted requests are computed again"),
    "cpu_offload_gb": _only(0, remedy="weights stay where they are computed with; use a smaller model or dtype"),
    "enable_chunked_prefill": _only(True, remedy="prompts are always computed in chunks of max_num_batched_tokens"),
    "max_seq_len_to_capture": _any(),
    "num_scheduler_steps": _only(1, remedy="the scheduler looks at the queue before each step"),
    "async_scheduling": _switch(),
    "use_v2_block_manager": _switch(),
    "disable_hybrid_kv_cache_manager": _only(False, remedy="use keep_all_kv to keep all KV of windowed layers"),
    "disable_sliding_window": _only(False, remedy="layers attend as the model's config says"),
    "attention_backend": _only(remedy="choose with attention_kernel: auto, cpu, triton or reference"),
    "tokenizer_mode": _only("auto", "hf", remedy="transformers chooses the tokenizer's class"),
    "skip_tokenizer_init": _only(False, remedy="a model without tokenizer files runs on token ids alone"),
    "load_format": _only("auto", "hf", "safetensors", "pt", remedy="give a checkpoint in transformers' format"),
    "config_format": _only("auto", "hf", remedy="give a checkpoint in transformers' format"),
    "hf_overrides": _only({}, remedy="edit config.json in a copy of the model's folder"),
    "hf_config_path": _only(remedy="put config.json into the model's folder"),
    "hf_token": _only(remedy="set the environment variable HF_TOKEN"),
    "download_dir": _only(remedy="set the environment variable HF_HOME"),
    "code_revision": _only(remedy="use revision, which holds for the code too"),
    "rope_scaling": _only({}, remedy="edit config.json in a copy of the model's folder"),
    "rope_theta": _only(remedy="edit config.json in a copy of the model's folder"),
    "task": _only("auto", "generate", remedy="models generate text here"),
    "runner": _only("auto", "generate", remedy="models generate text here"),
    "convert": _only("auto", "none", remedy="models generate text here"),
    "override_generation_config": _only({}, remedy="give temperature and others with the requests"),
    "logits_processors": _only([], (), remedy="use logit_bias, or a grammar"),
    "guided_decoding_backend": _only("auto", "guidance", remedy="grammars run in llguidance"),
    "structured_outputs_config": _only({}, remedy="grammars run in llguidance"),
    "max_cpu_loras": _any(),  # see max_loras
    "fully_sharded_loras": _switch(),
    "lora_dtype": _any(),  # adapters multiply in float32
    "lora_extra_vocab_size": _any(),
    "enable_prompt_adapter": _only(False, remedy=_LATER),
    "enable_sleep_mode": _only(False, remedy=_LATER),
    "speculative_config": _only({}, remedy="tokens are drafted from the cache, without a model; see draft_tokens"),
    "speculative_model": _only(remedy="tokens are drafted from the cache, without a model; see draft_tokens"),
    "kv_transfer_config": _only({}, remedy=_LATER),
    "kv_events_config": _only({}, remedy="use kv_events, kv_events_replay and others"),
    "compilation_config": _only(0, {}, remedy="nothing is compiled by torch; see cuda_graphs"),
    "limit_mm_per_prompt": VllmOption(_allows_none, remedy=f"{_MEDIA}; leave it out, or set each limit to 0"),
    "mm_processor_kwargs": _only({}, remedy=f"{_MEDIA}; leave it out"),
    "disable_mm_preprocessor_cache": _switch(),
    "allowed_local_media_path": _only("", remedy=_MEDIA),
    "allowed_media_domains": _only([], (), remedy="use allow_media_domain of foreword serve"),
    "max_logprobs": _any(),
    "disable_log_stats": _switch(),
    "worker_cls": _only("auto", remedy=_LATER),
}
"""Options of vLLM's `LLM` and of `vllm serve`."""

SERVER_OPTIONS: Mapping[str, VllmOption] = {
    "uvicorn_log_level": _any(),
    "disable_uvicorn_access_log": _switch(),
    "disable_log_requests": _switch(),
    "max_log_len": _any(),
    "disable_fastapi_docs": _switch(),
    "disable_frontend_multiprocessing": _switch(),
    "enable_prompt_tokens_details": _switch(),  # always there
    "enable_server_load_tracking": _only(False, remedy="/metrics has the running and waiting requests"),
    "api_server_count": _only(1, remedy=f"one process serves; {_REPLICAS}"),
    "headless": _only(False, remedy=_LATER),
    "response_role": _only("assistant", remedy="answers have the role assistant"),
    "chat_template_content_format": _only("auto", "string", remedy="text parts reach the template as one text"),
    "enable_auto_tool_choice": _only(True, remedy="calls are read wherever a request brings tools; send none"),
    "tool_call_parser": _only(*_CALLS, remedy=_SPLIT),
    "reasoning_parser": _only("", *_REASONING, remedy=_SPLIT),
    "return_tokens_as_token_ids": _only(False, remedy=_LATER),
    "enable_force_include_usage": _only(False, remedy="requests ask for it with stream_options"),
    "middleware": _only([], (), remedy="put a proxy before the server"),
    "ssl_keyfile": _only(remedy=_TLS),
    "ssl_certfile": _only(remedy=_TLS),
    "ssl_ca_certs": _only(remedy=_TLS),
}
"""Options of `vllm serve` alone."""


def check_vllm_option(name: str, value: Any, option: VllmOption) -> None:
    """Accept a value that changes nothing. Raises ConfigError for any other value."""
    harmless = option.harmless
    listed = harmless if isinstance(harmless, tuple) else ()
    is_harmless = harmless(value) if callable(harmless) else any(_same(value, item) for item in listed)
    if value is not None and harmless is not None and not is_harmless:
        accepted = ", ".join(str(item) for item in listed if item not in ("", {}, [], ()))
        only = f", only {accepted}" if accepted else ""
        raise ConfigError(f"{name}={value!r}, an option of vLLM, is not supported here{only}: {option.remedy}")
    logger.debug("%s=%r changes nothing here", name, value)


def _same(value: Any, harmless: Any) -> bool:
    """Whether two values are equal. 1 does not equal True."""
    return isinstance(value, bool) == isinstance(harmless, bool) and bool(value == harmless)

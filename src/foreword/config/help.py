"""How --help shows options: under which title, and with which example.

An option that is under no title is set by developers alone: --help leaves it out, and `--help-all` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreword.config.option import Option

GROUPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "model": {
            "model": "Qwen/Qwen3-0.6B",
            "revision": "main",
            "served_model_name": "assistant",
            "tokenizer": "./tokenizer",
            "tokenizer_revision": "main",
            "chat_template": "chat.jinja",
            "response_template": "hermes",
            "score_template": "qwen3-reranker",
            "classify_template": "classify.toml",
            "generation_config": "none",
            "dtype": "bfloat16",
            "weight_arithmetic": "int8",
            "device": "cuda",
            "enable_lora": "",
            "lora_modules": "sql=./adapters/sql",
            "max_loras": "32",
            "max_lora_rank": "64",
            "max_pictures": "4",
            "max_picture_tokens": "640",
            "picture_cache_bytes": "1GB",
            "enable_prompt_embeds": "",
            "draft_tokens": "0",
            "trust_remote_code": "",
            "seed": "7",
        },
        "memory": {
            "kv_cache_dtype": "int8",
            "kv_cache_memory_bytes": "8GB",
            "gpu_memory_utilization": "0.8",
            "max_model_len": "8192",
        },
        "cache": {
            "enable_prefix_caching": "no",
            "eviction_policy": "lru",
            "max_pinned_share": "0.3",
            "max_pinned_share_per_tenant": "0.1",
            "share_prefix": "system.txt",
            "explain_misses": "no",
        },
        "tiers": {
            "cache_dir": "/var/cache/foreword",
            "cache_disk_bytes": "100GB",
            "cache_key_file": "disk.key",
            "cache_host_bytes": "32GB",
            "cache_store": "valkey://cache.example.com:6379",
            "cache_store_ttl_s": "3600",
            "cache_store_key_file": "store.key",
            "cache_daily_write_bytes": "500GB",
            "cache_admission": "twice",
        },
        "limits": {
            "max_num_seqs": "32",
            "max_num_batched_tokens": "1024",
            "scheduling_policy": "prefix",
            "max_overtake_s": "5",
            "max_queued": "64",
            "max_prompt_tokens": "4096",
            "max_choices": "8",
            "max_body_bytes": "1MB",
            "max_cached_contents": "16",
            "max_schema_tokens": "100000",
            "request_timeout_s": "120",
            "body_timeout_s": "10",
        },
        "access": {
            "host": "0.0.0.0",
            "port": "8080",
            "api_key": "SECRET",
            "keys_file": "keys.toml",
            "operator_key": "SECRET",
            "server_secret": "SECRET",
            "allowed_origins": "https://chat.example.com",
            "allow_media_domain": "images.example.com",
            "root_path": "/llm",
        },
        "observability": {
            "log_level": "debug",
            "log_format": "json",
            "log_requests": "",
            "log_interval_s": "60",
            "dashboard": "no",
            "record": "requests.jsonl",
            "otlp_traces_endpoint": "http://localhost:4318/v1/traces",
            "kv_events": "tcp://*:5557",
            "kv_events_replay": "tcp://*:5558",
            "kv_events_snapshot": "tcp://*:5559",
        },
        "replicas": {
            "replicas": "4",
            "max_replicas": "8",
            "replica_cpus": "2",
            "replica_gpus": "1",
            "ray_address": "auto",
        },
        "advanced": {
            "block_size": "32",
            "num_gpu_blocks_override": "4096",
            "long_prefill_token_threshold": "512",
            "max_num_encoder_input_tokens": "256",
            "attention_kernel": "reference",
            "exact": "no",
            "cuda_graphs": "no",
            "chat_control_tokens": "",
            "keep_all_kv": "",
            "key_salt": "blue",
            "cache_exact": "no",
            "hash_function": "xxhash",
            "allow_links": "",
            "link_measurements": "links.json",
            "link_gate": "0.99",
            "kv_events_topic": "kv@10.0.0.7@my-model",
            "ignore_unknown_fields": "",
            "shutdown_delay_s": "5",
            "shutdown_timeout_s": "60",
        },
    }
)
"""Titles of --help, their options, and a value for the example; of a switch: empty for on, "no" for off."""

DEVELOPERS = "for developers"
"""The title of the options that only somebody sets who works on foreword, or on a consumer of its events."""

DEVELOPER_OPTIONS = frozenset(
    "cache_events coalesce_in_flight deduplicate kv_events_encoding kv_events_hashes prefix_index self_check "
    "sink_token_ids state_block_size state_interval".split()
)


def grouped(options: Mapping[str, Option]) -> dict[str, dict[str, Option]]:
    """Options under their titles, in the order of --help."""
    groups = {title: [name for name in names if name in options] for title, names in GROUPS.items()}
    groups[DEVELOPERS] = [name for name in options if name in DEVELOPER_OPTIONS]
    placed = {name for names in groups.values() for name in names}
    groups["advanced"] += [name for name in options if name not in placed]
    return {title: {name: options[name] for name in names} for title, names in groups.items() if names}


def example(title: str, option: Option) -> str:
    """The flag as it stands on a command line: `--port 8080`, `--no-exact`; empty if there is none."""
    value = GROUPS.get(title, {}).get(option.name)
    if value is None:
        return ""
    return f"--no-{option.flag[2:]}" if value == "no" else f"{option.flag} {value}".rstrip()

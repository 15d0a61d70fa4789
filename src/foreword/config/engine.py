"""Options of the engine, and the only place that reads FOREWORD_* environment variables."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from foreword.config.option import Option, options_of, read_fields, read_options
from foreword.config.vllm import ENGINE_OPTIONS
from foreword.errors import ConfigError

EncodingName = Literal["map", "array"]
HashesName = Literal["int", "bytes"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KernelName = Literal["auto", "cpu", "triton", "reference"]
WeightArithmetic = Literal["exact", "int8"]
KVCacheDtype = Literal["auto", "int8"]
Policy = Literal["fcfs", "priority", "prefix"]
IndexName = Literal["radix", "hash"]
_DTYPES = {"half": "float16", "float": "float32"}
"""Other names that vLLM has for a precision."""
_LIBRARY_SWITCHES = (
    "ATEN_CPU_CAPABILITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA".split()
)
HashName = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
EvictionName = Literal["lru", "value"]
AdmissionName = Literal["all", "twice", "room", "heads"]
DraftTokens = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Where and how an engine publishes the blocks that its cache stores and removes."""

    kv_events: str | None = None
    """ZeroMQ address at which events of stored and removed blocks are published in vLLM's format, such as tcp://*:5557.

    Whoever can connect can read the tokens of all prompts. Needs `pip install foreword[ops]`. None: nothing is
    published.
    """
    kv_events_replay: str | None = None
    """Address at which consumers ask for batches that they missed, such as tcp://*:5558. None: consumers cannot ask."""
    kv_events_snapshot: str | None = None
    """Address at which consumers ask for the whole state of the cache, such as tcp://*:5559. Batches then name their
    publisher, and an empty batch is sent each second while nothing happens. None: consumers cannot ask."""
    kv_events_encoding: EncodingName = "map"
    """Form of an event: "map" as in vLLM since June 2026, "array" as in older versions and in SGLang."""
    kv_events_hashes: HashesName = "int"
    """Form of a block's key: "int" is the key's last 8 bytes as a number, "bytes" is the whole key."""
    kv_events_topic: str = ""
    """Topic of all messages, such as kv@10.0.0.7@my-model."""

    def __post_init__(self) -> None:
        read_fields(self)
        for name in ("kv_events", "kv_events_replay", "kv_events_snapshot"):
            address = getattr(self, name)
            if address is None:
                continue
            if self.kv_events is None:
                raise ConfigError(f"{name}={address!r} needs kv_events; give the address of the events too")
            if not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name}={address!r} is no ZeroMQ address; use one such as tcp://*:5557")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, its precision, and the memory for its KV."""

    model: str
    """GGUF file, folder, hub id, or a name that `foreword models` lists."""
    revision: str | None = None
    """Branch, tag or commit of the model's repository on the hub. None: its main branch."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. None: the model's."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer's repository on the hub. None: `revision`, for the model's tokenizer."""
    chat_template: str | None = None
    """Jinja template of conversations, or a file that holds one. None: the tokenizer's."""
    chat_control_tokens: bool = False
    """Let control tokens in messages, such as `<|im_end|>`, act as control tokens. False: they are plain text."""
    response_template: str | None = None
    """How the model marks reasoning and tool calls: a family's name, or transformers' response template as JSON or a
    file. None: the tokenizer's, or that of the family whose marks the chat template has."""
    generation_config: str = "auto"
    """Where temperature, top_p, top_k, min_p and repetition_penalty come from when a request leaves them out. "auto":
    the checkpoint's generation_config.json. "none": plain sampling. Else a file, or a folder with such a file."""
    dtype: Dtype = "auto"
    """Precision of weights and KV. "auto": the checkpoint's precision if it is one of these, else float32. On a CPU,
    "auto" is also float32 where float32 is faster and loses no bit.

    float32 is faster and loses no bit for checkpoints in float16 and, on processors without instructions for bfloat16,
    for checkpoints in bfloat16 or in codes. If foreword has its own code for the model's family, weights then stay in
    the file's 16 bits or codes, and activations and KV are float32. With "float16", a checkpoint in another type is
    refused if it has weights beyond 65504. Activations beyond 65504 overflow; models trained in bfloat16 may have such
    activations.
    """
    kv_cache_dtype: str = "auto"
    """How a CPU stores keys and values. "auto": in the type of activations. "int8": in codes of eight bits with a scale
    for each token and head, which rounds, and stores nearly twice the tokens of bfloat16 (docs/guides/kv-formats.md).
    The two give different answers and share no cache."""
    weight_arithmetic: WeightArithmetic = "exact"
    """How a CPU multiplies packed weights (GGUF, GPTQ, AWQ, MXFP4). "exact": activations stay in float32. "int8":
    activations are rounded to eight bits, which is faster. The two give different answers and share no cache."""
    device: str = "cpu"
    """Torch device that runs the model, such as cpu or cuda."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and answer. None: the model's limit, or as many as the pool holds."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV blocks: for running requests and the cache. None: see `gpu_memory_utilization`."""
    gpu_memory_utilization: float | None = None
    """Share of memory. On a GPU: of its memory, for weights and KV. On a CPU: of the memory left after loading, for KV.

    None: 0.9 on a GPU. On a CPU a quarter of the available memory, but at most 4 GiB, and at most twice what
    `max_num_seqs` requests of `max_model_len` tokens hold (or 1 GiB, if that is more). Memory is taken only when KV is
    written to it.
    """
    attention_kernel: KernelName = "auto"
    """Kernel that computes attention. "cpu": compiled for this processor. "triton": for NVIDIA's Hopper. Both have
    two-phase attention. "reference": plain torch, on any device.

    "auto" takes the compiled kernel wherever it runs. Each kernel has its own bits, whatever the cache does.
    """
    exact: bool = True
    """Equal bits with and without the cache on a GPU too, at the cost of fixed shapes; a CPU always gives equal bits.
    """
    cuda_graphs: bool = True
    """On a GPU: record decoding steps of some sizes at start and replay them, which saves the host time per step."""
    allow_links: bool = False
    """Let requests ask with `link` that parts of their prompts are computed apart and reused at any position, which is
    fast and approximate (docs/guides/linking.md). Only requests that ask have links. Works on a CPU, for models whose
    layers all attend to everything, by rotary positions."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""
    enable_lora: bool = False
    """Let requests name LoRA adapters. Works on a CPU, for the families of docs/guides/adapters.md."""
    max_loras: int = 8
    """Adapters that stay in memory, not counting those that requests use. The least recently used leaves first.
    Together they take at most twice the bytes of N adapters of the largest rank."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    max_pictures: int = 16
    """Most pictures of one prompt (docs/guides/pictures.md)."""
    max_picture_tokens: int = 1280
    """Most tokens of one picture of a Qwen or Mistral model; larger ones are made smaller. A new picture
    takes a time that grows with the square of its tokens, and other requests wait meanwhile."""
    enable_prompt_embeds: bool = False
    """Let prompts begin with embeddings in place of tokens. Works on a CPU, for the families of
    docs/guides/prompt-embeddings.md."""
    picture_cache_bytes: int = 256 * 2**20
    """Memory for the encodings of the pictures that were used last."""
    self_check: bool = True
    """At load, compare logits of one short prompt computed in several ways, and warn if bits differ."""

    def __post_init__(self) -> None:
        read_fields(self)
        if self.weight_arithmetic == "int8" and self.device != "cpu":
            raise ConfigError(
                f"weight_arithmetic='int8' runs on a CPU only, not on device={self.device!r}; "
                "leave it out, or use device='cpu'"
            )
        self._check_kv_format()
        _at_least(self, max_loras=1, max_lora_rank=1, max_pictures=0, max_picture_tokens=1, picture_cache_bytes=0)
        _at_least(self, max_model_len=2, kv_cache_memory_bytes=1)
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share} is not a share of memory; use (0, 1]")

    def _check_kv_format(self) -> None:
        name = str(self.kv_cache_dtype).lower().removeprefix("torch.")
        object.__setattr__(self, "kv_cache_dtype", name)
        if name.startswith("fp8"):
            raise ConfigError(
                f"kv_cache_dtype={name!r} is not supported: floats of eight bits round more than codes with a scale "
                "for each token and head; use 'int8', which takes as much memory"
            )
        _check_one_of("kv_cache_dtype", name, get_args(KVCacheDtype))
        if name != "int8":
            return
        if self.device != "cpu":
            raise ConfigError(
                f"kv_cache_dtype='int8' runs on a CPU alone, not on device={self.device!r}; leave it out, or use "
                "device='cpu'"
            )
        if self.allow_links:
            raise ConfigError(
                "kv_cache_dtype='int8' does not go with allow_links=True: keys that move would be rounded once more; "
                "leave out one of them"
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The blocks of the KV memory, and the prefix cache."""

    block_size: int = 16
    """Tokens per KV block. The hash index finds whole blocks only, the radix index every token."""
    enable_prefix_caching: bool = True
    """Keep the KV of computed tokens and reuse it for equal prefixes."""
    prefix_index: IndexName = "radix"
    """How prefixes are found: "radix" compares tokens and matches to the token, "hash" compares block keys."""
    eviction_policy: EvictionName = "value"
    """Which cached block is evicted when memory is short. "value" learns from the traffic which blocks come back. "lru"
    evicts the least recently used block."""
    num_gpu_blocks_override: int | None = None
    """Number of blocks in the pool, on any device. None: as many as the memory for KV holds."""
    keep_all_kv: bool = False
    """Keep all KV of layers that attend only to a window or chunk, as if they attended to everything."""
    sink_token_ids: tuple[int, ...] = ()
    """Tokens before every prompt, computed once and never evicted. They are no part of prompts, hits or counts, and
    must fill whole blocks. For models whose layers all attend to everything."""
    state_block_size: int | None = None
    """Recurrent states can be saved, and hits can end, at multiples of this number of tokens. None: the least number
    that wastes no memory, but at least 64."""
    state_interval: int | None = None
    """Tokens of a prompt between saved recurrent states. States are also saved at the ends of prompts and messages, and
    where prompts part. None: the number at which states take about as much memory as the KV, but at least 512."""
    deduplicate: bool = False
    """Free a block if another block has the same content, instead of keeping both."""
    explain_misses: bool = True
    """Keep an account of cached and evicted blocks, so that every lookup can say why it missed."""
    cache_events: bool = False
    """Record events of stored and removed blocks, for `LLM.take_cache_events`; needs `explain_misses`."""

    max_pinned_share: float = 0.5
    """Largest share of all blocks that pins and marks may protect; 0.0: none."""
    max_pinned_share_per_tenant: float = 0.25
    """Largest share of all blocks that the marks of one tenant may protect, on a server that asks for keys."""
    hash_function: HashName = "sha256"
    """Hash for block keys; docs/concepts/keys.md says which one suits whom."""
    key_salt: str = ""
    """Text that keeps apart the blocks of deployments that share a store."""
    cache_exact: bool = True
    """Reuse stored blocks only where the same kernels, library versions and processors computed them, so that answers
    keep their bits. False: reuse them anywhere, in a separate namespace."""

    def __post_init__(self) -> None:
        read_fields(self)
        for name in ("max_pinned_share", "max_pinned_share_per_tenant"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name}={share} is not a share of the pool; use 0.0 to 1.0")
        _at_least(self, block_size=1, num_gpu_blocks_override=1, state_block_size=1, state_interval=1)
        if self.cache_events and not self.explain_misses:
            raise ConfigError("cache_events=True needs explain_misses=True; the events come from its account")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Storage below the KV memory."""

    cache_host_bytes: int | None = None
    """Bytes of this machine's memory for cached prefixes that do not fit into a GPU's memory. None: no memory."""
    cache_dir: str | None = None
    """Folder that keeps cached prefixes after the process ends. A missing folder is made so that only you can read it.
    Several processes may share the folder. None: cached prefixes end with the process."""
    cache_disk_bytes: int | None = None
    """Most bytes in `cache_dir`. None: 50 GB, or a quarter of the free space if that is less."""
    cache_key_file: str | None = None
    """File with a secret of 32 bytes or more, with which cached prefixes are encrypted on disk. None: they are not
    encrypted, and whoever can read the folder can learn what prompts said."""
    cache_store: str | None = None
    """Valkey or Redis server that shares cached prefixes among machines, such as valkey://HOST:6379; valkeys:// is TLS.
    Needs `pip install foreword[store]`. None: nothing is shared."""
    cache_store_ttl_s: float = 86_400.0
    """Seconds after which `cache_store` forgets a cached prefix."""
    cache_store_key_file: str | None = None
    """File with a secret of 32 bytes or more that signs what is stored in `cache_store`. None: it is not signed, and
    whoever can write to the store can change answers."""
    cache_daily_write_bytes: int | None = None
    """Most bytes to write to tiers, such as `cache_dir`, in a day, to spare a disk. None: no limit."""
    cache_admission: AdmissionName = "all"
    """What is stored in tiers, such as `cache_dir`. "all": everything. "twice": what is computed a second time. "room":
    everything while there is room, then as "twice". "heads": beginnings of prompts. `foreword replay --tier` compares
    these rules on your traffic."""

    def __post_init__(self) -> None:
        read_fields(self)
        _at_least(self, cache_host_bytes=1, cache_disk_bytes=1, cache_daily_write_bytes=1)
        for name in ("cache_disk_bytes", "cache_key_file"):
            if getattr(self, name) is not None and self.cache_dir is None:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs a cache folder; give cache_dir too")
        if self.cache_store_key_file is not None and self.cache_store is None:
            raise ConfigError(
                f"cache_store_key_file={self.cache_store_key_file!r} signs blocks on a server; give cache_store too"
            )
        if not 0.0 < self.cache_store_ttl_s < 1e9:
            raise ConfigError(f"cache_store_ttl_s={self.cache_store_ttl_s} is out of range; use seconds, more than 0")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits on the requests and tokens that run together."""

    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes, for all requests together: pieces of prompts, and a token of each answer."""
    long_prefill_token_threshold: int | None = None
    """Most tokens of one request in one step. None: no limit, but a prompt that needs several steps leaves up to half
    of each step to requests that need only that step."""
    max_num_seqs: int = 128
    """Most requests running at a time."""
    max_num_encoder_input_tokens: int = 512
    """Most tokens of new pictures that one step encodes, while other requests wait. One
    picture, or one tile where pictures are cut, may have more."""
    scheduling_policy: Policy = "fcfs"
    """Order of service. "fcfs": by arrival. "priority": tenants take turns; a tenant's lowest `priority` goes first,
    then the earliest request. "prefix": the same, but with the longest cached prefix in place of the earliest request,
    within `max_overtake_s`."""
    max_overtake_s: float = 2.0
    """Under the policy "prefix": most seconds that a waiting request loses to requests that came after it."""
    coalesce_in_flight: bool = True
    """Let a request wait for blocks of its prefix that another request is computing, instead of computing them too."""
    draft_tokens: DraftTokens = "auto"
    """Most tokens of an answer to guess at a time, from the prompt, the cache and earlier answers; one step checks them
    all, and answers stay the same to the bit. "auto": as many as make answers faster; 0: none."""

    def __post_init__(self) -> None:
        read_fields(self)
        _at_least(self, max_num_batched_tokens=1, long_prefill_token_threshold=1, max_num_seqs=1)
        _at_least(self, max_num_encoder_input_tokens=1)
        if not 0.0 <= self.max_overtake_s < 1e9:
            raise ConfigError(f"max_overtake_s={self.max_overtake_s} is out of range; use seconds, 0 or more")
        if self.draft_tokens != "auto":
            _at_least(self, draft_tokens=0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options, grouped."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    seed: int = 0
    """Seed for requests that have none."""

    def __post_init__(self) -> None:
        read_fields(self)
        has_account = self.cache.enable_prefix_caching and self.cache.explain_misses
        if self.events.kv_events is not None and not has_account:
            raise ConfigError(
                f"kv_events={self.events.kv_events!r} needs enable_prefix_caching and explain_misses; leave both on"
            )
        if self.model.allow_links and not self.cache.enable_prefix_caching:
            raise ConfigError("allow_links=True needs enable_prefix_caching: links copy cached blocks; leave it on")
        if self.scheduler.scheduling_policy == "prefix" and not has_account:
            raise ConfigError(
                "scheduling_policy='prefix' needs enable_prefix_caching and explain_misses, which tell it what is "
                "cached; leave both on"
            )

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Sort flat keyword options into groups. An unknown name raises ConfigError, which names the nearest option.

        Sizes may be texts such as "4GB". Options of vLLM that foreword does not have are accepted with values that
        change nothing (foreword.config.vllm).
        """
        for name in ("dtype", "device"):
            if type(options.get(name)).__module__ == "torch":  # torch.float16, torch.device("cpu")
                options[name] = str(options[name]).removeprefix("torch.")
        options["dtype"] = _DTYPES.get(str(options.get("dtype")), options.get("dtype"))
        allowed = engine_options()
        values = read_options(options, {name: allowed[name] for name in allowed if name != "model"}, ENGINE_OPTIONS)

        def of(group: type) -> dict[str, Any]:
            return {field.name: values[field.name] for field in fields(group) if field.name in values}

        return cls(
            ModelConfig(os.path.expanduser(os.fspath(model)), **of(ModelConfig)),
            CacheConfig(**of(CacheConfig)),
            TierConfig(**of(TierConfig)),
            SchedulerConfig(**of(SchedulerConfig)),
            EventsConfig(**of(EventsConfig)),
            **of(EngineConfig),
        )


@functools.cache
def engine_options() -> Mapping[str, Option]:
    """All options of an engine by name: what `LLM` takes as keywords, and commands as flags."""
    others = options_of(EngineConfig)
    return {**options_of(ModelConfig, CacheConfig, TierConfig, SchedulerConfig, EventsConfig), **others}


class EngineKeywords(TypedDict, total=False):
    """Keywords of `LLM(...)`, spelt out so that editors complete them and mypy checks them. A size may be "4GB"."""

    # ModelConfig
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
    self_check: bool
    # CacheConfig
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
    # TierConfig
    cache_host_bytes: int | str | None
    cache_dir: str | os.PathLike[str] | None
    cache_disk_bytes: int | str | None
    cache_key_file: str | os.PathLike[str] | None
    cache_store: str | None
    cache_store_ttl_s: float
    cache_store_key_file: str | os.PathLike[str] | None
    cache_daily_write_bytes: int | str | None
    cache_admission: AdmissionName
    # SchedulerConfig
    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    max_num_seqs: int
    max_num_encoder_input_tokens: int
    scheduling_policy: Policy
    max_overtake_s: float
    coalesce_in_flight: bool
    draft_tokens: DraftTokens
    # EventsConfig
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_snapshot: str | None
    kv_events_encoding: EncodingName
    kv_events_hashes: HashesName
    kv_events_topic: str
    # EngineConfig
    seed: int


def signature() -> inspect.Signature:
    """The signature of `LLM(...)` that help() and notebooks show: all options with their defaults."""
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)]
    for option in engine_options().values():
        if option.name != "model":
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(option.name, kind, default=option.default, annotation=option.kind))
    return inspect.Signature(parameters)


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of FOREWORD_* environment variables."""

    log_level: str | None = None
    """FOREWORD_LOG_LEVEL; None: the command's own."""
    num_threads: int | None = None
    """FOREWORD_NUM_THREADS: threads for numerical code; None: torch's choice, at most the cgroup's quota."""
    api_key: str | None = None
    """FOREWORD_API_KEY: the key that a server asks for."""
    operator_key: str | None = None
    """FOREWORD_OPERATOR_KEY: the key that opens a server's dashboard and metrics."""
    server_secret: str | None = None
    """FOREWORD_SERVER_SECRET: the secret that enters the names of the tenants' cache namespaces."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        threads = environ.get("FOREWORD_NUM_THREADS")
        if threads is not None and not (threads.isdecimal() and int(threads) > 0):
            raise ConfigError(
                f"FOREWORD_NUM_THREADS={threads!r} is not a positive number; use one such as 4, or unset it"
            )
        level = environ.get("FOREWORD_LOG_LEVEL", "").upper() or None
        if level is not None:
            _check_one_of("FOREWORD_LOG_LEVEL", level, ("DEBUG", "INFO", "WARNING", "ERROR"))
        return cls(
            level,
            int(threads) if threads else None,
            environ.get("FOREWORD_API_KEY") or None,
            environ.get("FOREWORD_OPERATOR_KEY") or None,
            environ.get("FOREWORD_SERVER_SECRET") or None,
        )


def keep_onednn_to_vectors() -> None:
    """Let oneDNN multiply with vectors instead of AMX tiles. Call this before oneDNN's first product.

    oneDNN may use all instructions up to AVX512-FP16; without AVX512-FP16, float16 takes seven times as long.

    With tiles, the bits of a row of a bfloat16 product depend on the number of rows, and padding does not help
    (docs/decisions/0017-tiles.md). A value of ONEDNN_MAX_CPU_ISA that the user has set stays.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def let_threads_rest(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the threads of torch's OpenMP sleep while they wait, not spin. Call this before torch is imported.

    If another program runs too, a thread that spins takes the processor from the thread that it waits for: beside two
    busy threads on two cores, answers took 16 to 27 times as long. A setting of the user's stays. OpenMP reads the
    setting once, so after torch's import `foreword.kernels.runtime.threads` has another way.
    """
    if "torch" not in sys.modules and not has_wait_policy(environ):
        environ["OMP_WAIT_POLICY"] = "PASSIVE"


def has_wait_policy(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says how OpenMP's threads wait."""
    return any(name in environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))


def has_thread_count(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says how many threads OpenMP has."""
    return any(name in environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for data that programs can compute again."""
    return Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def ollama_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which Ollama keeps its models."""
    return Path(environ.get("OLLAMA_MODELS") or os.path.expanduser("~/.ollama/models"))


def library_switches(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that are set and choose instructions or precisions of numerical libraries."""
    return {name: environ[name] for name in _LIBRARY_SWITCHES if name in environ}


def _at_least(config: object, **least: int) -> None:
    """Check fields that have a least value, unless they are None."""
    for name, number in least.items():
        value = getattr(config, name)
        if value is not None and value < number:
            raise ConfigError(f"{name}={value} is too small; use at least {number}")


def _check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")

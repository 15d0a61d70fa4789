"""Options: a field with a docstring becomes a keyword, a flag, a key of config files, and help text."""

from foreword.config.engine import (
    AdmissionName as AdmissionName,
    CacheConfig as CacheConfig,
    TierConfig as TierConfig,
    DraftTokens as DraftTokens,
    Dtype as Dtype,
    EngineConfig as EngineConfig,
    Environment as Environment,
    EvictionName as EvictionName,
    KernelName as KernelName,
    KVCacheDtype as KVCacheDtype,
    ModelConfig as ModelConfig,
    SchedulerConfig as SchedulerConfig,
    WeightArithmetic as WeightArithmetic,
    engine_options as engine_options,
    has_thread_count as has_thread_count,
    has_wait_policy as has_wait_policy,
    keep_onednn_to_vectors as keep_onednn_to_vectors,
    let_threads_rest as let_threads_rest,
    library_switches as library_switches,
    ollama_folder as ollama_folder,
    user_cache_folder as user_cache_folder,
)
from foreword.config.engine import EventsConfig as EventsConfig
from foreword.config.user_file import UserFile as UserFile
from foreword.config.user_file import user_path as user_path

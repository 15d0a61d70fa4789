"""Options: a field with a docstring is keyword, flag, key of config files and help.

Knows names, defaults, ranges and what vLLM's options mean here; knows nothing of how an option is carried out.
"""

from foreword.config.engine import (
    CacheConfig,
    Dtype,
    EngineConfig,
    Environment,
    EvictionName,
    HashName,
    IndexName,
    KernelName,
    ModelConfig,
    Policy,
    SchedulerConfig,
    engine_options,
    keep_onednn_to_vectors,
)

__all__ = [
    "CacheConfig",
    "Dtype",
    "EngineConfig",
    "Environment",
    "EvictionName",
    "HashName",
    "IndexName",
    "KernelName",
    "ModelConfig",
    "Policy",
    "SchedulerConfig",
    "engine_options",
    "keep_onednn_to_vectors",
]

"""Options: a field with a docstring becomes a keyword, a flag, a key of config files, and help text.

Knows names, defaults, ranges and the meaning of vLLM's options here; knows nothing about how the engine uses them.
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

"""The eviction policies by name: `make_policy` takes the name that a user chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foreword.cache.eviction.policies import LruPolicy, PriorityPolicy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.eviction.value import ValuePolicy
from foreword.errors import ConfigError

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LruPolicy,
        "value": ValuePolicy,
        "priority": PriorityPolicy,
    }
)
"""Policies by name."""


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The eviction policy with this name, for block ids below `num_blocks`. Raises ConfigError for other names."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_blocks)

"""The options of a server with replicas; a field with a docstring is also a flag of `foreword serve`."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.config.option import read_fields
from foreword.errors import ConfigError

MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Several engines behind one server, run by Ray Serve."""

    replicas: int = 0
    """Engines that this server runs; 0: one engine in this process, without Ray."""
    ray_address: str | None = None
    """Address of a running Ray cluster for `replicas`, such as auto or ray://HOST:10001. None: a local Ray, which ends
    with the server."""
    replica_cpus: float = 1.0
    """Ray's logical processors for one replica, with one thread each. Ray starts a replica where they are free."""
    replica_gpus: float = 0.0
    """Ray's logical GPUs of one replica."""
    max_replicas: int | None = None
    """Most replicas that Ray Serve may run under load. None: always `replicas`."""

    def __post_init__(self) -> None:
        read_fields(self)
        if not 0 <= self.replicas <= MOST_REPLICAS:
            raise ConfigError(f"replicas={self.replicas} is out of range; use 1 to {MOST_REPLICAS}, or 0 for no Ray")
        for name in ("ray_address", "max_replicas"):
            if getattr(self, name) is not None and not self.replicas:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs replicas; say how many engines to run")
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= MOST_REPLICAS:
            raise ConfigError(
                f"max_replicas={self.max_replicas} is out of range; use {self.replicas} (replicas) to {MOST_REPLICAS}"
            )
        for name in ("replica_cpus", "replica_gpus"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use a number of at least 0")

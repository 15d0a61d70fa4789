"""Options of the events that an engine publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from foreword.errors import ConfigError

EncodingName = Literal["map", "array"]
HashesName = Literal["int", "bytes"]


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Where and how an engine publishes the blocks that its cache stores and removes."""

    kv_events: str | None = None
    """ZeroMQ address at which events of stored and removed blocks are published in vLLM's format, such as tcp://*:5557.

    Whoever can connect reads all prompts' tokens. Needs `pip install foreword[ops]`. None: nothing is published.
    """
    kv_events_replay: str | None = None
    """Address at which consumers ask for batches that they missed, such as tcp://*:5558. None: they cannot."""
    kv_events_snapshot: str | None = None
    """Address at which consumers ask for all that the cache holds, such as tcp://*:5559; batches then name their
    publisher, and an empty one is sent each second while nothing happens. None: consumers cannot ask."""
    kv_events_encoding: EncodingName = "map"
    """Form of an event: "map" as in vLLM since June 2026, "array" as in older ones and in SGLang."""
    kv_events_hashes: HashesName = "int"
    """Form of a block's key: "int" is its last 8 bytes as a number, "bytes" the whole key."""
    kv_events_topic: str = ""
    """Topic of all messages, such as kv@10.0.0.7@my-model."""

    def __post_init__(self) -> None:
        for name, allowed in (("kv_events_encoding", EncodingName), ("kv_events_hashes", HashesName)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(get_args(allowed))}"
                )
        for name in ("kv_events", "kv_events_replay", "kv_events_snapshot"):
            address = getattr(self, name)
            if address is None:
                continue
            if self.kv_events is None:
                raise ConfigError(f"{name}={address!r} needs kv_events; give the address of the events too")
            if not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name}={address!r} is no ZeroMQ address; use one such as tcp://*:5557")

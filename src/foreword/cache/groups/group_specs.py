"""What has to be said about a group of layers: its attention type and its block size.

Knows names and sizes; knows nothing of how a group is managed.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Every position attends to all before it."""

    block_size: int = 16
    """Tokens per block."""

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)


@dataclass(frozen=True, slots=True)
class SinkFullSpec:
    """Full attention, and `num_sink_tokens` positions that all requests share and attend to."""

    num_sink_tokens: int
    block_size: int = 16

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)
        _check_size("num_sink_tokens", self.num_sink_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Every position attends to the last `window` positions, itself included."""

    window: int
    block_size: int = 16

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)
        _check_size("window", self.window)


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec:
    """Every position attends to those before it in its own chunk of `chunk` positions."""

    chunk: int
    block_size: int = 16

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)
        _check_size("chunk", self.chunk)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A recurrent layer's state, which each token changes; one block holds one state.

    Named as in vLLM, whatever the recurrence is: Mamba, gated delta rules, linear attention.

    A state can be saved after every `block_size` tokens, and is saved after every `interval_tokens`
    (None: `block_size`) and where the request asks for it.
    """

    block_size: int = 16
    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_size("block_size", self.block_size)
        if self.interval_tokens is not None and (self.interval_tokens < 1 or self.interval_tokens % self.block_size):
            raise ConfigError(
                f"interval_tokens={self.interval_tokens} is not a multiple of block_size={self.block_size}; states "
                "are saved at the ends of blocks only"
            )


GroupSpec = FullAttentionSpec | SinkFullSpec | SlidingWindowSpec | ChunkedLocalSpec | MambaSpec


def _check_size(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} is too small; use at least 1")

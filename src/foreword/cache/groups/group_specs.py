"""The description of a group of layers: its attention type and its block size."""

from __future__ import annotations

from dataclasses import dataclass, fields

from foreword.errors import ConfigError


class _Sizes:
    """Fields that are numbers of tokens or positions. Raises ConfigError for one below 1."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):  # type: ignore[arg-type]
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is too small; use at least 1")


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(_Sizes):
    """Every position attends to all earlier ones."""

    block_size: int = 16
    """Tokens per block."""


@dataclass(frozen=True, slots=True)
class SinkFullSpec(_Sizes):
    """Full attention, and `num_sink_tokens` positions that all requests share and attend to."""

    num_sink_tokens: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(_Sizes):
    """Every position attends to the last `window` positions, itself included."""

    window: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(_Sizes):
    """Every position attends to the earlier positions of its chunk of `chunk` positions."""

    chunk: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class MambaSpec(_Sizes):
    """A recurrent layer's state, which each token changes; one block holds one state.

    Named as in vLLM, whatever the recurrence is: Mamba, gated delta rules, linear attention.

    A state can be saved after every `block_size` tokens, and is saved after every `interval_tokens`
    (None: `block_size`) and where the request asks for it.
    """

    block_size: int = 16
    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        _Sizes.__post_init__(self)  # a class with slots has no `super()` in 3.11
        if self.interval_tokens is not None and self.interval_tokens % self.block_size:
            raise ConfigError(
                f"interval_tokens={self.interval_tokens} is not a multiple of block_size={self.block_size}; states "
                "are saved at the ends of blocks only"
            )


GroupSpec = FullAttentionSpec | SinkFullSpec | SlidingWindowSpec | ChunkedLocalSpec | MambaSpec

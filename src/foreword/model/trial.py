"""What a module computes is found out by trying it: random inputs, and whether two results have the same bits.

Knows tensors and random numbers; knows no formula. Whoever takes a module for a formula runs both on the same inputs,
and replaces the module only where `same_bits` says so. Inputs are equal in every process, so a verdict is, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

NUM_ROWS = 3
"""Rows of random numbers on which a module and a formula are compared."""
ROUNDING = 1e-3
"""The largest `relative_error` that float32 rounding explains."""
Result = TypeVar("Result")


class RandomInputs:
    """A sequence of random inputs, which its seed determines."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers around 0, [*shape]."""
        return torch.randn(shape, generator=self._generator).to(dtype)

    def integers(self, limit: int, *shape: int) -> Tensor:
        """Token ids or positions below `limit`, [*shape] int64."""
        return torch.randint(limit, shape, generator=self._generator)


def same_bits(found: object, expected: object) -> bool:
    """Whether two tensors are equal in type, shape and every bit; or two tuples of such tensors."""
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same_bits, found, expected))
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return False
    return found.dtype == expected.dtype and torch.equal(found, expected)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


def settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """The plain values among a module's attributes, which may change what it computes; its number does not."""
    values = ((name, value) for name, value in vars(module).items() if name != "layer_idx")
    return tuple((name, value) for name, value in values if isinstance(value, bool | int | float | str))


def attempt(run: Callable[[], Result], failure: str) -> Result | None:
    """What `run` returns; None, with `failure` in the log, if a module wants to be called in another way."""
    try:
        return run()
    except Exception:
        logger.debug(failure, exc_info=True)
        return None

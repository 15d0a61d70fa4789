"""Finding out by trial what a module computes: random inputs, and a comparison of two results.

The caller runs a module and a formula on the same inputs, and replaces the module only if the results agree. Inputs are
the same in every process, so verdicts are the same, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

NUM_ROWS = 3
"""The number of random rows in a trial."""
ROUNDING = 1e-3
"""The largest `relative_error` that float32 rounding explains."""
Result = TypeVar("Result")


class RandomInputs:
    """A sequence of random inputs, always the same."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, [*shape]."""
        return torch.randn(shape, generator=self._generator).to(dtype)

    def integers(self, limit: int, *shape: int) -> Tensor:
        """Token ids or positions below `limit`, [*shape] int64."""
        return torch.randint(limit, shape, generator=self._generator)


def same_bits(actual: object, expected: object) -> bool:
    """Whether two tensors, or two tuples of tensors, are equal in type, shape and every bit."""
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(same_bits, actual, expected))
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        return False
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


def settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """The plain values among a module's attributes that may change its results; the layer's number is left out."""
    values = ((name, value) for name, value in vars(module).items() if name != "layer_idx")
    return tuple((name, value) for name, value in values if isinstance(value, bool | int | float | str))


def attempt(run: Callable[[], Result], failure: str) -> Result | None:
    """Return the result of `run`. If it raises, as a module with other arguments does, log `failure`, return None."""
    try:
        return run()
    except Exception:
        logger.debug(failure, exc_info=True)
        return None

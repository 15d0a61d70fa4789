"""Values of parameters that `make test` leaves to `make test-slow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

SLOW = [pytest.mark.slow] if os.environ.get("FOREWORD_TEST_DEVICE", "cpu") == "cpu" else []
"""`make test-gpu` has no slow lane: what a CPU computes slowly runs there with the rest."""


def more_seeds(first: int, count: int) -> range:
    """Seeds of episodes for the slow lane; FOREWORD_MORE_EPISODES is how many times as many are run by hand."""
    return range(first, first + count * int(os.environ.get("FOREWORD_MORE_EPISODES", "1")))


def slow(*values: Any) -> list[Any]:
    """More values of one parameter, which show what others show and take long."""
    return [pytest.param(value, marks=SLOW) for value in values]


def slow_half(values: Iterable[Any]) -> list[Any]:
    """Values that come in pairs: of one pair the first is slow, of the next the second, and so on."""
    return [one for n, value in enumerate(values) for one in ([value] if n % 4 in (0, 3) else slow(value))]

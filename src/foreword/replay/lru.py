"""Lru: keys in the order of their last use, of which the oldest go beyond a capacity.

Gives LRU at one capacity, step by step; `stack.py` gives it at every capacity at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", int, int | str)


class Lru(Generic[Key]):
    """Keys with weights. `use` keeps all of them until `shrink`, so that a request evicts nothing of its own."""

    def __init__(self, capacity: int | None, held: Iterable[Key] = ()) -> None:
        """`capacity` in units of weight, None for no limit; `held`: the first keys, of weight 1, the newest last."""
        self.capacity = capacity
        self._weights: OrderedDict[Key, int] = OrderedDict.fromkeys(held, 1)
        self._weight = len(self._weights)
        assert capacity is None or self._weight <= capacity

    def __contains__(self, key: Key) -> bool:
        return key in self._weights

    def use(self, key: Key, weight: int = 1) -> None:
        """Add a key, or make it the newest one."""
        self._weight += weight - self._weights.get(key, 0)
        self._weights[key] = weight
        self._weights.move_to_end(key)

    @property
    def is_full(self) -> bool:
        return self.capacity is not None and self._weight >= self.capacity

    def shrink(self) -> None:
        """Evict down to the capacity."""
        while self.capacity is not None and self._weight > self.capacity:
            self._weight -= self._weights.popitem(last=False)[1]

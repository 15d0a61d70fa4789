"""Moves work that would hold up the event loop to a thread.

Knows sizes. The rule: nothing on the event loop takes more than 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

MANY_BYTES = 16 * 1024
"""Size of a JSON text that takes one or two milliseconds to read or write."""

T = TypeVar("T")


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on `num_bytes` bytes: computed at once if they are few, in a thread if they are many."""
    return await asyncio.to_thread(work) if num_bytes > MANY_BYTES else work()

"""Work that would hold up the event loop goes to a thread.

Knows sizes; the rule is that nothing on the loop takes more than 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

MANY_BYTES = 16 * 1024
"""JSON of so many bytes takes a millisecond or two to read or write."""

T = TypeVar("T")


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many bytes: here and now if they are few, else from a thread."""
    return await asyncio.to_thread(work) if num_bytes > MANY_BYTES else work()

"""Shortens a conversation that is too long for the model, by leaving out its earliest messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

STRIDE = 16
"""Messages are left out by this many, where half of the room stays in use: several turns then begin alike and hit."""


async def shortened(messages: Messages, most: int, count: Callable[[Messages], Awaitable[int]]) -> Messages:
    """The conversation with at most `most` tokens: without its earliest messages if it has more.

    System messages at its beginning stay, a tool's result never comes without its call, and the last message always
    stays: it may be too long by itself. `count` gives the number of tokens of a conversation.
    """
    if await count(messages) <= most:
        return messages
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at]["role"] not in ("tool", "assistant")]
    if not starts:
        return messages

    low, high = 0, len(starts) - 1  # the last start is right if none fits
    while low < high:
        middle = (low + high) // 2
        if await count([*messages[:head], *messages[starts[middle] :]]) <= most:
            high = middle
        else:
            low = middle + 1
    longest = [*messages[:head], *messages[starts[low] :]]
    aligned = -(-(starts[low] - head) // STRIDE) * STRIDE + head
    start = next((start for start in starts if start >= aligned), None)
    if start is not None:
        even = [*messages[:head], *messages[start:]]
        if await count(even) >= most // 2:
            return even
    return longest

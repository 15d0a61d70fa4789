"""Shortens a conversation that is too long for the model, by leaving out its earliest messages.

Knows messages, and a function that counts their tokens; knows no dialect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

STRIDE = 16
"""The number of messages left out is a multiple of it where that suffices: several turns then begin alike and hit."""


async def shortened(messages: Messages, most: int, count: Callable[[Messages], Awaitable[int]]) -> Messages:
    """The conversation without so much of its beginning that it has at most `most` tokens.

    System messages at its beginning stay, a tool's result never comes without its call, and the last message always
    stays: it may be too long by itself. `count` gives the number of tokens of a conversation.
    """
    if await count(messages) <= most:
        return messages
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at]["role"] not in ("tool", "assistant")]
    if not starts:
        return messages

    async def first_that_fits(choices: Sequence[int]) -> int | None:
        low, high = 0, len(choices)
        while low < high:
            middle = (low + high) // 2
            if await count([*messages[:head], *messages[choices[middle] :]]) <= most:
                high = middle
            else:
                low = middle + 1
        return choices[low] if low < len(choices) else None

    even = [next(start for start in starts if start >= at) for at in range(head + STRIDE, starts[-1] + 1, STRIDE)]
    start = await first_that_fits(even)
    if start is None:
        start = await first_that_fits(starts)
    return [*messages[:head], *messages[starts[-1] if start is None else start :]]

"""JSON of clients' calls: counts the values in a text before Python builds objects from it, and writes answers.

The counting is compiled and releases Python's lock, so that other threads can run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.kernels.runtime.compiled import cached

QUOTE, BACKSLASH, COMMA = 34, 92, 44
PAUSE_AFTER, PAUSE_S = 2**16, 1e-4
"""The number of characters of a long JSON text between two pauses, and the length of a pause in seconds."""
OPEN_LIST, CLOSE_LIST, OPEN_OBJECT, CLOSE_OBJECT = 91, 93, 123, 125


class JsonSize(NamedTuple):
    """Counts of the objects that `json.loads` would make. If the text is not JSON, they are upper bounds."""

    num_values: int
    """Number of values, without the keys of objects."""
    num_containers: int
    """Number of values that are lists or objects."""
    depth: int
    """The greatest depth to which lists and objects are nested."""


def scan_json(text: bytes) -> JsonSize:
    """Count the values of a JSON text in UTF-8. A million bytes take about a millisecond."""
    return JsonSize(*(int(count) for count in _scan(np.frombuffer(text, np.uint8))))


@cached(nogil=True)
def _scan(text: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
    num_commas = num_containers = depth = max_depth = 0
    is_text = False
    at = 0
    while at < len(text):
        character = text[at]
        if is_text:
            if character == BACKSLASH:
                at += 1
            elif character == QUOTE:
                is_text = False
        elif character == QUOTE:
            is_text = True
        elif character == COMMA:
            num_commas += 1
        elif character in (OPEN_LIST, OPEN_OBJECT):
            num_containers += 1
            depth += 1
            max_depth = max(max_depth, depth)
        elif character in (CLOSE_LIST, CLOSE_OBJECT):
            depth -= 1
        at += 1
    return num_commas + num_containers + 1, num_containers, max_depth


to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Returns compact JSON. Non-ASCII characters are escaped, so that half a surrogate pair does no harm."""


def to_long_json(body: Any, depth: int) -> str:
    """Return the text that `to_json` returns. Lists and objects in the first `depth` levels are written item by item.

    Long texts are written with pauses. Without pauses, a thread that only computes would hold Python's lock for 5 ms
    after each read and each write of the event loop.
    """
    pieces, num_characters = [], 0
    for piece in _pieces(body, depth):
        pieces.append(piece)
        num_characters += len(piece)
        if num_characters > PAUSE_AFTER:
            if asyncio._get_running_loop() is None:
                time.sleep(PAUSE_S)
            num_characters = 0
    return "".join(pieces)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, list) and value:
        for at, item in enumerate(value):
            yield "," if at else "["
            yield from _pieces(item, depth - 1)
        yield "]"
    elif depth and isinstance(value, dict) and value:
        for at, (key, item) in enumerate(value.items()):
            yield f"{',' if at else '{'}{to_json(key)}:"
            yield from _pieces(item, depth - 1)
        yield "}"
    else:
        yield to_json(value)

"""Long JSON, written piece by piece, so that other threads can run between two pieces.

Knows JSON values; `json.dumps` holds the interpreter until it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def to_json(body: Any) -> str:
    """Compact JSON. Non-ASCII characters are escaped, so that half a surrogate pair does no harm."""
    return json.dumps(body, separators=(",", ":"))


def to_long_json(body: Any, depth: int) -> str:
    """Like `to_json`, but lists and objects down to this depth are written item by item."""
    return "".join(_pieces(body, depth))


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

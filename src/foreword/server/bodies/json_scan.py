"""JSON from strangers: how much is in it, found before anything is made of it, and what it says.

Knows bytes and JSON's brackets. Counting is compiled, and done without Python's lock, so that others run meanwhile.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from numba import njit

QUOTE, BACKSLASH, COMMA = 34, 92, 44
OPEN_LIST, CLOSE_LIST, OPEN_OBJECT, CLOSE_OBJECT = 91, 93, 123, 125


class JsonSize(NamedTuple):
    """What `json.loads` would have to make; upper bounds for a text that is not JSON."""

    num_values: int
    """Values, objects' keys left out."""
    num_containers: int
    """Those of them that are lists or objects."""
    depth: int
    """Most lists and objects inside each other."""


def scan_json(text: bytes) -> JsonSize:
    """The size of a JSON text in UTF-8: about a millisecond for a million bytes."""
    return JsonSize(*(int(count) for count in _scan(np.frombuffer(text, np.uint8))))


def parse_json(text: str) -> Any:
    """What a text says. Raises ValueError for what is not JSON: also for NaN, and for numbers beyond a float."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _count(text: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
    num_commas = num_containers = depth = most = 0
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
            most = max(most, depth)
        elif character in (CLOSE_LIST, CLOSE_OBJECT):
            depth -= 1
        at += 1
    return num_commas + num_containers + 1, num_containers, most


try:
    _scan = njit(cache=True, nogil=True)(_count)
except RuntimeError:  # a file system that is read only
    _scan = njit(nogil=True)(_count)

"""Lists of numbers as JSON writes them, read by compiled code: most of a large recording is that.

Knows bytes and numbers; knows nothing of lines. numba compiles the loop when it is first used, once per machine.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_DIGITS = 19
"""Of numbers that certainly fit into 64 bits."""


def read_numbers(text: bytes, count: int) -> npt.NDArray[np.uint64] | None:
    """`1, 2,3` -> its numbers [count]; None unless it is just so many, each of at most `MAX_DIGITS` digits."""
    numbers = np.empty(count, np.uint64)
    return numbers if _compile()(np.frombuffer(text, np.uint8), numbers) else None


@functools.cache
def _compile() -> Any:
    from numba import njit  # slow to import

    return njit(cache=True)(_read_numbers)


def _read_numbers(text: npt.NDArray[np.uint8], numbers: npt.NDArray[np.uint64]) -> bool:
    """Compiled: whether `text` is a list of just so many numbers. Changes `numbers`."""
    num_read = num_digits = 0
    value = np.uint64(0)
    is_over = False  # a space after a number: only a comma may follow
    for at in range(len(text) + 1):
        character = text[at] if at < len(text) else np.uint8(44)
        if 48 <= character <= 57:
            if is_over or num_digits == MAX_DIGITS or (num_digits > 0 and value == 0):
                return False
            value = value * np.uint64(10) + np.uint64(character - 48)
            num_digits += 1
        elif character == 32:
            is_over = num_digits > 0
        elif character == 44 and num_digits > 0 and num_read < len(numbers):
            numbers[num_read] = value
            num_read += 1
            num_digits = 0
            value = np.uint64(0)
            is_over = False
        else:
            return False
    return num_read == len(numbers)

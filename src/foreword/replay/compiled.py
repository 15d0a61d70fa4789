"""Loops over single blocks and digits. numba compiles them at their first call, once per machine.

This module knows only arrays. Its callers, `curve` and `trace`, know what the arrays mean; they import it late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.kernels.runtime.compiled import cached

if TYPE_CHECKING:
    from foreword.replay.curve import Tables, Uses

Counts = npt.NDArray[np.int32]

MAX_DIGITS = 19
"""The most digits that always fit into 64 bits."""

COMMA, SPACE, ZERO, NINE = 44, 32, 48, 57


@cached()
def read_numbers(text: npt.NDArray[np.uint8], numbers: npt.NDArray[np.uint64]) -> bool:
    """Read a text like `1, 2,3` into `numbers`. Returns False for another form or count, or if a number is too long."""
    num_read = num_digits = 0
    value = np.uint64(0)
    is_over = False  # a space after a number: only a comma may follow
    for at in range(len(text) + 1):
        character = text[at] if at < len(text) else np.uint8(COMMA)
        if ZERO <= character <= NINE:
            if is_over or num_digits == MAX_DIGITS or (num_digits > 0 and value == 0):
                return False
            value = value * np.uint64(10) + np.uint64(character - ZERO)
            num_digits += 1
        elif character == SPACE:
            is_over = num_digits > 0
        elif character == COMMA and num_digits > 0 and num_read < len(numbers):
            numbers[num_read] = value
            num_read += 1
            num_digits = 0
            value = np.uint64(0)
            is_over = False
        else:
            return False
    return num_read == len(numbers)


@cached()
def place_blocks(buckets: npt.NDArray[np.int32], key_of: npt.NDArray[np.uint64], num_blocks: int) -> None:
    """Fill an empty hash table with the first `num_blocks` blocks."""
    for block in range(num_blocks):
        buckets[_find(buckets, key_of, key_of[block])] = block


@cached()
def use_blocks(
    tables: Tables,
    uses: Uses,
    keys: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.int64],
    times: npt.NDArray[np.float64],
    num_blocks: int,
    next_stamp: int,
) -> tuple[int, int]:
    """Record that requests use their blocks, one request after the other.

    `keys`: the keys of all requests, concatenated. `lengths`: the number of keys of each request. `num_blocks`,
    `next_stamp`: the number of known blocks and the next stamp before the call. Returns both as they are after it.

    Changes `tables`, which must have room for the blocks, and `uses`.
    """
    buckets, key_of, stamp_of, last_use, block_of_stamp, counts = tables
    distances, idle = uses
    blocks = np.empty(len(keys), np.int32)
    end = 0
    for request in range(len(lengths)):
        start, end = end, end + lengths[request]
        num_stamps = num_blocks
        stamp_before = distance = -1
        for at in range(start, end):
            bucket = _find(buckets, key_of, keys[at])
            if buckets[bucket] < 0:
                buckets[bucket] = num_blocks
                key_of[num_blocks] = keys[at]
                stamp_of[num_blocks] = -1
                num_blocks += 1
            block = buckets[bucket]
            blocks[at] = block
            stamp = stamp_of[block]
            if stamp < 0:
                continue
            if stamp == stamp_before - 1:  # this block and the last one were neighbours in an earlier request, too
                distance += 1
            else:
                distance = num_stamps - _count_before(counts, stamp)
            stamp_before = stamp
            distances[at] = distance
            idle[at] = times[request] - last_use[block]
        for at in range(start, end):
            if stamp_of[blocks[at]] >= 0:
                _add(counts, stamp_of[blocks[at]], -1)
                stamp_of[blocks[at]] = -1
        for at in range(end - 1, start - 1, -1):
            block = blocks[at]
            if stamp_of[block] < 0:  # else the block occurs twice in the request
                stamp_of[block] = next_stamp
                last_use[block] = times[request]
                block_of_stamp[next_stamp] = block
                _add(counts, next_stamp, 1)
                next_stamp += 1
    return num_blocks, next_stamp


@cached()
def _find(buckets: npt.NDArray[np.int32], key_of: npt.NDArray[np.uint64], key: np.uint64) -> np.uint64:
    """Returns the bucket of a key's block. If there is no such block, returns the empty bucket for it."""
    mask = np.uint64(len(buckets) - 1)
    bucket = key & mask
    while buckets[bucket] >= 0 and key_of[buckets[bucket]] != key:
        bucket = (bucket + np.uint64(1)) & mask
    return bucket


@cached()
def _count_before(counts: Counts, stamp: int) -> int:
    """The number of stamps in use that are lower than this stamp."""
    count = 0
    while stamp > 0:
        count += counts[stamp]
        stamp &= stamp - 1
    return count


@cached()
def _add(counts: Counts, stamp: int, change: int) -> None:
    node = stamp + 1
    while node < len(counts):
        counts[node] += change
        node += node & -node

"""Draws of tokens, compiled by numba: rows of logits, options and uniform numbers as memory addresses.

The definition of a draw uses a sorted list of tokens, although the code does not sort:

    truncated        tokens by descending logit, equal logits by id; min_p, top_k and top_p each keep a beginning of
                     this list; the draw takes the token at which the running sum of weights passes uniform * sum
    not truncated    the same, with all tokens, by id

The largest logit of each block of tokens shows which blocks have candidates. To find the end of a beginning, the code
partitions the candidates about a pivot, as quicksort does, and goes on only with the side in which the beginning ends.
So the work is proportional to the number of candidates, on average.

A weight is a logit's share of probability as a whole number. Whole numbers add up to the same sum in any order. So a
total depends neither on blocks nor on a sort, and a draw without a sort takes the same token as a draw after a full
sort.

    logit --key--> int32 with the order of the logits;    logit --weight--> 0 to 2 ** WEIGHT_BITS
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from foreword.kernels.llvm import simd
from foreword.kernels.llvm.emit import fused
from foreword.kernels.runtime.compiled import compiled, record, worker

DRAWS = record(
    "logits",
    "row_bytes",  # from one row of logits to the next
    "element_bytes",  # of a logit: 2 is bfloat16, 4 is float32
    "vocab",
    "rows",  # the rows to draw from: [num_rows] int64
    "num_rows",
    "options",  # the options of each row: [num_rows, 5] float64
    "token_ids",  # written: [num_rows] int64
    "scratch",  # `scratch_bytes` for each thread
    "scratch_bytes",
    "counters",
)
"""The arguments of draws."""
SCALE, MIN_WEIGHT, TOP_K, TOP_P, UNIFORM = range(5)
"""Options of a draw:

SCALE: log2(e) / temperature. MIN_WEIGHT: the least weight to keep. TOP_K: the number of tokens to keep, `vocab` for all
tokens. TOP_P: the share of weight to keep, 1 for all weight. UNIFORM: a random number in [0, 1).
"""
THREADS_SEEN = 1
"""The index of the counter that gives threads their numbers. Each counter has its own cache line, 8 numbers."""
_INFINITY = 0x7F800000
SMALLER = 64.0
"""Each new try to collect the tokens of a top_p share includes weights that are smaller by this factor."""
_SLACK = 1e-3
"""`_bound` subtracts this from its exponent of 2, because of rounding errors. A bound that is too low does no harm."""


def scratch_bytes(vocab: int) -> int:
    """The bytes of scratch memory that one thread needs, in whole cache lines."""
    return -(-(16 * (vocab + BLOCK) + 12 * (-(-vocab // BLOCK)) + 4 * BLOCK) // 64) * 64


@compiled
def _swap(keys: Any, amounts: Any, first: int, second: int) -> None:
    keys[first], keys[second] = keys[second], keys[first]
    amounts[first], amounts[second] = amounts[second], amounts[first]


@compiled
def shortest_beginning(keys: Any, weights: Any, end: Any, target: Any, unit: int) -> tuple[Any, Any]:
    """Order candidates [0, end) so that the shortest beginning that adds up to `target` comes first.

    The order is by descending keys, and all keys differ. A candidate counts as `unit`, or as its weight if `unit` is 0;
    all candidates must add up to at least `target`. Returns the length and the sum of the beginning. The sum reaches
    `target` only at the last candidate of the beginning.

        0 .............. start ......... middle .......... end ................
        certainly inside  |   larger  | pivot |  smaller    |  certainly outside
    """
    start: Any = 0
    before: Any = np.int64(0)
    while True:
        first, half, last = keys[start], keys[(start + end) // 2], keys[end - 1]
        if min(first, last) < half < max(first, last):
            _swap(keys, weights, (start + end) // 2, end - 1)
        elif min(half, last) < first < max(half, last):
            _swap(keys, weights, start, end - 1)
        pivot, middle = keys[end - 1], start
        larger: Any = np.int64(0)
        for at in range(start, end - 1):  # without branches: the processor would predict half of them wrongly
            candidate, amount = keys[at], weights[at]
            is_larger = np.int64(candidate > pivot)
            keys[at], weights[at] = keys[middle], weights[middle]
            keys[middle], weights[middle] = candidate, amount
            larger += (unit if unit else amount) * is_larger
            middle += is_larger
        _swap(keys, weights, middle, end - 1)
        if before + larger >= target:
            end = middle
            continue
        before += larger + (unit if unit else weights[middle])
        start = middle + 1
        if before >= target or start == end:
            return start, before


@compiled
def _packed_key(key32: Any, number: int) -> Any:
    """A key and its token's number as uint64. Of equal keys, the first token's uint64 is the largest."""
    return np.uint64(np.int64(key32) + np.int64(2**31)) << np.uint64(32) | np.uint64(0xFFFFFFFF - number)


@compiled
def _value_of(key32: Any) -> Any:
    """The logit of a key."""
    bits = np.int32(key32 ^ ((key32 >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.float64(np.int32(bits).view(np.float32))


@compiled
def _bound(top: Any, scale: Any, least: Any) -> Any:
    """A lower bound of the keys of all logits whose weight is at least `least`."""
    power = np.log2(least) - WEIGHT_BITS - 1.0 - _SLACK
    value: Any = max(top + power / scale, -3.4e38)  # a float32 whose key is more than 2 above the least key
    return np.int32(key(np.float32(value)) - 2)


@compiled
def _collect(row: Any, options: Any, top: Any, bound: Any, scratch: Any) -> tuple[Any, Any]:
    """Collect tokens with keys from `bound` up and with enough weight; return their number and sum of weights."""
    values, largest, _, keys, weights = scratch
    count: Any = 0
    total: Any = np.int64(0)
    scale, least, lowest = options[SCALE], max(np.int64(options[MIN_WEIGHT]), 1), _packed_key(bound, 0xFFFFFFFF)
    for block in range(len(largest)):
        if largest[block] < bound:
            continue
        read_block(row, block, values)
        own_keys, own_weights = keys[count : count + BLOCK], weights[count : count + BLOCK]
        for at in range(BLOCK):
            own_keys[at] = _packed_key(key(values[at]), block * BLOCK + at)
            own_weights[at] = weight(values[at], top, scale)
        for at in range(BLOCK):  # without branches; kept candidates move to the front
            candidate, amount = own_keys[at], own_weights[at]
            is_kept = np.int64(candidate >= lowest) & np.int64(amount >= least)
            keys[count], weights[count] = candidate, amount
            count += is_kept
            total += amount * is_kept
    return count, total


@compiled
def _kth_largest(top_k: int, scratch: Any) -> Any:
    """The `top_k`-th largest of the blocks' largest keys.

    At least `top_k` tokens have this key or a larger key.
    """
    _, largest, _, keys, weights = scratch
    for block in range(len(largest)):
        keys[block] = _packed_key(largest[block], block)
    length, _ = shortest_beginning(keys, weights, len(largest), top_k, 1)
    return np.int32(np.int64(keys[length - 1] >> np.uint64(32)) - np.int64(2**31))


@compiled
def _place(uniform: Any, total: Any) -> Any:
    """The running sum of weights that a draw has to reach."""
    return min(np.int64(uniform * np.float64(total)), total - 1) + 1


@compiled
def _first_of(row: Any, key32: Any, scratch: Any) -> Any:
    """The first token with this key."""
    values, largest, _, _, _ = scratch
    for block in range(len(largest)):
        if largest[block] == key32:
            read_block(row, block, values)
            for at in range(BLOCK):
                if key(values[at]) == key32:
                    return block * BLOCK + at
    return 0


@compiled
def _draw_of_all(row: Any, options: Any, top: Any, total: Any, scratch: Any) -> Any:
    """Draw from all tokens, in the order of their ids."""
    values, _, sums, _, _ = scratch
    missing = _place(options[UNIFORM], total)
    for block in range(len(sums)):
        if sums[block] < missing:
            missing -= sums[block]
            continue
        read_block(row, block, values)
        for at in range(BLOCK):
            missing -= weight(values[at], top, options[SCALE])
            if missing <= 0:
                return block * BLOCK + at
    return 0


@compiled
def _share(top_p: Any, total: Any) -> Any:
    """The least sum of weights that top_p keeps."""
    return min(max(np.int64(np.ceil(top_p * np.float64(total))), 1), total)


@compiled
def _collect_cut(row: Any, options: Any, top: Any, scratch: Any) -> tuple[Any, Any]:
    """Collect the tokens that top_k and min_p keep; return their number and their sum of weights."""
    _, largest, _, keys, weights = scratch
    top_k = int(options[TOP_K])
    bound = _bound(top, options[SCALE], max(options[MIN_WEIGHT], 1.0))
    if top_k < len(largest):
        bound = max(bound, _kth_largest(top_k, scratch))
    count, total = _collect(row, options, top, bound, scratch)
    if top_k < count:
        count, _ = shortest_beginning(keys, weights, count, top_k, 1)
        total = weights[:count].sum()
    return count, total


@compiled
def _collect_share(row: Any, options: Any, top: Any, target: Any, scratch: Any) -> Any:
    """Collect the likeliest tokens, until they add up to at least `target`; return their number."""
    lowest, least = _bound(top, options[SCALE], 1.0), 2.0**WEIGHT_BITS
    while True:
        least = max(least / SMALLER, 1.0)
        bound = max(lowest, _bound(top, options[SCALE], least))
        count, total = _collect(row, options, top, bound, scratch)
        if total >= target or bound == lowest:
            return count


@compiled
def draw_token(row: Any, options: Any, scratch: Any) -> Any:
    """Draw a token from a row, and return it.

    `scratch`: arrays that are written:

        values      a block of logits, [BLOCK]
        largest     the largest key of each block, [blocks]
        sums        the sum of weights of each block, [blocks]
        keys        keys of candidates, [vocab + BLOCK]
        weights     weights of candidates, [vocab + BLOCK]
    """
    _, _, vocab = row
    values, largest, sums, keys, weights = scratch
    top_p = options[TOP_P]
    top_key = find_largest(row, values, largest)
    if not -_INFINITY <= top_key < _INFINITY:  # a logit is infinite or NaN: draw as without temperature
        return _first_of(row, top_key, scratch)
    top = _value_of(top_key)
    if int(options[TOP_K]) < vocab or options[MIN_WEIGHT] > 0:
        count, total = _collect_cut(row, options, top, scratch)
        target = _share(top_p, total)
    else:
        total = add_weights(row, values, sums, top, options[SCALE])
        if top_p >= 1.0:
            return _draw_of_all(row, options, top, total, scratch)
        target = _share(top_p, total)
        count = _collect_share(row, options, top, target, scratch)
    if top_p < 1.0:
        count, total = shortest_beginning(keys, weights, count, target, 0)
    length, _ = shortest_beginning(keys, weights, count, _place(options[UNIFORM], total), 0)
    return np.int64(0xFFFFFFFF) - np.int64(keys[length - 1] & np.uint64(0xFFFFFFFF))


@worker(DRAWS)
def draw_rows(arguments: Any) -> None:
    """Run in every thread: draw from rows until no row is left."""
    a = carray(arguments, 1)[0]
    at = a.scratch + a.scratch_bytes * simd.fetch_add(a.counters + 64 * THREADS_SEEN, 1)
    blocks, room = (a.vocab + BLOCK - 1) // BLOCK, a.vocab + BLOCK
    keys, weights = carray(uint64s_at(at), room), carray(int64s_at(at + 8 * room), room)
    at += 16 * room
    sums, largest = carray(int64s_at(at), blocks), carray(int32s_at(at + 8 * blocks), blocks)
    values = carray(float32s_at(at + 12 * blocks), BLOCK)
    options, token_ids = carray(float64s_at(a.options), (a.num_rows, 5)), carray(int64s_at(a.token_ids), a.num_rows)
    rows = carray(int64s_at(a.rows), a.num_rows)
    while True:
        number = simd.fetch_add(a.counters, 1)
        if number >= a.num_rows:
            return
        row = (a.logits + rows[number] * a.row_bytes, a.element_bytes, a.vocab)
        token_ids[number] = draw_token(row, options[number], (values, largest, sums, keys, weights))


WEIGHT_BITS = 42
"""The likeliest token weighs 2 ** WEIGHT_BITS; a token that is 2 ** 43 times less likely weighs nothing."""
MOST_WORDS = 1 << 63 - WEIGHT_BITS
"""The largest vocabulary whose weights certainly add up within 64 bits."""
MOST_SCALE = 1e300
"""The largest factor of logits. With this factor, only tokens with the largest logit have a weight above 0."""
BLOCK = 64
"""The number of tokens in a block. Each block's largest key and sum of weights are kept."""

_LEAST_POWER = -64.0
"""Lower exponents of 2 are raised to this exponent, at which a token weighs nothing."""
_ROUNDING, _WHOLE = 1.5 * 2.0**52, 2.0**52
"""If one of these is added to a number, the sum's last bits are the nearest whole number. _WHOLE does this only for
positive numbers."""
_LOW_BITS = (1 << 52) - 1
_TERMS = [1.0]
for _number in range(1, 12):  # the Taylor series of 2 ** x, |x| <= 1/2: the first term left out is below 2 ** -47
    _TERMS.append(_TERMS[-1] * 0.6931471805599453 / _number)
_C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11 = _TERMS[1:]


def _array_at(kind: Any) -> Any:
    """Make a numba function that turns an address into a pointer to scalars of a kind."""
    pointer = types.CPointer(kind)

    @intrinsic
    def at(_context: Any, _address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.intp), codegen

    return at


uint16s_at, float32s_at, int32s_at = _array_at(types.uint16), _array_at(types.float32), _array_at(types.int32)
uint64s_at, int64s_at, float64s_at = _array_at(types.uint64), _array_at(types.int64), _array_at(types.float64)


@compiled
def read_block(row: Any, block: int, values: Any) -> None:
    """Copy a block of logits to `values` [BLOCK] float32: -0 becomes 0, and -inf fills the last block.

    `row`: address, bytes of a logit (2: bfloat16, 4: float32), and number of logits.
    """
    address, element_bytes, vocab = row
    first = block * BLOCK
    length = min(vocab - first, BLOCK)
    if element_bytes == 2:
        bits = carray(uint16s_at(address + 2 * first), length)
        for at in range(length):
            values[at] = np.uint32(np.uint32(bits[at]) << np.uint32(16)).view(np.float32) + np.float32(0.0)
    else:
        wide = carray(float32s_at(address + 4 * first), length)
        for at in range(length):
            values[at] = wide[at] + np.float32(0.0)
    for at in range(length, BLOCK):
        values[at] = -np.inf


@compiled
def key(value: Any) -> Any:
    """An int32 for a float32: the larger of two numbers has the larger key.

    A NaN has a key above that of infinity, or below that of -infinity.
    """
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def weight(value: Any, top: Any, scale: Any) -> Any:
    """2 ** ((value - top) * scale), in units of 2 ** -WEIGHT_BITS, as int64; 0 for NaN."""
    power = (np.float64(value) - top) * scale
    power = power if power > _LEAST_POWER else _LEAST_POWER
    shifted = power + _ROUNDING
    fraction = power - (shifted - _ROUNDING)
    share = fused(_C11, fraction, _C10)
    share = fused(share, fraction, _C9)
    share = fused(share, fraction, _C8)
    share = fused(share, fraction, _C7)
    share = fused(share, fraction, _C6)
    share = fused(share, fraction, _C5)
    share = fused(share, fraction, _C4)
    share = fused(share, fraction, _C3)
    share = fused(share, fraction, _C2)
    share = fused(share, fraction, _C1)
    share = fused(share, fraction, 1.0)
    exponent = (np.float64(shifted).view(np.int64) + np.int64(WEIGHT_BITS)) << np.int64(52)
    scaled = np.int64(np.float64(share).view(np.int64) + exponent).view(np.float64)
    return np.float64(scaled + _WHOLE).view(np.int64) & np.int64(_LOW_BITS)


@compiled
def find_largest(row: Any, values: Any, keys: Any) -> Any:
    """Fill `keys` [blocks] with the largest key of each block of a row; returns the largest of all.

    `values` [BLOCK] float32 is overwritten, also by `add_weights`.
    """
    largest = np.int32(-(2**31))
    for block in range(len(keys)):
        read_block(row, block, values)
        block_largest = np.int32(-(2**31))
        for at in range(BLOCK):
            block_largest = max(block_largest, key(values[at]))
        keys[block] = block_largest
        largest = max(largest, block_largest)
    return largest


@compiled
def add_weights(row: Any, values: Any, sums: Any, top: Any, scale: Any) -> Any:
    """Fill `sums` [blocks] with the sum of weights of each block of a row; returns the sum of all."""
    total = np.int64(0)
    for block in range(len(sums)):
        read_block(row, block, values)
        block_sum = np.int64(0)
        for at in range(BLOCK):
            block_sum += weight(values[at], top, scale)
        sums[block] = block_sum
        total += block_sum
    return total

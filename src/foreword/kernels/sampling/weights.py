"""Weights of tokens, compiled by numba: each logit's share of probability as a whole number.

Whole numbers add up to the same sum in any order. So a total depends neither on blocks nor on a sort, and a draw that
never sorts takes the very token that a full sort would give it.

    logit --key--> int32 with the order of the logits;    logit --weight--> 0 to 2 ** WEIGHT_BITS
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from foreword.kernels.llvm.emit import fused
from foreword.kernels.runtime.compiled import compiled

WEIGHT_BITS = 42
"""The likeliest token weighs 2 ** WEIGHT_BITS; one that is 2 ** 43 times less likely weighs nothing."""
MOST_WORDS = 1 << 63 - WEIGHT_BITS
"""The largest vocabulary whose weights certainly add up within 64 bits."""
MOST_SCALE = 1e300
"""The largest factor of logits: it already leaves every logit but the largest without weight."""
BLOCK = 64
"""Tokens of one block: its largest key and its sum of weights are kept."""

_LEAST_POWER = -64.0
"""Powers below it weigh nothing, as this one does."""
_ROUNDING, _WHOLE = 1.5 * 2.0**52, 2.0**52
"""Added to a number, the first leaves a whole number in the sum's last bits, the second a positive one."""
_LOW_BITS = (1 << 52) - 1
_TERMS = [1.0]
for _number in range(1, 12):  # the Taylor series of 2 ** rest, |rest| <= 1/2: the first term left out is below 2 ** -47
    _TERMS.append(_TERMS[-1] * 0.6931471805599453 / _number)
_C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11 = _TERMS[1:]


def _array_at(kind: Any) -> Any:
    """A numba function of an address: a pointer to scalars of a kind."""
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
    """An int32 that orders as its float32 does; keys beyond those of infinities are of no numbers."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def weight(value: Any, top: Any, scale: Any) -> Any:
    """2 ** ((value - top) * scale), in units of 2 ** -WEIGHT_BITS, as int64; 0 where that is no number."""
    power = (np.float64(value) - top) * scale
    power = power if power > _LEAST_POWER else _LEAST_POWER
    shifted = power + _ROUNDING
    rest = power - (shifted - _ROUNDING)
    share = fused(_C11, rest, _C10)
    share = fused(share, rest, _C9)
    share = fused(share, rest, _C8)
    share = fused(share, rest, _C7)
    share = fused(share, rest, _C6)
    share = fused(share, rest, _C5)
    share = fused(share, rest, _C4)
    share = fused(share, rest, _C3)
    share = fused(share, rest, _C2)
    share = fused(share, rest, _C1)
    share = fused(share, rest, 1.0)
    exponent = (np.float64(shifted).view(np.int64) + np.int64(WEIGHT_BITS)) << np.int64(52)
    scaled = np.int64(np.float64(share).view(np.int64) + exponent).view(np.float64)
    return np.float64(scaled + _WHOLE).view(np.int64) & np.int64(_LOW_BITS)


@compiled
def find_largest(row: Any, values: Any, keys: Any) -> Any:
    """Fill `keys` [blocks] with the largest key of each block of a row; returns the largest of all.

    `values` [BLOCK] float32 is written, here and below.
    """
    largest = np.int32(-(2**31))
    for block in range(len(keys)):
        read_block(row, block, values)
        most = np.int32(-(2**31))
        for at in range(BLOCK):
            most = max(most, key(values[at]))
        keys[block] = most
        largest = max(largest, most)
    return largest


@compiled
def add_weights(row: Any, values: Any, sums: Any, top: Any, scale: Any) -> Any:
    """Fill `sums` [blocks] with the sum of weights of each block of a row; returns the sum of all."""
    total = np.int64(0)
    for block in range(len(sums)):
        read_block(row, block, values)
        own = np.int64(0)
        for at in range(BLOCK):
            own += weight(values[at], top, scale)
        sums[block] = own
        total += own
    return total

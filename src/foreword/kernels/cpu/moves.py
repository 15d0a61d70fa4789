"""Moves KV within its blocks, in one pass: keys are copied and rotated (rotary embedding), values are copied.

torch needs about fifteen operations for this, each with a pass over memory. Products and sums are rounded one by one,
in float32, and a rotated element is then rounded to its own type. So the bits equal those of the same formula in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.kernels.runtime.compiled import cached, inlined


@inlined
def _widened(bits: Any) -> Any:
    """A bfloat16 as a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def _rounded(value: Any) -> Any:
    """A float32 as the nearest bfloat16, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@cached(nogil=True, error_model="numpy")
def copy_rows(blocks: Any, sources: Any, targets: Any) -> None:
    """Copy the row in slot `sources[i]` of `blocks` [slots, elements] to slot `targets[i]`, for each i in order."""
    for at in range(len(sources)):
        blocks[targets[at]] = blocks[sources[at]]


@cached(nogil=True, error_model="numpy")
def turn_rows_bf16(keys: Any, targets: Any, owners: Any, cosines: Any, sines: Any, pairs: Any) -> None:
    """Rotate row `targets[i]` of keys [slots, heads, dim], the bits of bfloat16, by the angles of owner `owners[i]`.

    `cosines`, `sines` [owners, pairs] float32; `pairs`: the first element of the first pair, the distance to the next
    pair's first element, and the distance between the two elements of a pair.
    """
    start, step, apart = pairs
    for at in range(len(targets)):
        cosine, sine = cosines[owners[at]], sines[owners[at]]
        for head in range(keys.shape[1]):
            row = keys[targets[at], head]
            for pair in range(len(cosine)):
                first = start + step * pair
                x, y = _widened(row[first]), _widened(row[first + apart])
                row[first] = _rounded(x * cosine[pair] - y * sine[pair])
                row[first + apart] = _rounded(y * cosine[pair] + x * sine[pair])


@cached(nogil=True, error_model="numpy")
def turn_rows_f32(keys: Any, targets: Any, owners: Any, cosines: Any, sines: Any, pairs: Any) -> None:
    """`turn_rows_bf16` for keys in float32."""
    start, step, apart = pairs
    for at in range(len(targets)):
        cosine, sine = cosines[owners[at]], sines[owners[at]]
        for head in range(keys.shape[1]):
            row = keys[targets[at], head]
            for pair in range(len(cosine)):
                first = start + step * pair
                x, y = row[first], row[first + apart]
                row[first] = x * cosine[pair] - y * sine[pair]
                row[first + apart] = y * cosine[pair] + x * sine[pair]

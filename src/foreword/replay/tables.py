"""The arrays that `LruStack` keeps and that its compiled loops change."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.replay.keys import PrefixKeys

FloatArray = npt.NDArray[np.float64]


class Uses(NamedTuple):
    """Facts about blocks at the time when requests used them, laid end to end."""

    distances: Int64Array
    """[blocks]: distance of each, 0 for those never seen."""
    idle: FloatArray
    """[blocks]: time since the last use of each; meaningless for those never seen."""


class Tables(NamedTuple):
    """Blocks are numbered in the order in which they came first.

    A block's last use has a stamp, and the distance is the number of stamps in use from the block's own on:

        stamps    . x . x | . . x x | x . . .        x: some block's last use
                      ^ 1   +   2   + 1  = 4
    """

    block_of_bucket: npt.NDArray[np.int32]
    """[a power of 2, at least twice the blocks]: hash table with linear probing; -1: empty."""
    key_of: PrefixKeys
    """[blocks]"""
    stamp_of: Int64Array
    """[blocks]; -1: none."""
    last_use: FloatArray
    """[blocks]"""
    block_of_stamp: npt.NDArray[np.int32]
    """[stamps]; of a stamp in use, the block's own `stamp_of` is that stamp."""
    counts: npt.NDArray[np.int32]
    """[stamps + 1]: Fenwick tree; entry i counts the stamps in use among the (i & -i) that end before stamp i."""

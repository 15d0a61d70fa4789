"""Keys of prefixes: one 64-bit number for each block of a prompt, equal exactly for equal whole prefixes.

A recording's ids may stand for single blocks or for whole prefixes. In both cases this module computes prefix keys from
the ids. If the ids already stand for whole prefixes, two keys are equal exactly if their ids are equal.

    key(i) = mix( sum of mix(content id j) * odd(j), j = 0 .. i )

Because a key is a sum, a few array operations compute all keys. Among n different prefixes, two have equal keys with
probability n * n / 2**65 (3e-6 for ten million); a simulation then has a wrong hit. Keys that guard real blocks are
made by `foreword.cache.keys.hashing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

PrefixKeys = npt.NDArray[np.uint64]
NO_KEYS: PrefixKeys = np.empty(0, np.uint64)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: PrefixKeys) -> PrefixKeys:
    """A bijection of 64-bit numbers. Every output bit depends on every input bit (splitmix64's finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: PrefixKeys = values ^ (values >> np.uint64(31))
    return mixed


@lru_cache
def _odd_numbers(count: int) -> PrefixKeys:
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


def _multipliers(count: int) -> PrefixKeys:
    """The first `count` odd multipliers. They are computed up to a power of 2 and kept, so most calls compute none."""
    return _odd_numbers(max(1024, 1 << count.bit_length()))[:count]


def chain(content_ids: PrefixKeys) -> PrefixKeys:
    """Turn content ids of consecutive blocks, [blocks], into the key of the prefix that each block ends, [blocks]."""
    return chain_each(content_ids, [len(content_ids)])


def chain_each(content_ids: PrefixKeys, lengths: Sequence[int]) -> PrefixKeys:
    """Do the same as `chain` for several prompts, concatenated: [all blocks]. Prompt i has `lengths[i]` blocks.

    For short prompts, one call is ten times faster than a call of `chain` for each.
    """
    counts = np.array(lengths, np.int64)
    starts = np.cumsum(counts) - counts
    positions = np.arange(len(content_ids)) - np.repeat(starts, counts)
    spread = _mix(content_ids + _GOLDEN) * _multipliers(int(counts.max(initial=0)))[positions]
    sums = np.cumsum(spread, dtype=np.uint64)
    before = np.concatenate((np.zeros(1, np.uint64), sums))[starts]
    return _mix(sums - np.repeat(before, counts))


def as_content_ids(ids: Sequence[int | str]) -> PrefixKeys:
    """Turn numbers or strings that name contents into 64-bit ids. Raises ValueError for anything else."""
    try:
        numbers = np.array(ids, np.uint64) if set(map(type, ids)) <= {int} else None
    except OverflowError:
        numbers = None
    if numbers is not None:
        return numbers
    return np.array([_content_id(name) for name in ids], np.uint64)


def _content_id(name: object) -> int:
    if (type(name) is not int or name < 0) and not isinstance(name, str):
        raise ValueError(f"{name!r} is neither a number of at least 0 nor a string")
    return int.from_bytes(hashlib.blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def content_ids_of_tokens(token_ids: npt.ArrayLike, block_tokens: int) -> PrefixKeys:
    """Turn token ids, [tokens], into content ids, [blocks of `block_tokens`]. A partial last block gets an id, too."""
    tokens = np.asarray(token_ids).astype(np.int64).view(np.uint64)
    num_blocks = -(-len(tokens) // block_tokens)
    padded = np.zeros(num_blocks * block_tokens, np.uint64)
    padded[: len(tokens)] = _mix(tokens + _GOLDEN)  # no token becomes 0, so a partial block differs from full ones
    of_block: PrefixKeys = (padded.reshape(num_blocks, block_tokens) * _multipliers(block_tokens)).sum(axis=1)
    return of_block

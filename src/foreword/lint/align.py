"""Alignment: which tokens of two prompts agree, in order.

The method is patience diff (Bram Cohen). Runs of tokens that occur once in each prompt are anchors. Among all choices
of anchors that ascend in both prompts, the one with the most tokens is taken, and each of its anchors is extended to
both sides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import common_length

TokenIds = npt.NDArray[np.int32]
Shingles = npt.NDArray[np.uint64]

SHINGLE_TOKENS = 6
"""Length in tokens of a run that two prompts hardly share by accident."""
MAX_RUNS = 400
"""The most runs from which an alignment is made, because that takes quadratic time. If there are more, the longest are
used."""
_FACTORS = np.cumprod(np.full(SHINGLE_TOKENS, 0x9E3779B97F4A7C15, np.uint64)) | np.uint64(1)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)


class Block(NamedTuple):
    """`length` tokens that agree. They begin at `ours` in one prompt and at `theirs` in the other."""

    ours: int
    theirs: int
    length: int


def shingles(tokens: TokenIds) -> Shingles:
    """Return a hash of each run of `SHINGLE_TOKENS` tokens, [tokens - SHINGLE_TOKENS + 1]."""
    count = len(tokens) - SHINGLE_TOKENS + 1
    if count < 1:
        return np.empty(0, np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIXER
    mixed ^= mixed >> np.uint64(31)
    total = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_FACTORS):
        total += mixed[offset : offset + count] * factor
    return total


def aligned(ours: TokenIds, theirs: TokenIds) -> list[Block]:
    """Return the blocks of tokens that agree, ascending in both prompts. The first is the (maybe empty) prefix."""
    begin = common_length(ours, theirs)
    blocks = [Block(0, 0, begin)]
    chain = _chain(_runs(ours[begin:], theirs[begin:]))
    end_of_both = Block(len(ours) - begin, len(theirs) - begin, 0)
    for number, run in enumerate(chain):
        last = blocks[-1]
        start, start_theirs, end = run.ours + begin, run.theirs + begin, run.ours + begin + run.length
        free = min(start - last.ours - last.length, start_theirs - last.theirs - last.length)
        if free < 0:  # the last block was extended into this run
            start, start_theirs, free = start - free, start_theirs - free, 0
            if start >= end:
                continue
        back = common_length(ours[start - free : start][::-1], theirs[start_theirs - free : start_theirs][::-1])
        start, start_theirs = start - back, start_theirs - back
        ahead = chain[number + 1] if number + 1 < len(chain) else end_of_both
        length = common_length(ours[start : ahead.ours + begin], theirs[start_theirs : ahead.theirs + begin])
        if (start, start_theirs) == (last.ours + last.length, last.theirs + last.length):
            blocks[-1] = last._replace(length=last.length + length)
        elif length:
            blocks.append(Block(start, start_theirs, length))
    return blocks


def _runs(ours: TokenIds, theirs: TokenIds) -> list[Block]:
    """Return runs of shingles that occur once in each prompt, in the order of the first prompt."""
    unique = []
    for tokens in (ours, theirs):
        values, places, counts = np.unique(shingles(tokens), return_index=True, return_counts=True)
        unique.append((values[counts == 1], places[counts == 1]))
    (mine, my_places), (their, their_places) = unique
    _, left, right = np.intersect1d(mine, their, assume_unique=True, return_indices=True)
    if not len(left):
        return []
    order = np.argsort(my_places[left])
    places, others = my_places[left][order], their_places[right][order]
    # Successive shingles are in one run if they begin equally far apart in both prompts, at most a shingle's length.
    steps, steps_theirs = np.diff(places), np.diff(others)
    breaks = np.flatnonzero((steps != steps_theirs) | (steps > SHINGLE_TOKENS)) + 1
    starts, ends = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(places)])) - 1
    lengths = places[ends] - places[starts] + SHINGLE_TOKENS
    runs = [Block(*map(int, run)) for run in zip(places[starts], others[starts], lengths, strict=True)]
    if len(runs) > MAX_RUNS:
        runs = sorted(sorted(runs, key=lambda run: -run.length)[:MAX_RUNS])
    return runs


def _chain(runs: list[Block]) -> list[Block]:
    """Choose runs that ascend in both prompts. Returns the choice with the most tokens."""
    if not runs:
        return []
    theirs, lengths = (np.array([run[field] for run in runs], np.int64) for field in (1, 2))
    weights = lengths.copy()
    before = np.full(len(runs), -1)
    for number in range(1, len(runs)):
        fits = np.where(theirs[:number] < theirs[number], weights[:number], -1)
        best = int(np.argmax(fits))
        if fits[best] > 0:
            weights[number] += fits[best]
            before[number] = best
    at, chain = int(np.argmax(weights)), []
    while at >= 0:
        chain.append(runs[at])
        at = int(before[at])
    return chain[::-1]

"""Slots: places at which prompts of one kind differ, although the prompts agree again after the place.

All prompts of a kind are aligned with one prompt of the kind, the pattern. A place of the pattern varies if enough of
the prompts that agree again after this place differ there.

    pattern   [ stable ][ slot ][ stable ........ ][ tail: no prompt agrees any more ]
    a prompt  [ stable ][ slot' ][ stable ....... ][ question ]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from foreword.lint.align import Block, TokenIds, aligned

VARIES = 0.1
"""A place varies if at least this share of the prompts differ there."""
MAX_JOINED = 8
"""The most successive differences that are joined into one change of order."""

Words = Callable[[TokenIds], tuple[str, ...]]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place at which prompts of one kind differ. `spans` has only prompts that agree again after it."""

    pattern: int
    """The index of the prompt with which the other prompts of the kind were compared."""
    spans: dict[int, Span] = field(default_factory=dict)
    """For each prompt, by index: the slot's first token, and the first token after the slot."""


def find_slots(prompts: Sequence[TokenIds], kind: Sequence[int], words: Words, least_tokens: int) -> list[Slot]:
    """Find the slots of prompts of one kind, in order. Differences less than `least_tokens` apart are one slot."""
    pattern = max(kind, key=lambda index: len(prompts[index]))
    alignments = {
        index: _trimmed(aligned(prompts[index], prompts[pattern]), least_tokens) for index in kind if index != pattern
    }
    length = len(prompts[pattern])
    # Entry 2 i is the gap before token i of the pattern, where other prompts may have tokens; entry 2 i + 1 is token i.
    differs, reaches = np.zeros(2 * length + 2, np.int64), np.zeros(2 * length + 2, np.int64)
    for index, blocks in alignments.items():
        reaches[0] += 1
        reaches[2 * _end(blocks) + 1] -= 1
        for begin, end in _differences(prompts[index], prompts[pattern], blocks, words):
            differs[2 * begin] += 1
            differs[2 * end + 1] -= 1
    differs, reaches = np.cumsum(differs), np.cumsum(reaches)
    places = np.flatnonzero((differs > 0) & (differs >= VARIES * reaches))
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 2 * least_tokens) + 1
    runs = [(int(run[0]) // 2, int(run[-1] + 1) // 2) for run in np.split(places, breaks)]
    slots = []
    for begin, end in runs:
        spans = {
            index: (_to_ours(blocks, begin, last=False), _to_ours(blocks, end, last=True))
            for index, blocks in alignments.items()
            if end + least_tokens <= _end(blocks)
        }
        if spans:
            slots.append(Slot(pattern, {pattern: (begin, end), **spans}))
    return slots


def _trimmed(blocks: list[Block], least_tokens: int) -> list[Block]:
    """Drop short blocks at the end, because these may agree by accident."""
    while len(blocks) > 1 and blocks[-1].length < least_tokens:
        blocks.pop()
    return blocks


def _end(blocks: Sequence[Block]) -> int:
    """Return the index of the pattern's first token after the last block, so after all tokens that agree."""
    return blocks[-1].theirs + blocks[-1].length


def _differences(ours: TokenIds, theirs: TokenIds, blocks: Sequence[Block], words: Words) -> list[Span]:
    """Return the spans of the pattern that differ, up to the last block. A change of order is one span."""
    gaps = [
        (before.ours + before.length, after.ours, before.theirs + before.length, after.theirs)
        for before, after in pairwise(blocks)
    ]
    spans, number = [], 0
    while number < len(gaps):
        begin, begin_theirs, last = gaps[number][0], gaps[number][2], number
        for end in range(number, min(len(gaps), number + MAX_JOINED)):
            mine, their = words(ours[begin : gaps[end][1]]), words(theirs[begin_theirs : gaps[end][3]])
            if len(mine) == len(their) and mine and Counter(mine) == Counter(their):
                last = end
                break
        spans.append((begin_theirs, gaps[last][3]))
        number = last + 1
    return spans


def _to_ours(blocks: Sequence[Block], place: int, *, last: bool) -> int:
    """Return the index in a prompt that corresponds to `place`, an index in the pattern.

    If the place is in a difference between two blocks: the first index that may correspond to it, or with `last` the
    last one.
    """
    if last:
        block = next((candidate for candidate in reversed(blocks) if candidate.theirs <= place), blocks[0])
        if place > block.theirs + block.length:
            return blocks[blocks.index(block) + 1].ours
        return block.ours + place - block.theirs
    block = next(candidate for candidate in blocks if place <= candidate.theirs + candidate.length)
    if place >= block.theirs:
        return block.ours + place - block.theirs
    before = blocks[max(0, blocks.index(block) - 1)]  # the place is in the difference between both blocks
    return before.ours + before.length

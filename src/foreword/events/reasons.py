"""Why a request of another engine did not find the rest of its prompt, from what the stream shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from foreword.cache import MissReason
from foreword.events.mirror import Key, Mirror, MirroredBlock

MOST_COMPARED = 256
"""The newest blocks after one prefix that a new block is compared with."""
NUM_SHOWN = 8
"""Tokens of each side that are kept after the first different one."""


@dataclass(frozen=True, slots=True)
class Why:
    """What a prompt missed after what it found."""

    reason: MissReason | None = None
    """None if all whole blocks of the prompt were found."""
    num_tokens: int = 0
    """The tokens with which a cached sequence began as the prompt does."""
    seconds_ago: float | None = None
    """When it was evicted."""
    was_reset: bool = False
    """The whole cache was emptied then."""
    ours: tuple[int, ...] = ()
    """The prompt's first tokens that no cached sequence has there."""
    theirs: tuple[int, ...] = ()
    """What the nearest cached sequence has instead; empty if it ends there."""


def why_missed(
    mirror: Mirror,
    place: tuple[str, int],
    path: Sequence[Key],
    num_found: int,
    num_known: int,
    gone: Mapping[Key, float],
) -> Why:
    """Why the block after the found ones was computed; all blocks of `path` are in the mirror.

    `num_known`: the blocks that the engine held and computed all the same; `gone`: the seconds since others of them
    were evicted.
    """
    if num_found == len(path):
        return Why()
    key, parent = path[num_found], path[num_found - 1] if num_found else None
    block = mirror.blocks[*place, key]
    start = num_found * block.block_size
    if num_known:
        is_last = num_found == len(path) - 1
        reason = MissReason.PARTIAL_BLOCK if is_last else MissReason.STATE_NOT_SAVED
        return Why(reason, start + num_known * block.block_size)
    if key in gone:
        return Why(MissReason.EVICTED, start, gone[key])
    best, near = -1, None
    for sibling in islice(reversed(mirror.children.get((*place, parent), {})), MOST_COMPARED):
        other = mirror.blocks[*place, sibling]
        if sibling == key or block.token_ids is None or other.token_ids is None:
            continue
        if other.token_ids == block.token_ids:
            if (kept_apart := _differing(block, other)) is not None:
                return Why(kept_apart, start)
            continue
        length = _common(block.token_ids, other.token_ids)
        if length > best:
            best, near = length, other.token_ids
    ours = block.token_ids or ()
    if near is None:
        return Why(MissReason.NEVER_SEEN, start, ours=ours[:NUM_SHOWN])
    shown = slice(best, best + NUM_SHOWN)
    return Why(MissReason.NEVER_SEEN, start + best, ours=ours[shown], theirs=near[shown])


def _differing(block: MirroredBlock, other: MirroredBlock) -> MissReason | None:
    """What keeps two blocks of equal tokens apart: an adapter, a picture (a pair of digest and offset), or a salt."""
    if block.lora_name != other.lora_name:
        return MissReason.ADAPTER_DIFFERS
    differing = set(block.extra_keys or ()) ^ set(other.extra_keys or ())
    if not differing:
        return None
    is_media = any(isinstance(key, tuple) for key in differing)
    return MissReason.MEDIA_DIFFERS if is_media else MissReason.SALT_DIFFERS


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))

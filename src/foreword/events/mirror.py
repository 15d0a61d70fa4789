"""Mirror: the blocks that a remote cache holds, with their tokens, from its events.

A `Follower` tells the mirror what to store and remove. The functions at the end pass a publisher's messages to a
follower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreword.cache import BlockHash, BlockRemoved, BlockStored
from foreword.cluster.follower import Follower
from foreword.events.wire import UNAVAILABLE, WireError, decode_live, decode_replay, decode_snapshot

Key = BlockHash
"""A block's key as the publisher sends it: the whole key, or a number."""
BlockName = tuple[str, int, Key]
"""Medium, group and hash of a block."""


@dataclass(frozen=True, slots=True)
class MirroredBlock:
    """A block of a remote cache."""

    parent: Key | None
    token_ids: tuple[int, ...] | None
    """The block's tokens; None if the publisher left out blocks, so that tokens and blocks do not correspond."""
    block_size: int
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A prefix that several cached sequences have."""

    num_tokens: int
    num_ends: int
    """The number of cached sequences that begin with the prefix."""


class Mirror:
    """The blocks of a remote cache."""

    def __init__(self) -> None:
        self.blocks: dict[BlockName, MirroredBlock] = {}
        self.children: dict[tuple[str, int, Key | None], dict[Key, None]] = {}
        """(Medium, group, key) -> keys of the next blocks, the newest last. Key None: blocks that begin sequences."""
        self.num_tokens = 0
        self.num_blocks: Counter[tuple[str, int]] = Counter()
        """The number of blocks by medium and group."""
        self.counts: Counter[str] = Counter()
        """Counts of stored blocks, removed blocks, and removals of unknown blocks."""

    def remove(self, event: BlockRemoved) -> bool:
        """Remove blocks. Unknown blocks are only counted, because a mirror may be incomplete."""
        for key in event.block_hashes:
            is_known = self._forget((event.medium, event.group_idx, key))
            self.counts["removed" if is_known else "removed_unknown"] += 1
        return True

    def clear(self) -> None:
        self.blocks.clear()
        self.children.clear()
        self.num_blocks.clear()
        self.num_tokens = 0

    def store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        whole = len(event.token_ids) == size * len(event.block_hashes)
        for at, key in enumerate(event.block_hashes):
            name = (event.medium, event.group_idx, key)
            tokens = event.token_ids[at * size : (at + 1) * size] if whole else None
            extra = event.extra_keys[at] if event.extra_keys and at < len(event.extra_keys) else None
            self._forget(name)
            self.blocks[name] = MirroredBlock(parent, tokens, size, event.lora_name, extra)
            self.children.setdefault((*name[:2], parent), {})[key] = None
            self.num_blocks[name[:2]] += 1
            self.num_tokens += size
            parent = key
        self.counts["stored"] += len(event.block_hashes)

    def _forget(self, name: BlockName) -> bool:
        block = self.blocks.pop(name, None)
        if block is None:
            return False
        before = (*name[:2], block.parent)
        del self.children[before][name[2]]
        if not self.children[before]:
            del self.children[before]
        self.num_blocks[name[:2]] -= 1
        self.num_tokens -= block.block_size
        return True

    def common_prefixes(self, limit: int) -> list[CommonPrefix]:
        """The prefixes after which sequences differ, the most common first. Looks at each block once."""
        lengths, ends = self._lengths(), Counter[BlockName]()
        for name in reversed(lengths):  # the blocks after a block come before the block itself
            ends[name] += name not in self.children
            parent = self.blocks[name].parent
            if parent is not None:
                ends[*name[:2], parent] += ends[name]
        parted = Counter({name: ends[name] for name in lengths if len(self.children.get(name, ())) > 1 and ends[name]})
        return [CommonPrefix(lengths[name], count) for name, count in parted.most_common(limit)]

    def _lengths(self) -> dict[BlockName, int]:
        """For each block, the number of tokens from the first known block of its prefix to its end. Parents come first.

        A wrong publisher may send blocks whose parents form a ring. Then the prefix begins where the ring would close.
        """
        lengths, begun = dict[BlockName, int](), set[BlockName]()
        for name in self.blocks:
            path, at = list[BlockName](), (name[0], name[1], name[2])
            while at in self.blocks and at not in begun:
                begun.add(at)
                path.append(at)
                at = (*at[:2], self.blocks[at].parent)  # type: ignore[assignment]  # the first block's parent is None
            length = lengths.get(at, 0)
            for name_on_path in reversed(path):
                length += self.blocks[name_on_path].block_size
                lengths[name_on_path] = length
        return lengths


# ---------------------------------------------------------------------------------------- messages


def take_live(follower: Follower, frames: Sequence[bytes]) -> None:
    """Give a follower a message of its publisher."""
    try:
        batch = decode_live(frames)
    except WireError:
        follower.lose_one()
    else:
        follower.take(batch)


def take_replay(follower: Follower, frames: Sequence[bytes]) -> bool:
    """Give a follower a part of a replay. Returns whether it was the last part."""
    try:
        batch = decode_replay(frames)
    except WireError:
        follower.counts["bad"] += 1
        return False
    if batch is None:
        follower.end_replay()
    else:
        follower.take_replayed(batch)
    return batch is None


def take_snapshot(follower: Follower, frames: Sequence[bytes]) -> None:
    """Give a follower the answer to a request for a snapshot."""
    try:
        snapshot = decode_snapshot(frames)
    except WireError:
        follower.counts["bad"] += 1
        follower.request_failed()
        return
    if snapshot.number <= UNAVAILABLE:
        follower.request_failed()
    else:
        follower.install(snapshot)

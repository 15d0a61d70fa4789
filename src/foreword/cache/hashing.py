"""Block keys: a hash chain over token ids.

Knows token ids and extra keys as bytes; knows nothing of blocks, pools or requests.

    key(i) = SHA-256( key(i-1) | token ids of block i, int32 little endian | extra keys of block i )

A key therefore stands for the whole prefix up to and including its block, and is the same in every
process, on every machine and after every restart (Python's own `hash()` is none of that). The method
is vLLM v1's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
HashFunction = Callable[[bytes], bytes]
TokenArray = npt.NDArray[np.int32]


def sha256(data: bytes) -> bytes:
    """32-byte digest; collisions cannot be constructed, so tenants cannot reach each other's blocks."""
    return hashlib.sha256(data).digest()


ROOT_HASH = BlockHash(sha256(b"foreword block chain 1"))
"""Parent of every first block."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, sound or video inside a prompt: its content hash and the placeholders it occupies."""

    content_hash: str
    offset: int
    """Position of the first placeholder token."""
    num_tokens: int
    """Number of placeholder tokens."""


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Whatever besides token ids decides the KV of a prompt, or must keep prompts apart.

    Two requests share a block only if these are equal for that block.
    """

    adapter: str | None = None
    """LoRA adapter name; enters every block."""
    salt: str | None = None
    """Tenant's salt; enters the first block and thereby the whole chain."""
    media: tuple[MediaItem, ...] = ()
    """Enters every block that holds one of the item's placeholders."""
    embeddings_hash: str | None = None
    """Hash of prompt embeddings given instead of token ids; enters every block."""

    def of_block(self, start: int, end: int) -> tuple[str, ...]:
        """Keys of the block that holds positions `start` to `end` (exclusive), in a fixed order."""
        keys: list[str] = []
        if self.adapter is not None:
            keys.append(f"adapter={self.adapter}")
        if self.embeddings_hash is not None:
            keys.append(f"embeddings={self.embeddings_hash}")
        for item in self.media:
            if item.offset < end and start < item.offset + item.num_tokens:
                keys.append(f"media={item.offset - start}:{item.content_hash}")
        if start == 0 and self.salt is not None:
            keys.append(f"salt={self.salt}")
        return tuple(keys)


NO_EXTRA_KEYS = ExtraKeys()


def hash_block_tokens(
    hash_fn: HashFunction,
    parent_hash: BlockHash | None,
    token_ids: npt.ArrayLike,
    extra_keys: Sequence[str] = (),
) -> BlockHash:
    """Key of one full block; `parent_hash` is None for the first block of a sequence."""
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    return BlockHash(hash_fn((parent_hash or ROOT_HASH) + tokens + _pack(extra_keys)))


def hash_blocks(
    hash_fn: HashFunction,
    parent_hash: BlockHash | None,
    token_ids: TokenArray,
    block_size: int,
    first_position: int = 0,
    extra_keys: ExtraKeys = NO_EXTRA_KEYS,
) -> list[BlockHash]:
    """Keys of consecutive full blocks: `token_ids` [k * block_size] -> k keys.

    `first_position` is the position of `token_ids[0]` in its sequence; extra keys depend on it.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    width = 4 * block_size
    parent = parent_hash or ROOT_HASH
    keys: list[BlockHash] = []
    if extra_keys == NO_EXTRA_KEYS:
        for at in range(0, len(data), width):
            parent = BlockHash(hash_fn(parent + data[at : at + width]))
            keys.append(parent)
        return keys
    for at in range(0, len(data), width):
        start = first_position + at // 4
        packed = _pack(extra_keys.of_block(start, start + block_size))
        parent = BlockHash(hash_fn(parent + data[at : at + width] + packed))
        keys.append(parent)
    return keys


def _pack(extra_keys: Sequence[str]) -> bytes:
    """Length-prefixed, so that no two lists of keys give the same bytes."""
    return b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in extra_keys)

"""The tokens of one request, as the cache sees them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from foreword.cache.keys.hashing import (
    NO_EXTRA_KEYS,
    ROOT_HASH,
    BlockHash,
    ExtraKeys,
    HashFunction,
    TokenArray,
    as_token_array,
    hash_blocks,
    sha256,
)
from foreword.errors import AllocationError


class TokenSequence:
    """An append-only array of token ids whose block keys are computed once each.

    `len(sequence)` counts prompt and generated tokens. `root` is `chain_root(fingerprint)` of the model; sequences that
    share an index have the same hash function. Raises InvalidRequestError for token ids below 0 or beyond int32
    (generated ids are checked when they are first read), and for media items that overlap or do not lie inside
    `token_ids`.
    """

    __slots__ = (
        "__weakref__",
        "_generated",
        "_hash_fn",
        "_hashes",
        "_num_gathered",
        "_num_given",
        "_plain_hashes",
        "_tokens",
        "block_size",
        "extra_keys",
        "linked_from",
        "most_hit_tokens",
        "request_id",
        "root",
        "session",
        "shown",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: npt.ArrayLike,
        *,
        block_size: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        hash_fn: HashFunction = sha256,
        root: BlockHash = ROOT_HASH,
        linked_from: int | None = None,
    ) -> None:
        """Begin a sequence. From token `linked_from` on, KV is copied from another sequence. None: no KV is copied."""
        self.request_id = request_id
        self.linked_from = linked_from
        self.most_hit_tokens: int | None = None
        """The most leading tokens that a hit may have: later tokens are computed for their logits. None: no limit."""
        self.session: Hashable | None = None
        """The session that this sequence belongs to (see `close_session`); None: no session."""
        self.block_size = block_size
        self.extra_keys = extra_keys
        self.root = root
        self._hash_fn = hash_fn
        self._tokens: TokenArray = as_token_array(token_ids)
        self._num_given = self._num_gathered = len(self._tokens)
        self._generated: list[int] = []
        self.shown: list[int] = []
        """A copy of the generated tokens for callers. Each new token is appended; this class never reads the list."""
        self._hashes: list[BlockHash] = []
        if extra_keys is not NO_EXTRA_KEYS:
            extra_keys.check(self._num_given)
        self._plain_hashes: list[BlockHash] = []

    def renamed(self, request_id: str) -> TokenSequence:
        """A copy with the same tokens and keys, as the prompt of another request."""
        return TokenSequence(
            request_id,
            self.token_ids,
            block_size=self.block_size,
            extra_keys=self.extra_keys,
            hash_fn=self._hash_fn,
            root=self.root,
            linked_from=self.linked_from,
        )

    def __len__(self) -> int:
        return self._num_given + len(self._generated)

    @property
    def num_hittable_tokens(self) -> int:
        """The number of leading tokens that a hit may have: the last token is always computed."""
        limit = max(0, len(self) - 1)
        return limit if self.most_hit_tokens is None else min(limit, self.most_hit_tokens)

    def may_hit(self, block: int) -> bool:
        """Whether `most_hit_tokens` lets a hit have all tokens of the full block number `block`."""
        return self.most_hit_tokens is None or (block + 1) * self.block_size <= self.most_hit_tokens

    def check_block_size(self, block_size: int) -> None:
        """Raise AllocationError for blocks of another size, because their keys would find blocks of other tokens."""
        if self.block_size != block_size:
            raise AllocationError(
                f"request {self.request_id!r} has blocks of {self.block_size} tokens, and this cache of {block_size}; "
                f"make its TokenSequence with block_size={block_size}"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """The number of the prompt's tokens; all tokens after them were generated."""
        return self._num_given

    @property
    def token_ids(self) -> TokenArray:
        """All tokens, [len(self)]; a view that is valid until a token is added."""
        length, num_gathered = len(self), self._num_gathered
        if num_gathered < length:
            if length > len(self._tokens):
                self._tokens = np.concatenate((self._tokens[:num_gathered], np.empty(max(64, length), np.int32)))
            self._tokens[num_gathered:length] = as_token_array(self._generated[num_gathered - self._num_given :])
            self._num_gathered = length
        return self._tokens[:length]

    @property
    def num_full_blocks(self) -> int:
        """The number of blocks whose tokens are all known."""
        return len(self) // self.block_size

    def append(self, token_id: int) -> None:
        self._generated.append(token_id)
        self.shown.append(token_id)

    @staticmethod
    def append_each(sequences: list[TokenSequence], token_ids: list[int]) -> None:
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence._generated.append(token_id)
            sequence.shown.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        num_known = len(self._generated)
        self._generated.extend(token_ids)
        self.shown.extend(self._generated[num_known:])

    def generated_from(self, start: int) -> list[int]:
        """A new list of the generated tokens from number `start` on."""
        return self._generated[start:]

    def block_hashes(self) -> list[BlockHash]:
        """Keys of all full blocks; hashes only blocks that became full since the last call.

        Do not change the list: the sequence keeps it.
        """
        return self._hash_new_blocks(self._hashes, self.extra_keys)

    def plain_block_hashes(self) -> list[BlockHash]:
        """The keys that the full blocks would have without extra keys: equal tokens have equal plain keys."""
        if self.extra_keys == NO_EXTRA_KEYS:
            return self.block_hashes()
        return self._hash_new_blocks(self._plain_hashes, NO_EXTRA_KEYS)

    def keys_after(self, root: BlockHash, block_size: int, num_blocks: int) -> list[BlockHash]:
        """The keys that the sequence's first `num_blocks` blocks would have with this root and this block size."""
        tokens = self.token_ids[: num_blocks * block_size]
        return hash_blocks(self._hash_fn, root, tokens, block_size, 0, self.extra_keys)

    def _hash_new_blocks(self, hashes: list[BlockHash], extra_keys: ExtraKeys) -> list[BlockHash]:
        """Append the keys of new full blocks to a list, and return the list."""
        num_hashed, full = len(hashes), self.num_full_blocks
        if num_hashed < full:
            first = num_hashed * self.block_size
            hashes += hash_blocks(
                self._hash_fn,
                hashes[-1] if num_hashed else self.root,
                self.token_ids[first : full * self.block_size],
                self.block_size,
                first,
                extra_keys,
            )
        return hashes


def keys_of_group(keys: list[BlockHash], width: int, first: int, last: int) -> list[BlockHash]:
    """Return the keys of a group's blocks number `first` to `last` (exclusive).

    One block of the group spans `width` blocks of the sequence, and has the key of the last of them.
    """
    return keys[first:last] if width == 1 else keys[(first + 1) * width - 1 : last * width : width]


def common_length(ours: TokenArray, theirs: TokenArray) -> int:
    """The length of the common prefix of two arrays of tokens."""
    length = min(len(ours), len(theirs))
    equal = ours[:length] == theirs[:length]
    return length if equal.all() else int(equal.argmin())

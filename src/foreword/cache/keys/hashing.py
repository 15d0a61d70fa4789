"""Block keys: a hash chain over token ids.

    key(i) = HASH( key(i-1), token ids of block i, extra keys of block i )        key(-1) = chain root

A key therefore identifies the whole prefix up to and including its block. It is the same in every
process, on every machine and after every restart (Python's own `hash()` is not). The method
comes from vLLM v1's automatic prefix caching. docs/concepts/keys.md gives the bytes and test vectors.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from numbers import Integral
from typing import Literal, NewType, Protocol, get_args

import numpy as np
import numpy.typing as npt

from foreword.cache.keys import cbor
from foreword.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

BlockHash = NewType("BlockHash", bytes)
TokenArray = npt.NDArray[np.int32]

_INT32_LITTLE_ENDIAN = np.dtype("<i4")
MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
PACKED_AT_ONCE = 1024
"""The number of tokens to pack at once: they fit into the processor's first-level cache."""


class Digester(Protocol):
    """The part of `hashlib.sha256(data)`'s result that we use."""

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class HashFunction:
    """Computes a block's key from the block's parent, tokens and extra keys."""

    name: str
    new: Callable[[bytes], Digester]
    """`hashlib.sha256` or a function like it."""
    encoding: Literal["packed", "cbor"] = "packed"
    """packed: parent | tokens as int32, little endian | extra keys, each with its length in front.
    cbor: canonical CBOR of [parent, [tokens], [extra keys] or null]."""

    def __call__(self, data: bytes) -> bytes:
        """The digest of bytes that are already encoded."""
        return self.new(data).digest()


sha256 = HashFunction("sha256", hashlib.sha256)
"""The default. Nobody can construct a collision, so tenants cannot reach each other's blocks."""

sha256_cbor = HashFunction("sha256_cbor", hashlib.sha256, "cbor")
"""As safe as `sha256` but slower; programs in other languages can recompute it with any CBOR library.

Without extra keys, and with the same root, the keys are those of vLLM's `sha256_cbor`."""

HASH_FUNCTION_NAMES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def make_hash_function(name: str) -> HashFunction:
    """The hash function with this name. Raises ConfigError if the name is unknown."""
    if name in ("sha256", "sha256_cbor"):
        return sha256 if name == "sha256" else sha256_cbor
    if name in HASH_FUNCTION_NAMES:
        return _make_xxhash(name, "cbor" if name.endswith("_cbor") else "packed")
    raise ConfigError(f"unknown hash function {name!r}; choose one of {', '.join(HASH_FUNCTION_NAMES)}")


def _make_xxhash(name: str, encoding: Literal["packed", "cbor"]) -> HashFunction:
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(f"hash function {name!r} needs the package xxhash; install it, or choose sha256") from error

    logger.warning(
        "xxhash is not collision-safe: whoever can send prompts can construct two with equal keys, and so reach "
        "the cache of another tenant; use it only where all prompts come from people who trust each other"
    )
    return HashFunction(name, xxhash.xxh3_128, encoding)


def chain_root(fingerprint: str = "") -> BlockHash:
    """The parent of every first block, for one model.

    The fingerprint names everything, except the prompt, on which the KV depends (model, revision, dtype, layout). So
    models that share a cache never share keys. The tenant's salt is part of the first block's extra keys.
    """
    version = b"foreword block chain 1"
    return BlockHash(hashlib.sha256(version + b"\n" + fingerprint.encode() if fingerprint else version).digest())


ROOT_HASH = chain_root()
"""The parent of every first block when there is no fingerprint."""
NONE_HASH = ROOT_HASH
"""vLLM's name for the root hash. The bytes are foreword's own and need no seed: they are equal in every process."""


SpanKind = Literal["media", "link", "jump"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)


@dataclass(frozen=True, slots=True)
class KeyedSpan:
    """Consecutive tokens of a prompt. Their KV depends on more than their token ids and the token ids before them."""

    kind: SpanKind
    """media: placeholders of an image, sound or video. link: tokens that are copied (`linked_span`). jump: a token
    whose position jumps."""
    digest: str
    """A digest of all else on which the tokens' KV depends, such as a picture's content and how it was prepared."""
    offset: int
    """Position of the first token."""
    num_tokens: int

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


def linked_span(source_key: BlockHash, first: int, num_tokens: int, *, index: int, position: int) -> KeyedSpan:
    """A span of `num_tokens` tokens at `index`, which are copied from the source's token number `first` on.

    A block that holds linked tokens has another key than a block of plain tokens: a plain prompt never finds it, and
    all later keys in the chain differ too. So approximate KV cannot mix with exact KV. The span's digest covers
    everything on which the span's KV depends, except the model, the salt and the tokens before the span:

        SHA-256( key of the source's block in which the run ends | first, number of tokens, position )

    This key stands for all tokens of the source up to the end of the block, and for the source's salt. Tokens that are
    computed in the prompt need no span: their KV depends on the tokens before them, which are in the chain, and on
    their positions.
    """
    content = b"%b|%d|%d|%d" % (source_key, first, num_tokens, position)
    return KeyedSpan("link", hashlib.sha256(content).hexdigest(), index, num_tokens)


def jump_span(token_id: int, *, index: int, position: int) -> KeyedSpan:
    """A span for a computed token whose position does not follow the position of the token before it.

    The digest includes the token id, because the radix index stores a number for the span instead of the token.
    """
    return KeyedSpan("jump", f"{position}:{token_id}", index, 1)


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What a prompt's keys contain besides token ids: all else on which its KV depends, and what keeps prompts apart.

    Two requests share a block only if their extra keys for that block are equal.
    """

    adapter: str | None = None
    """A digest of the adapter's content (LoRA, say), not its name: a retrained adapter has other KV. Part of the keys
    of all blocks from `adapter_offset` on."""
    adapter_offset: int = 0
    """The position of the first token that the adapter computes; all requests share the tokens before it."""
    salt: str | None = None
    """The tenant's salt; an extra key of the block at `salt_offset`, and so part of all later keys in the chain."""
    salt_offset: int = 0
    """The position of the first token under the salt; all requests share the tokens before it."""
    spans: tuple[KeyedSpan, ...] = ()
    """In order of position, without overlaps; a span is part of the keys of all blocks that hold its tokens."""
    embeddings_hash: str | None = None
    """Hash of prompt embeddings that replace token ids; part of every block's keys."""

    def __hash__(self) -> int:
        """Hash only the last span: a prompt with links may have hundreds of spans, and the ledger hashes each block."""
        places = self.adapter_offset, self.salt_offset
        return hash((self.adapter, self.salt, places, self.spans[-1:], self.embeddings_hash))

    def check(self, num_tokens: int) -> None:
        """Raise InvalidRequestError unless these keys fit a prompt of `num_tokens` tokens.

        Spans must lie inside the prompt, one after the other; neither adapter nor salt may begin before it.
        """
        for name in ("adapter_offset", "salt_offset"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(
                    f"{name}={getattr(self, name)} is before the first token, and keeps nothing apart; give 0 or more"
                )
        free_from = 0
        for span in self.spans:
            if not free_from <= span.offset < span.end <= num_tokens:
                raise InvalidRequestError(
                    f"{span.kind} span {span.digest!r} occupies positions {span.offset} to {span.end} (exclusive), but "
                    f"only {free_from} to {num_tokens} are left for it; give spans in order, inside the prompt, apart"
                )
            free_from = span.end

    def of_prefix(self, num_tokens: int) -> ExtraKeys:
        """The keys of the first `num_tokens` tokens: without an adapter or a salt that begins after them."""
        has_adapter, has_salt = self.adapter_offset < num_tokens, self.salt_offset < num_tokens
        if has_adapter and has_salt:
            return self
        return replace(self, adapter=self.adapter if has_adapter else None, salt=self.salt if has_salt else None)

    def of_block(self, start: int, end: int) -> tuple[str, ...]:
        """The extra keys of the block that holds positions `start` to `end` (exclusive), in a fixed order."""
        keys: list[str] = []
        if self.adapter is not None and self.adapter_offset <= start:
            keys.append(f"adapter={self.adapter}")
        elif self.adapter is not None and self.adapter_offset < end:  # tokens before it have the model's own KV
            keys.append(f"adapter_at={self.adapter_offset - start}:{self.adapter}")
        if self.embeddings_hash is not None:
            keys.append(f"embeddings={self.embeddings_hash}")
        first = bisect_right(self.spans, start, key=lambda span: span.end)
        for span in takewhile(lambda span: span.offset < end, self.spans[first:]):
            keys.append(f"{span.kind}={span.offset - start}:{span.num_tokens}:{span.digest}")
        if self.salt is not None and start <= self.salt_offset < end:
            keys.append(f"salt={self.salt}")
        return tuple(keys)

    def of_blocks(self, first_position: int, block_size: int, num_blocks: int) -> list[tuple[str, ...]]:
        """`of_block` for consecutive blocks; computes it only for blocks that differ from their neighbours."""
        everywhere = ExtraKeys(adapter=self.adapter, embeddings_hash=self.embeddings_hash)
        adapted = (self.adapter_offset - first_position) // block_size
        adapted = num_blocks if self.adapter is None else min(max(adapted, 0), num_blocks)
        plain = replace(everywhere, adapter=None).of_block(1, 2)
        keys = [plain] * adapted + [everywhere.of_block(1, 2)] * (num_blocks - adapted)
        special = {(at - first_position) // block_size for at in (self.adapter_offset, self.salt_offset)}
        special &= set(range(num_blocks))
        for span in self.spans:
            start, end = span.offset - first_position, span.end - first_position
            special.update(range(max(0, start // block_size), min(num_blocks, -(-end // block_size))))
        for block in special:
            start = first_position + block * block_size
            keys[block] = self.of_block(start, start + block_size)
        return keys


NO_EXTRA_KEYS = ExtraKeys()


def as_token_array(token_ids: npt.ArrayLike) -> TokenArray:
    """Copy token ids into a new int32 array, [tokens].

    Raises InvalidRequestError for ids below 0 or beyond int32: an index uses negative numbers for media.
    """
    return _pack(token_ids) if isinstance(token_ids, list) else _convert(token_ids)


def _pack(token_ids: list[int]) -> TokenArray:
    """Pack a list piece by piece: twice as fast as np.array, which checks the type of every element."""
    count = len(token_ids)
    tokens = np.empty(count, np.int32)
    try:
        if count <= PACKED_AT_ONCE:
            struct.pack_into(f"{count}i", tokens.data, 0, *token_ids)
        else:
            target = tokens.data.cast("B")
            for at in range(0, count, PACKED_AT_ONCE):
                piece = token_ids[at : at + PACKED_AT_ONCE]
                struct.pack_into(f"{len(piece)}i", target, 4 * at, *piece)
    except struct.error:
        return _convert(token_ids)
    return tokens if not count or tokens.min() >= 0 else _convert(tokens)


def _convert(token_ids: npt.ArrayLike) -> TokenArray:
    """Copy any one-dimensional sequence of integers into a new array."""
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1:
        raise InvalidRequestError("token ids must be one row of numbers; give a list, or an array of one dimension")
    if tokens.size and (tokens.dtype.kind not in "iub" or tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        for token in tokens.tolist():
            check_token_id(token)
    return tokens.astype(np.int32)


def check_token_id(token: object) -> None:
    """Raise InvalidRequestError unless this is an integer from 0 to the largest int32."""
    if not isinstance(token, Integral) or not 0 <= int(token) <= MAX_TOKEN_ID:
        raise InvalidRequestError(
            f"token id {token!r} is not an integer from 0 to {MAX_TOKEN_ID}; give ids of the model's vocabulary"
        )


def hash_block_tokens(
    hash_fn: HashFunction, parent_hash: BlockHash | None, token_ids: npt.ArrayLike, extra_keys: Sequence[str] = ()
) -> BlockHash:
    """The key of one full block; `parent_hash` is None for the first block of a sequence without fingerprint."""
    tokens = as_token_array(token_ids)
    blocks = _encode_tokens(hash_fn, tokens, len(tokens))
    return _fold(hash_fn, parent_hash or ROOT_HASH, blocks, [_encode_extra(hash_fn, extra_keys)])[0]


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
    `parent_hash` is None for the beginning of a sequence without fingerprint.
    """
    blocks = _encode_tokens(hash_fn, token_ids, block_size)
    parent = parent_hash or ROOT_HASH
    if hash_fn.encoding == "packed" and (extra_keys is NO_EXTRA_KEYS or extra_keys == NO_EXTRA_KEYS):
        # The usual case. Nearly all of the cost is the digests.
        new, key = hash_fn.new, bytes(parent)
        return [key := new(key + block).digest() for block in blocks]  # type: ignore[misc]  # see _fold
    keys = extra_keys.of_blocks(first_position, block_size, len(blocks))
    encoded = {key: _encode_extra(hash_fn, key) for key in set(keys)}
    return _fold(hash_fn, parent, blocks, [encoded[key] for key in keys])


def _fold(hash_fn: HashFunction, parent: BlockHash, blocks: list[bytes], extra: list[bytes]) -> list[BlockHash]:
    """The keys of the chain that continues `parent`."""
    new, key, head = hash_fn.new, bytes(parent), b""
    if hash_fn.encoding == "cbor":
        head = cbor.encode_head(cbor.ARRAY, 3) + cbor.encode_head(cbor.BYTES, len(parent))
    keys = [key := new(head + key + block + tail).digest() for block, tail in zip(blocks, extra, strict=True)]
    return keys  # type: ignore[return-value]  # a digest in a chain is a BlockHash


def _encode_tokens(hash_fn: HashFunction, token_ids: TokenArray, block_size: int) -> list[bytes]:
    """The part of each block's message that stands for its tokens."""
    if hash_fn.encoding == "packed":
        data = token_ids.astype(_INT32_LITTLE_ENDIAN, copy=False).tobytes()
        if len(data) == 4 * block_size:
            return [data]
        blocks: list[bytes] = np.frombuffer(data, f"V{4 * block_size}").tolist()  # one bytes object each
        return blocks
    head = cbor.encode_head(cbor.ARRAY, block_size)
    encoded, ends = cbor.encode_integers(np.asarray(token_ids, np.int32))
    cuts = [0, *ends[block_size - 1 :: block_size].tolist()]
    return [head + encoded[start:end] for start, end in pairwise(cuts)]


def _encode_extra(hash_fn: HashFunction, extra_keys: Sequence[str]) -> bytes:
    """The part of a block's message that stands for its extra keys."""
    if hash_fn.encoding == "cbor":
        return cbor.encode(tuple(extra_keys) or None)
    # Length-prefixed, so that no two lists of keys give the same bytes.
    return b"".join(len(key.encode()).to_bytes(4, "little") + key.encode() for key in extra_keys)

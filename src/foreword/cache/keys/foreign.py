"""Block keys of other engines: the hashes that vLLM 0.33 and SGLang 0.5.23 give to a prompt's blocks.

Both chain hashes as we do:

    vLLM     HASH of (parent, tokens, extra keys or None), as a pickle or as canonical CBOR; the root is HASH(seed)
    SGLang   SHA-256 of parent | tokens as uint32, little endian; no root without a salt
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from foreword.cache.keys import cbor
from foreword.cache.keys.hashing import check_token_id, make_hash_function
from foreword.errors import ConfigError

VLLM_SEED = "vllm-none-hash"
"""vLLM's seed where PYTHONHASHSEED is not set, for hashes that resist collisions."""
SALT_SEED = b"sglang-cache-salt-v1\0"


@dataclass(frozen=True, slots=True)
class Media:
    """Placeholders of a picture, sound or video, and the identifier that vLLM gives to its content."""

    offset: int
    num_tokens: int
    identifier: str


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that enters a prompt's keys, except its tokens."""

    salt: str | None = None
    adapter: tuple[str, str] | None = None
    """A LoRA adapter's name and path, as vLLM was given them."""
    media: tuple[Media, ...] = ()


def vllm_keys(
    token_ids: Sequence[int],
    block_tokens: int,
    context: Context,
    *,
    algorithm: str = "sha256",
    seed: str | None = None,
    unit_tokens: int | None = None,
) -> list[bytes]:
    """The hashes of the whole blocks of a prompt.

    `algorithm`: vLLM's `--prefix-caching-hash-algo`. `seed`: vLLM's PYTHONHASHSEED. `unit_tokens`: on models with
    several groups of layers, the number of tokens per key of the chain (the greatest common divisor of the groups'
    block sizes).
    """
    unit = unit_tokens or block_tokens
    if block_tokens % unit:
        raise ConfigError(f"blocks of {block_tokens} tokens do not consist of units of {unit}; give a divisor")
    digest = _vllm_hash(algorithm)
    if seed is None and algorithm.startswith("xxhash"):
        raise ConfigError(
            f"{algorithm} has a random root in each process of vLLM; start it with PYTHONHASHSEED and give --seed"
        )
    parent = digest(VLLM_SEED if seed is None else seed)
    chain = []
    for start in range(0, len(token_ids) - unit + 1, unit):
        tokens = tuple(int(token) for token in token_ids[start : start + unit])
        parent = digest((parent, tokens, _vllm_extra(context, start, start + unit)))
        chain.append(parent)
    step = block_tokens // unit
    return chain[step - 1 :: step]


def _vllm_extra(context: Context, start: int, end: int) -> tuple[tuple[object, ...], ...] | None:
    extra: list[tuple[object, ...]] = []
    if context.adapter is not None:
        extra.append(("lora", *context.adapter))
    for item in sorted(context.media, key=lambda item: item.offset):
        if item.offset < end and start < item.offset + item.num_tokens:
            extra.append(("mm", item.identifier, item.offset - start))
    if context.salt and start == 0:
        extra.append(("cache_salt", context.salt))
    return tuple(extra) or None


def _vllm_hash(algorithm: str) -> Callable[[object], bytes]:
    encode = cbor.encode if algorithm.endswith("_cbor") else partial(pickle.dumps, protocol=5)
    function = make_hash_function(algorithm)
    return lambda value: function(encode(value))


def sglang_keys(token_ids: Sequence[int], page_tokens: int, context: Context) -> list[bytes]:
    """The hashes of the whole pages of a prompt, as in SGLang's events. They do not depend on an adapter.

    Raises ConfigError for media, because SGLang replaces the tokens of media by numbers of its own.
    """
    if context.media:
        raise ConfigError("SGLang hashes numbers of its own in the place of a picture's tokens; give a prompt without")
    parent = hashlib.sha256(SALT_SEED + context.salt.encode()).digest() if context.salt else b""
    chain = []
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = b"".join(int(token).to_bytes(4, "little") for token in token_ids[start : start + page_tokens])
        parent = hashlib.sha256(parent + page).digest()
        chain.append(parent)
    return chain


def published(engine: str, key: bytes) -> int:
    """The number that names a key in an engine's events. vLLM: the last 8 bytes. SGLang: the first 8 bytes, signed."""
    if engine == "vllm":
        return int.from_bytes(key[-8:], "big")
    return int.from_bytes(key[:8], "big", signed=True)


def check_tokens(token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError for a number that is no token id."""
    for token in token_ids:
        check_token_id(token)

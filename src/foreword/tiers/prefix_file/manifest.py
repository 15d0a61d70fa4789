"""The first pages of a prefix file: whose KV it holds, and of what size.

| manifest: page 0 ... | run | run | ... | SHA-256 of all before it |      FILE.fwkv; runs are those of fwseg

manifest:  0 magic "FWKV", version 1    8 bytes of these pages    16 bytes of the JSON    24 JSON, then zeros
           -32 SHA-256 of the pages before it                                  numbers are uint64, little endian
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config import CacheConfig
from foreword.errors import ConfigError
from foreword.tiers.disk.run_format import padded
from foreword.tiers.identity import CacheIdentity

MAGIC = b"FWKV\0\0\0\1"
DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 64 << 20
"""A file that says more is damaged."""
_HEAD = struct.Struct("<8sQQ")
HEAD_BYTES = _HEAD.size

Facts = Mapping[str, Any]
_REQUIRED: Mapping[str, type] = {
    "namespace": str,
    "model_id": str,
    "arithmetic_id": str,
    "layout": str,
    "exact": bool,
    "model": dict,
    "model_name": str,
    "block_size": int,
    "keys": str,
    "num_tokens": int,
    "num_blocks": int,
    "run_bytes": int,
}
"""What every manifest says. `keys`: a digest of the hash function and the root; `run_bytes`: of all runs."""
MOST_TOKENS = 1 << 31
"""Of a prefix: positions are 32-bit numbers."""
_RANGES = {
    "block_size": range(1, MOST_TOKENS),
    "num_tokens": range(1, MOST_TOKENS),
    "num_blocks": range(1, MOST_TOKENS),
    "run_bytes": range(1, 1 << 62),
}
OF_THE_NAMESPACE = (*list(_REQUIRED)[:8], "arithmetic", "foreword_version")
"""Facts that are the same in all files of a namespace."""


class UnsoundFileError(Exception):
    """A prefix file is torn, changed, or none; the message says where."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    tokens: int
    """Leading tokens of the prompt that a cache with these blocks need not compute."""
    blocks: int
    """Of all groups of layers."""
    bytes: int
    """Size of the file."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import took."""

    blocks: int = 0
    """Blocks of the file that the cache has now, those included that it had before."""
    tokens: int = 0
    """Leading tokens of the prompt that need not be computed; 0 unless all of the file's blocks are there."""
    rejected: str | None = None
    """Why nothing was taken."""


def encode_manifest(facts: Facts) -> bytes:
    """The pages of a manifest."""
    text = json.dumps(facts, sort_keys=True).encode()
    num_bytes = padded(HEAD_BYTES + len(text) + DIGEST_BYTES)
    assert num_bytes <= MAX_MANIFEST_BYTES
    pages = (_HEAD.pack(MAGIC, num_bytes, len(text)) + text).ljust(num_bytes - DIGEST_BYTES, b"\0")
    return pages + hashlib.sha256(pages).digest()


def manifest_length(first_bytes: bytes) -> int:
    """The length of the manifest that begins with these `HEAD_BYTES`. Raises UnsoundFileError if none begins so."""
    magic, num_bytes, text_bytes = _HEAD.unpack(first_bytes)
    if magic[:4] != MAGIC[:4]:
        raise UnsoundFileError("it is no prefix file: the magic number at byte 0 is missing")
    if magic != MAGIC:
        raise UnsoundFileError("byte 4 names a version of the format that this foreword does not read")
    if num_bytes > MAX_MANIFEST_BYTES or num_bytes != padded(HEAD_BYTES + text_bytes + DIGEST_BYTES):
        raise UnsoundFileError("the lengths at byte 8 are damaged")
    return int(num_bytes)


def decode_manifest(pages: bytes) -> dict[str, Any]:
    """The facts of a manifest. Raises UnsoundFileError unless they are as written."""
    whose = f"the manifest, bytes 0 to {len(pages)},"
    if hashlib.sha256(pages[:-DIGEST_BYTES]).digest() != pages[-DIGEST_BYTES:]:
        raise UnsoundFileError(f"{whose} is damaged: its checksum differs")
    _, _, text_bytes = _HEAD.unpack(pages[:HEAD_BYTES])
    try:
        facts = json.loads(pages[HEAD_BYTES : HEAD_BYTES + text_bytes])
        wrong = [name for name, kind in _REQUIRED.items() if type(facts.get(name)) is not kind]
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnsoundFileError(f"{whose} is no JSON object") from error
    if wrong:
        raise UnsoundFileError(f"{whose} says nothing of {', '.join(wrong)}")
    for name, allowed in _RANGES.items():
        if facts[name] not in allowed:
            raise UnsoundFileError(f"{whose} says {name}={facts[name]}; a file has {allowed[0]} to {allowed[-1]}")
    if not _is_prompt(facts):
        raise UnsoundFileError(f"{whose} has token ids or a salt that no prompt has")
    own = CacheIdentity(facts["model_id"], facts["arithmetic_id"], facts["layout"], facts["exact"])
    if own.namespace.hex() != facts["namespace"]:
        raise UnsoundFileError(f"{whose} contradicts itself: its namespace is not that of its model and arithmetic")
    return dict(facts)


def _is_prompt(facts: Facts) -> bool:
    token_ids, begin = facts.get("token_ids", []), facts.get("adapter_offset", 0)
    texts = facts.get("cache_salt"), facts.get("adapter")
    is_keyed = all(text is None or isinstance(text, str) for text in texts) and type(begin) is int and begin >= 0
    return (
        is_keyed and isinstance(token_ids, list) and all(type(one) is int and 0 <= one < 1 << 31 for one in token_ids)
    )


def why_foreign(facts: Facts, identity: CacheIdentity, model_name: str) -> str | None:
    """Why blocks of a manifest are of no use to a cache of that identity; None if they are."""
    theirs, ours = facts["model"], json.loads(json.dumps(identity.description()["model"]))
    maker, own = f"made by model {facts['model_name']!r}", f"this is {model_name!r}"
    if theirs.get("weights") != ours.get("weights"):
        weights = [str(model.get("weights"))[:12] for model in (theirs, ours)]
        return f"{maker} (weights {weights[0]}), {own} (weights {weights[1]}); open the model that made it"
    if facts["layout"] != identity.layout:
        shapes = (
            f"blocks of {facts['block_size']} tokens and dtype {theirs.get('dtype')}, layout {facts['layout'][:12]}"
        )
        return (
            f"made with another layout ({shapes}), here it is {identity.layout[:12]} with dtype {ours.get('dtype')}; "
            "give the options of the cache that made it (block_size, dtype, sliding windows)"
        )
    if facts["model_id"] != identity.model_id:
        return f"{maker} with another configuration, or other sink_token_ids; give the options that made it"
    if facts["exact"] != identity.exact:
        return (
            f"made with cache_exact={facts['exact']}, here it is {identity.exact}; give cache_exact=False to both "
            "sides, or leave it out on both"
        )
    if identity.exact and facts["arithmetic_id"] != identity.arithmetic_id:
        return (
            f"computed by another arithmetic ({facts['arithmetic_id'][:12]}), here it is "
            f"{identity.arithmetic_id[:12]}, so bits could differ; export and import with cache_exact=False to share "
            "such blocks"
        )
    return None


def check_shareable(cache: CacheConfig) -> None:
    """Raise ConfigError for a cache whose blocks have no keys that others can trust."""
    if not cache.enable_prefix_caching or not cache.hash_function.startswith("sha256"):
        raise ConfigError(
            f"no prefix can be exported or imported with enable_prefix_caching={cache.enable_prefix_caching} and "
            f"hash_function={cache.hash_function!r}; leave caching on, with sha256, whose keys nobody can forge"
        )


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for a path where no file can be written."""
    if path.is_dir():
        raise ConfigError(f"path={str(path)!r} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise ConfigError(
            f"path={str(path)!r} exists; give another path, or overwrite it (--overwrite, overwrite=True)"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"path={str(path)!r} is in a folder that does not exist; make {str(path.parent)!r} first")

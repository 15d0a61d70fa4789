"""Prefix files: the cached blocks of one prompt in one file, which another cache of the same model can take.

The first pages, the manifest, say which model and arithmetic computed the KV, and how many bytes follow.

    | manifest: page 0 ... | run | run | ... | SHA-256 of all before it |      FILE.fwkv; runs are those of fwseg

    manifest:  0 magic "FWKV", version 1    8 bytes of these pages    16 bytes of the JSON    24 JSON, then zeros
               -32 SHA-256 of the pages before it                                  numbers are uint64, little endian
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.config import CacheConfig, user_path
from foreword.errors import ConfigError
from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.disk.files import RealFiles, close_quietly, opened, read_fully, replace_file
from foreword.tiers.disk.manifest import identity_in
from foreword.tiers.disk.segments import (
    PAGE,
    Damage,
    RunBuffer,
    RunHeader,
    padded,
    read_block,
    run_bytes_of,
    scan_runs,
    split_run,
)
from foreword.tiers.identity import CacheIdentity, Facts
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockRun, Tier

MAGIC = b"FWKV\0\0\0\1"
DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 64 << 20
"""The most bytes of a manifest; a file whose head gives a longer manifest is damaged."""
_HEAD = struct.Struct("<8sQQ")
HEAD_BYTES = _HEAD.size
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
"""The facts of every manifest. `keys`: a digest of the hash function and the root; `run_bytes`: bytes of all runs."""
MOST_TOKENS = 1 << 31
"""The most tokens of a prefix: positions are 32-bit numbers."""
_RANGES = {
    "block_size": range(1, MOST_TOKENS),
    "num_tokens": range(1, MOST_TOKENS),
    "num_blocks": range(1, MOST_TOKENS),
    "run_bytes": range(1, 1 << 62),
}
OF_THE_NAMESPACE = (*list(_REQUIRED)[:8], "arithmetic", "foreword_version")
"""Facts that are the same in all files of a namespace."""
AT_ONCE_BYTES = 1 << 20
PATIENCE_S = 60.0
"""Seconds in which a tier must store one run."""


class UnsoundFileError(Exception):
    """A file is torn, changed, or no prefix file; the message says where."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The size of an export."""

    tokens: int
    """Leading tokens of the prompt that a cache with these blocks need not compute."""
    blocks: int
    """The number of blocks, of all groups of layers."""
    bytes: int
    """Size of the file."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import."""

    blocks: int = 0
    """The number of the file's blocks that the cache has now, including blocks that it had before."""
    tokens: int = 0
    """Leading tokens of the prompt that need not be computed; 0 if the cache lacks a block of the file."""
    rejected: str | None = None
    """Why no block was taken; None if blocks were taken."""


def encode_manifest(facts: Facts) -> bytes:
    """The pages of a manifest."""
    text = json.dumps(facts, sort_keys=True).encode()
    num_bytes = padded(HEAD_BYTES + len(text) + DIGEST_BYTES)
    assert num_bytes <= MAX_MANIFEST_BYTES
    pages = (_HEAD.pack(MAGIC, num_bytes, len(text)) + text).ljust(num_bytes - DIGEST_BYTES, b"\0")
    return pages + hashlib.sha256(pages).digest()


def manifest_length(first_bytes: bytes) -> int:
    """The length of the manifest that begins with these bytes. Raises UnsoundFileError if they begin none."""
    magic, num_bytes, text_bytes = _HEAD.unpack(first_bytes)
    if magic[:4] != MAGIC[:4]:
        raise UnsoundFileError("it is no prefix file: the magic number at byte 0 is missing")
    if magic != MAGIC:
        raise UnsoundFileError("byte 4 names a version of the format that this foreword does not read")
    if num_bytes > MAX_MANIFEST_BYTES or num_bytes != padded(HEAD_BYTES + text_bytes + DIGEST_BYTES):
        raise UnsoundFileError("the lengths at byte 8 are damaged")
    return int(num_bytes)


def decode_manifest(pages: bytes) -> dict[str, Any]:
    """The facts of a manifest. Raises UnsoundFileError if the manifest is changed, or if its facts make no sense."""
    subject = f"the manifest, bytes 0 to {len(pages)},"
    if hashlib.sha256(pages[:-DIGEST_BYTES]).digest() != pages[-DIGEST_BYTES:]:
        raise UnsoundFileError(f"{subject} is damaged: its checksum differs")
    _, _, text_bytes = _HEAD.unpack(pages[:HEAD_BYTES])
    try:
        facts = json.loads(pages[HEAD_BYTES : HEAD_BYTES + text_bytes])
        wrong = [name for name, kind in _REQUIRED.items() if type(facts.get(name)) is not kind]
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnsoundFileError(f"{subject} is no JSON object") from error
    if wrong:
        raise UnsoundFileError(f"{subject} says nothing of {', '.join(wrong)}")
    for name, allowed in _RANGES.items():
        if facts[name] not in allowed:
            raise UnsoundFileError(f"{subject} says {name}={facts[name]}; a file has {allowed[0]} to {allowed[-1]}")
    if not _is_prompt(facts):
        raise UnsoundFileError(f"{subject} has token ids or a salt that no prompt has")
    if identity_in(facts) is None:
        raise UnsoundFileError(f"{subject} contradicts itself: its namespace is not that of its model and arithmetic")
    return dict(facts)


def _is_prompt(facts: Facts) -> bool:
    token_ids, begin = facts.get("token_ids", []), facts.get("adapter_offset", 0)
    texts = facts.get("cache_salt"), facts.get("adapter")
    is_keyed = all(text is None or isinstance(text, str) for text in texts) and type(begin) is int and begin >= 0
    return (
        is_keyed and isinstance(token_ids, list) and all(type(id_) is int and 0 <= id_ < 1 << 31 for id_ in token_ids)
    )


def why_foreign(facts: Facts, identity: CacheIdentity, model_name: str) -> str | None:
    """Why a manifest's blocks are of no use to a cache of that identity; None if they are of use."""
    theirs, ours = facts["model"], json.loads(json.dumps(identity.description()["model"]))
    maker, here = f"made by model {facts['model_name']!r}", f"this is {model_name!r}"
    if theirs.get("weights") != ours.get("weights"):
        weights = [str(model.get("weights"))[:12] for model in (theirs, ours)]
        return f"{maker} (weights {weights[0]}), {here} (weights {weights[1]}); open the model that made it"
    if facts["layout"] != identity.layout:
        shapes = (
            f"blocks of {facts['block_size']} tokens and dtype {theirs.get('dtype')}, layout {facts['layout'][:12]}"
        )
        return (
            f"made with another layout ({shapes}), here it is {identity.layout[:12]} with dtype {ours.get('dtype')}; "
            "give the options of the cache that made it (block_size, dtype, kv_cache_dtype, sliding windows)"
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
    """Raise ConfigError if the cache's blocks have no keys, or have keys that somebody could forge."""
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


class PrefixFile(AbstractContextManager["PrefixFile"]):
    """An open file that was found sound. Raises ConfigError if it cannot be opened, UnsoundFileError if it is damaged.

    Close the file, or use it as a context manager.
    """

    def __init__(self, files: RealFiles, path: Path) -> None:
        self.path, self._files = path, files
        real = Path(os.path.realpath(user_path(path)))
        try:
            self._fd = files.open_for_reading(real)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            status = files.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"path={str(path)!r} is no file; give one that `foreword cache export` has written")
            self.facts: Facts = self._read_manifest()
            self.runs: list[RunHeader] = []
            self._verify(status.st_size)
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._fd >= 0:
            close_quietly(self._files, self._fd)
            self._fd = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_blocks(self) -> int:
        return sum(len(header.entries) for header in self.runs)

    def read(self, header: RunHeader, index: int, out: memoryview) -> None:
        """Copy a block to `out`, which has its length. Raises OSError, also if the block changed since verification."""
        buffer = memoryview(bytearray(padded(len(out))))
        if not read_block(self._files, self._fd, header, index, buffer, uncached=False):
            raise OSError(f"{self.path} was changed after it was verified")
        out[:] = buffer[: len(out)]

    def block_runs(self) -> Iterator[BlockRun]:
        """Yield the file's runs in a form that a tier can store while the file is open."""
        for header in self.runs:
            entries = header.entries
            yield BlockRun(
                header.keys(),
                entries["stored_bytes"].astype(np.int64),
                _RunSource(self, header),
                entries["parent"].copy(),
                entries["flags"].copy(),
                entries["value"].copy(),
            )

    # ------------------------------------------------------------------------------ verification

    def _read_manifest(self) -> Facts:
        head = bytearray(HEAD_BYTES)
        self._read_whole(memoryview(head), 0)
        pages = bytearray(manifest_length(bytes(head)))
        self._read_whole(memoryview(pages), 0)
        self._begin = len(pages)
        return decode_manifest(bytes(pages))

    def _verify(self, size: int) -> None:
        """Verify runs, blocks and the file's digest. Raises UnsoundFileError for the first damage."""
        end = self._begin + int(self.facts["run_bytes"])
        if size != end + DIGEST_BYTES:
            raise UnsoundFileError(f"the file ends at byte {size}, but a whole one has {end + DIGEST_BYTES} bytes")
        namespace = bytes.fromhex(self.facts["namespace"])
        for run in scan_runs(self._files, self._fd, self._begin, end, uncached=False):
            if isinstance(run, Damage):
                raise UnsoundFileError(f"the run at byte {run.offset} has no sound header")
            if run.namespace != namespace or run.cipher_id != NO_CIPHER_ID or run.offset + run.run_bytes > end:
                raise UnsoundFileError(f"the run at byte {run.offset} does not belong into this file")
            self._verify_blocks(run)
            self.runs.append(run)
        if self.num_blocks != self.facts["num_blocks"]:
            raise UnsoundFileError(f"it has {self.num_blocks} blocks instead of {self.facts['num_blocks']}")
        digest, stored_digest, offset = hashlib.sha256(), bytearray(DIGEST_BYTES), 0
        chunk = memoryview(bytearray(AT_ONCE_BYTES))
        while offset < end:
            piece = chunk[: min(len(chunk), end - offset)]
            self._read_whole(piece, offset)
            digest.update(piece)
            offset += len(piece)
        self._read_whole(memoryview(stored_digest), end)
        if digest.digest() != stored_digest:
            raise UnsoundFileError(f"the digest at byte {end} is not that of the bytes before it")

    def _verify_blocks(self, header: RunHeader) -> None:
        buffer = memoryview(bytearray(padded(int(header.entries["stored_bytes"].max()))))
        for index, entry in enumerate(header.entries):
            out = buffer[: padded(int(entry["stored_bytes"]))]
            if not read_block(self._files, self._fd, header, index, out, uncached=False):
                begin = header.offset + int(entry["page"]) * PAGE
                raise UnsoundFileError(f"the block at bytes {begin} to {begin + len(out)} is damaged")

    def _read_whole(self, out: memoryview, offset: int) -> None:
        count = read_fully(self._files, self._fd, out, offset, uncached=False)
        if count < len(out):
            raise UnsoundFileError(f"the file ends at byte {offset + count}, before {offset + len(out)}")

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"path={str(self.path)!r} cannot be read: {error.strerror or error}; give a readable file")


@dataclass(frozen=True, slots=True)
class _RunSource:
    """The blocks of one run."""

    file: PrefixFile
    header: RunHeader

    def take(self, index: int, out: memoryview) -> None:
        self.file.read(self.header, index, out)


def store_prefix_file(file: PrefixFile, tier: Tier) -> ImportReport:
    """Store the blocks of a file in a tier, and wait until it has them."""
    outcomes: Counter[str] = Counter()
    for run in file.block_runs():
        ticket = tier.store(run)
        in_time = ticket.wait(PATIENCE_S)
        if not in_time:
            ticket.cancel()
        outcomes.update(ticket.report.by_reason())
        if not in_time:
            break
    num_stored = outcomes[Outcome.DONE.name.lower()] + outcomes[Outcome.PRESENT.name.lower()]
    if num_stored == 0:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in outcomes.items())
        return ImportReport(rejected=f"the {tier.name} tier stored none of its {file.num_blocks} blocks ({reasons})")
    return ImportReport(num_stored, file.facts["num_tokens"] if num_stored == file.num_blocks else 0)


def write_prefix_file(files: RealFiles, path: Path, facts: Facts, run: BlockRun, *, overwrite: bool = False) -> int:
    """Write blocks to a new file, mode 0600; returns its size in bytes. Raises ConfigError.

    `facts`: the facts of `manifest_facts`, with `keys` and `num_tokens`. After an error the path is as it was.
    """
    path = user_path(path)
    check_target(path, overwrite=overwrite)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")

    def parts() -> Iterator[bytes | memoryview]:
        yield from _parts_of(facts, run)
        check_target(path, overwrite=overwrite)

    try:
        num_bytes = replace_file(files, path, unfinished, parts())
    except OSError as error:
        raise ConfigError(
            f"path={str(path)!r} cannot be written: {error.strerror or error}; give a path that this user can write"
        ) from error
    with contextlib.suppress(OSError), opened(files, path.parent) as folder:
        files.sync(folder)  # the new name survives a loss of power, if the file system can do that
    return num_bytes


def _parts_of(facts: Facts, run: BlockRun) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file in order."""
    parts = split_run(run.payload_bytes, np.arange(len(run.keys)))
    sizes = {"num_blocks": len(run.keys), "run_bytes": sum(run_bytes_of(run.payload_bytes[part]) for part in parts)}
    manifest = encode_manifest({**facts, **sizes, "namespace": run.keys.namespace.hex()})
    digest, offset, buffer = hashlib.sha256(manifest), len(manifest), RunBuffer()
    yield manifest
    created_s = int(time.time())
    for number, part in enumerate(parts, 1):
        buffer.begin(run.payload_bytes[part])
        for index in part.tolist():
            num_bytes = int(run.payload_bytes[index])
            run.source.take(index, buffer.place(num_bytes)[:num_bytes])
            buffer.add(run, index, num_bytes)
        _, data = buffer.finish(number, run.keys.namespace, NO_CIPHER_ID, offset, created_s=created_s, expires_s=0)
        yield data
        digest.update(data)
        offset += len(data)
    yield digest.digest()

"""Writes a prefix file: under another name first, so that its own name never shows a part of it.

Knows runs and files; `manifest.py` knows what the first pages say.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from pathlib import Path

import numpy as np

from foreword.errors import ConfigError
from foreword.tiers.disk.files import FileLayer, close_quietly, write_fully
from foreword.tiers.disk.run_buffer import RunBuffer, run_bytes_of, split_run
from foreword.tiers.disk.run_format import NO_CIPHER
from foreword.tiers.prefix_file.manifest import Facts, check_target, encode_manifest
from foreword.tiers.tier import BlockRun


def write_prefix_file(files: FileLayer, path: Path, facts: Facts, run: BlockRun, *, overwrite: bool = False) -> int:
    """Write blocks to a new file, mode 0600; returns its size in bytes. Raises ConfigError.

    `facts` are those of `manifest_facts` with `keys` and `num_tokens`. After an error the path is as it was.
    """
    path = path.expanduser()
    check_target(path, overwrite=overwrite)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        fd = files.create(unfinished)
        try:
            num_bytes = _write(files, fd, facts, run)
            files.sync(fd)
        finally:
            files.close(fd)
        check_target(path, overwrite=overwrite)
        files.rename(unfinished, path)
    except OSError as error:
        raise ConfigError(
            f"path={str(path)!r} cannot be written: {error.strerror or error}; give a path that this user can write"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            files.unlink(unfinished)
    _sync_folder(files, path.parent)
    return num_bytes


def _write(files: FileLayer, fd: int, facts: Facts, run: BlockRun) -> int:
    parts = split_run(run.payload_bytes, np.arange(len(run.keys)))
    sizes = {"num_blocks": len(run.keys), "run_bytes": sum(run_bytes_of(run.payload_bytes[part]) for part in parts)}
    manifest = encode_manifest({**facts, **sizes, "namespace": run.keys.namespace.hex()})
    digest, offset, buffer = hashlib.sha256(manifest), len(manifest), RunBuffer()
    write_fully(files, fd, memoryview(manifest), 0, uncached=False)
    created_s = int(time.time())
    for number, part in enumerate(parts, 1):
        buffer.begin(run.payload_bytes[part])
        for index in part.tolist():
            num_bytes = int(run.payload_bytes[index])
            run.source.take(index, buffer.place(num_bytes)[:num_bytes])
            buffer.add(run, index, num_bytes)
        _, data = buffer.finish(number, run.keys.namespace, NO_CIPHER, offset, created_s=created_s, expires_s=0)
        write_fully(files, fd, data, offset, uncached=False)
        digest.update(data)
        offset += len(data)
    write_fully(files, fd, memoryview(digest.digest()), offset, uncached=False)
    return offset + digest.digest_size


def _sync_folder(files: FileLayer, folder: Path) -> None:
    """Make a new name survive a loss of power, where the file system can."""
    with contextlib.suppress(OSError):
        fd = files.open_for_reading(folder)
        with contextlib.suppress(OSError):
            files.sync(fd)
        close_quietly(files, fd)

"""Reads prefix files: everything is verified before a block is given away, and each block again when it is."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from foreword.errors import ConfigError
from foreword.tiers.disk.files import FileLayer, close_quietly, read_fully
from foreword.tiers.disk.run_format import NO_CIPHER, PAGE, RunHeader, padded
from foreword.tiers.disk.segments import Damage, read_block, scan_runs
from foreword.tiers.prefix_file.manifest import (
    DIGEST_BYTES,
    HEAD_BYTES,
    Facts,
    ImportReport,
    UnsoundFileError,
    decode_manifest,
    manifest_length,
)
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockRun, Tier

AT_ONCE_BYTES = 1 << 20
PATIENCE_S = 60.0
"""For a tier to store one run."""


class PrefixFile:
    """An open file that was found sound. Raises ConfigError if it cannot be opened, UnsoundFileError if it is damaged.

    Close it, or use it as a context manager.
    """

    def __init__(self, files: FileLayer, path: Path) -> None:
        self.path, self._files = path, files
        real = Path(os.path.realpath(path.expanduser()))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_blocks(self) -> int:
        """Of all groups."""
        return sum(len(header.entries) for header in self.runs)

    def read(self, header: RunHeader, index: int, out: memoryview) -> None:
        """Copy a block to `out`, which has its length. Raises OSError, also if it is no longer as it was verified."""
        buffer = memoryview(bytearray(padded(len(out))))
        if not read_block(self._files, self._fd, header, index, buffer, uncached=False):
            raise OSError(f"{self.path} was changed after it was verified")
        out[:] = buffer[: len(out)]

    def block_runs(self) -> Iterator[BlockRun]:
        """What a tier can store, run by run, while the file is open."""
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
        """Verify runs, blocks and the digest of all. Raises UnsoundFileError for the first damage."""
        end = self._begin + int(self.facts["run_bytes"])
        if size != end + DIGEST_BYTES:
            raise UnsoundFileError(f"the file ends at byte {size}, but a whole one has {end + DIGEST_BYTES} bytes")
        namespace = bytes.fromhex(self.facts["namespace"])
        for run in scan_runs(self._files, self._fd, self._begin, end, uncached=False):
            if isinstance(run, Damage):
                raise UnsoundFileError(f"the run at byte {run.offset} has no sound header")
            if run.namespace != namespace or run.cipher_id != NO_CIPHER or run.offset + run.run_bytes > end:
                raise UnsoundFileError(f"the run at byte {run.offset} does not belong into this file")
            self._verify_blocks(run)
            self.runs.append(run)
        if self.num_blocks != self.facts["num_blocks"]:
            raise UnsoundFileError(f"it has {self.num_blocks} blocks instead of {self.facts['num_blocks']}")
        digest, told, offset = hashlib.sha256(), bytearray(DIGEST_BYTES), 0
        chunk = memoryview(bytearray(AT_ONCE_BYTES))
        while offset < end:
            piece = chunk[: min(len(chunk), end - offset)]
            self._read_whole(piece, offset)
            digest.update(piece)
            offset += len(piece)
        self._read_whole(memoryview(told), end)
        if digest.digest() != told:
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


def store_prefix_file(found: PrefixFile, tier: Tier) -> ImportReport:
    """Store the blocks of a file in a tier, and wait until it has them."""
    outcomes: Counter[str] = Counter()
    for run in found.block_runs():
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
        return ImportReport(rejected=f"the {tier.name} tier stored none of its {found.num_blocks} blocks ({reasons})")
    return ImportReport(num_stored, found.facts["num_tokens"] if num_stored == found.num_blocks else 0)

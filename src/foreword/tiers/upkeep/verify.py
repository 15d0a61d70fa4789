"""`foreword cache verify DIR`: reads every block and recomputes every checksum.

A damaged block is never served, so damage costs space and time, but never changes an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from foreword.config.sizes import format_bytes
from foreword.tiers.cipher import NO_CIPHER_ID, AesGcm, Cipher, block_name, read_secret
from foreword.tiers.disk.files import RealFiles, can_leave_cache, close_quietly
from foreword.tiers.disk.segments import PAGE, Damage, RunHeader, padded, read_block, scan_runs
from foreword.tiers.upkeep.survey import SegmentFile, Survey, survey
from foreword.tiers.upkeep.table import ProgressLine, counted

Advance = Callable[[int], None]
"""Is called with the number of bytes that were read since the last call."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Damage in a file."""

    file: str
    """Its path below the cache directory."""
    offset: int
    key: str | None
    """The block's key in hexadecimal digits; None if the damage is not in a block."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}  offset {self.offset}  key {self.key or '-'}  {self.reason}"


@dataclass(slots=True)
class Verdict:
    """The results for one segment or more."""

    num_sound: int = 0
    num_sealed: int = 0
    """Sound encrypted blocks that could not be decrypted, because their secret was not given."""
    num_damaged: int = 0
    """Damaged blocks; there may be more under damaged headers."""
    num_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    num_unfinished: int = 0
    """Segments whose end a process was writing."""
    num_gone: int = 0
    """Segments that their process evicted meanwhile."""

    def add(self, other: Verdict) -> None:
        for name in ("num_sound", "num_sealed", "num_damaged", "num_bytes", "num_unfinished", "num_gone"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.findings += other.findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache verify`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory")
    add_key_argument(parser)


def add_key_argument(parser: argparse.ArgumentParser) -> None:
    """The flag for encrypted caches."""
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the secret of an encrypted cache")


def run(args: argparse.Namespace) -> int:
    """Verify all blocks and print the damage; returns the exit code, 1 for damage."""
    cipher = cipher_of(args.key_file)
    cache = survey(RealFiles(), args.directory)
    total = Verdict()
    for path, reason in {**cache.manifests.unsound, **cache.unreadable}.items():
        total.findings.append(Finding(cache.name(path), 0, None, reason))
    for verdict in verdicts(cache, cipher).values():
        total.add(verdict)
    _print(cache, total, args)
    return 1 if total.findings else 0


def cipher_of(key_file: Path | None) -> Cipher | None:
    """The cipher with the secret of a key file; None without a key file. Raises ConfigError."""
    return None if key_file is None else AesGcm(read_secret(key_file))


def verdicts(cache: Survey, cipher: Cipher | None) -> dict[Path, Verdict]:
    """The verdict on each segment. Reads all segments, and shows progress at a terminal."""
    progress = ProgressLine("verifying", sum(segment.num_bytes for segment in cache.segments))
    try:
        return {segment.path: verify_segment(cache, segment, cipher, progress.advance) for segment in cache.segments}
    finally:
        progress.end()


def verify_segment(cache: Survey, segment: SegmentFile, cipher: Cipher | None, advance: Advance) -> Verdict:
    """Read one segment and check all that can be checked."""
    files, verdict, name = cache.files, Verdict(), cache.name(segment.path)
    try:
        fd = files.open_for_reading(segment.path)
    except FileNotFoundError:
        verdict.num_gone = 1
        return verdict
    except OSError as error:
        verdict.findings.append(Finding(name, 0, None, f"the file cannot be read: {error.strerror}"))
        return verdict
    last, end = Verdict(), 0
    try:
        reader = _RunReader(files, fd, name, cipher, uncached=can_leave_cache(files, fd))
        size = files.fstat(fd).st_size
        for part in scan_runs(files, fd, 0, size, uncached=reader.uncached):
            # Only the last part of a segment can be unfinished, so each part counts once the next part is found.
            verdict.add(last)
            last = reader.verify(part)
            before, end = end, min(size, part.end if isinstance(part, Damage) else part.offset + part.run_bytes)
            verdict.num_bytes += end - before
            advance(end - before)
    except OSError as error:
        last.findings.append(Finding(name, end, None, f"the file cannot be read: {error.strerror}"))
    finally:
        close_quietly(files, fd)
    if segment.may_grow and last.findings:
        verdict.num_unfinished = 1
    else:
        verdict.add(last)
    return verdict


class _RunReader:
    """Reads the runs of one open segment."""

    def __init__(self, files: RealFiles, fd: int, name: str, cipher: Cipher | None, *, uncached: bool) -> None:
        self._files, self._fd, self._name, self._cipher = files, fd, name, cipher
        self.uncached = uncached

    def verify(self, part: RunHeader | Damage) -> Verdict:
        verdict = Verdict()
        if isinstance(part, Damage):
            reason = f"no sound header in {counted(part.end - part.offset, 'byte')}; the blocks there are not known"
            verdict.findings.append(Finding(self._name, part.offset, None, reason))
            return verdict
        longest = padded(int(part.entries["stored_bytes"].max()))
        stored, payload = memoryview(bytearray(longest)), memoryview(bytearray(longest))
        for index, entry in enumerate(part.entries):
            fault = self._fault(part, index, stored[: padded(int(entry["stored_bytes"]))], payload)
            if fault is None:
                verdict.num_sound += 1
                verdict.num_sealed += part.cipher_id != NO_CIPHER_ID and not self._opens(part)
            else:
                verdict.num_damaged += 1
                where = part.offset + int(entry["page"]) * PAGE
                verdict.findings.append(Finding(self._name, where, entry["key"].tobytes().hex(), fault))
        return verdict

    def _opens(self, header: RunHeader) -> bool:
        return self._cipher is not None and self._cipher.cipher_id == header.cipher_id

    def _fault(self, header: RunHeader, index: int, stored: memoryview, payload: memoryview) -> str | None:
        """Say what is wrong with a block; None if it is sound."""
        try:
            is_sound = read_block(self._files, self._fd, header, index, stored, uncached=self.uncached)
        except OSError as error:
            return f"the block cannot be read: {error.strerror}"
        if is_sound is None:
            return "the file ends before the block does"
        if not is_sound:
            return "the checksum differs"
        if self._cipher is not None and self._opens(header):
            entry = header.entries[index]
            name = block_name(header.namespace, int(entry["group"]), entry["key"].tobytes())
            if self._cipher.open(name, stored[: int(entry["stored_bytes"])], payload) is None:
                return "the block does not decrypt"
        return None


def _print(cache: Survey, total: Verdict, args: argparse.Namespace) -> None:
    for finding in total.findings:
        print(finding)
    print(
        f"{counted(total.num_sound, 'block')} sound, {total.num_damaged:,} damaged; "
        f"read {format_bytes(total.num_bytes)} in {counted(len(cache.segments) - total.num_gone, 'segment')}"
    )
    if total.num_sealed:
        remedy = "they belong to another secret" if args.key_file else "give --key-file to try that"
        print(
            f"{counted(total.num_sealed, 'block')} of these are encrypted: the checksums are right, but nothing was "
            f"decrypted; {remedy}"
        )
    if total.num_unfinished:
        print(f"{counted(total.num_unfinished, 'segment')} ends in a run that a live process is writing, not judged")
    if total.num_gone:
        print(f"{counted(total.num_gone, 'segment')} went away meanwhile: a live process evicted or moved them")
    if total.findings:
        print(
            "damaged blocks are never served; to delete the segments that hold them, run "
            f"`foreword cache prune --damaged {args.directory}`"
        )

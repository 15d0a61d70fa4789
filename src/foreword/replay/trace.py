"""Reads recorded traffic in any known format. Writes recordings that contain no text.

A file has one JSON value on each line, gzipped or plain; `lines` knows the contents of a line. However large the file
is, only a few hundred lines and the turns of AIPerf's sessions are in memory.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError, TraceError
from foreword.replay.keys import PrefixKeys, chain_each
from foreword.replay.lines import (
    MAX_BLOCK_TOKENS,
    TOKEN_BLOCK_TOKENS,
    LineParser,
    NoRequestError,
    ParsedLine,
    PromptEncoder,
    SkimmedLine,
)

_AS_GZIP = 31
MAX_REPORTED_LINES = 5
NUM_LINES_AHEAD = 256
NUM_BYTES_AHEAD = 2**20
NOT_READ = (EOFError, zlib.error, OSError)
"""Errors of a file that cannot be read or unpacked."""
ZSTD = b"\x28\xb5\x2f\xfd"


class LineFile:
    """Lines of text, gzipped if the file's name ends in .gz. `close` may be called twice."""

    def __init__(self, file: Path) -> None:
        """Start `file` from empty. Raises OSError."""
        self._file = file.open("wb", buffering=0)
        self._packer = zlib.compressobj(wbits=_AS_GZIP) if file.suffix == ".gz" else None
        self._num_bytes = 0
        """Number of bytes that were written as whole lines."""

    def write(self, line: str) -> None:
        """Append a line. If this raises OSError, the file is as it was before, and the call may be repeated."""
        data = f"{line}\n".encode()
        packer = None if self._packer is None else self._packer.copy()  # the old packer continues if this write fails
        if packer is not None:
            data = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
        self._append(data)
        self._packer = packer

    def _append(self, data: bytes) -> None:
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            with suppress(OSError):  # a pipe cannot be cut back
                self._file.truncate(self._num_bytes)
                self._file.seek(0, os.SEEK_END)
            raise
        self._num_bytes += len(data)

    def close(self) -> None:
        """Finish the file. It is closed even if this raises OSError."""
        if self._file.closed:
            return
        with self._file:
            if self._packer is not None:
                self._append(self._packer.flush())


class RecordedRequest(NamedTuple):
    """One request of a recording."""

    timestamp_ms: float | None
    """Time of arrival; None if the recording has no times."""
    keys: PrefixKeys
    """[blocks]: one number for each block of the prompt, equal for equal prefixes. A recording may leave out a partial
    last block, so a short prompt may have no keys."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_tokens: int
    """Prompt tokens per block."""

    def tokens_of(self, num_blocks: int) -> int:
        """The number of prompt tokens in the first `num_blocks` blocks."""
        return min(num_blocks * self.block_tokens, self.num_prompt_tokens)


def arrivals(recording: Iterable[RecordedRequest]) -> Iterator[tuple[float, RecordedRequest]]:
    """Yield each request with its arrival in seconds: its recorded time, or the previous arrival if that is later.

    Raises ConfigError for a recording without times.
    """
    now = 0.0
    for request in recording:
        if request.timestamp_ms is None:
            raise ConfigError(
                "the recording has no arrival times, so time cannot be simulated; leave out --flops and --prefill-rate"
            )
        now = max(now, request.timestamp_ms / 1000)
        yield now, request


# --------------------------------------------------------------------------------------------- reading


class TraceReader:
    """The requests of a file, in the file's order. The reader can be iterated several times.

    A line that is not a request is skipped, counted and reported with its number; if `strict`, it raises TraceError.
    A file that cannot be read, or holds no request at all, raises TraceError too. `block_tokens`: None stands for the
    format's size (512 for Mooncake's, 16 for tokens).
    """

    def __init__(
        self,
        file: Path,
        *,
        block_tokens: int | None = None,
        tokenizer: PromptEncoder | None = None,
        strict: bool = False,
        max_requests: int | None = None,
    ) -> None:
        if block_tokens is not None and not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(f"block_tokens={block_tokens} is no size of a block; use 1 to {MAX_BLOCK_TOKENS}")
        if max_requests is not None and max_requests < 1:
            raise ConfigError(f"max_requests={max_requests} is too small; use at least 1")
        self.file = file
        self.strict = strict
        self.on_progress: Callable[[int], None] | None = None
        """Called with the number of bytes read since the last call."""
        self._parser = LineParser(block_tokens, tokenizer)
        self._max_requests = max_requests
        self.num_requests = 0
        """The number of requests in the last iteration. The next two fields describe that iteration too."""
        self.num_malformed = 0
        self.malformed: list[str] = []
        """The first `MAX_REPORTED_LINES` malformed lines, each with its number and error."""

    def __iter__(self) -> Iterator[RecordedRequest]:
        self.num_requests = self.num_malformed = 0
        self.malformed = []
        self._parser.start_again()
        block_tokens = None
        for request in self._requests():
            if block_tokens is None:
                block_tokens = request.block_tokens
            elif request.block_tokens != block_tokens:
                raise TraceError(
                    f"trace {str(self.file)!r} mixes blocks of {block_tokens} and {request.block_tokens} tokens; "
                    "give files of one format"
                )
            self.num_requests += 1
            yield request
            if self.num_requests == self._max_requests:
                return
        if not self.num_requests:
            why = f": {self.malformed[0]}" if self.malformed else "; give a file with one JSON object per line"
            raise TraceError(f"trace {str(self.file)!r} holds no requests{why}")

    def _requests(self) -> Iterator[RecordedRequest]:
        """Read some lines ahead and compute their ids and keys together, which is much faster."""
        ahead: list[SkimmedLine | ParsedLine | TraceError] = []
        num_bytes = 0
        for line in self._lines():
            ahead.append(line)
            if isinstance(line, SkimmedLine):
                num_bytes += len(line.line)
            if len(ahead) == NUM_LINES_AHEAD or num_bytes >= NUM_BYTES_AHEAD:
                yield from self._of_lines(ahead)
                ahead, num_bytes = [], 0
        yield from self._of_lines(ahead)

    def _of_lines(self, lines: list[SkimmedLine | ParsedLine | TraceError]) -> Iterator[RecordedRequest]:
        read = self._with_ids(lines)
        keys = iter(_keys_of([line for line in read if isinstance(line, ParsedLine)]))
        for line in read:
            if isinstance(line, ParsedLine):
                yield RecordedRequest(line[0], next(keys), *line[2:])
            elif not isinstance(line, NoRequestError):
                self._note_malformed(line)

    def _with_ids(self, lines: list[SkimmedLine | ParsedLine | TraceError]) -> list[ParsedLine | TraceError]:
        """Read the ids of the skimmed lines. If an id is not a number, parse these lines as a whole."""
        skimmed = [line for line in lines if isinstance(line, SkimmedLine)]
        ids = _read_numbers(b",".join([line.ids for line in skimmed]), sum(line.num_ids for line in skimmed))
        read: list[ParsedLine | TraceError] = []
        end = 0
        for line in lines:
            if not isinstance(line, SkimmedLine):
                read.append(line)
            elif ids is None:
                read.append(self._parser.parse(line.line, line.where))
            else:
                start, end = end, end + line.num_ids
                read.append(ParsedLine(line.request[0], ids[start:end], *line.request[2:]))  # `_replace` is slow
        return read

    def _lines(self) -> Iterator[SkimmedLine | ParsedLine | TraceError]:
        """Yield each non-empty line, or its error. An error of the file itself comes last."""
        number, of_trace = 0, f"of trace {str(self.file)!r}"
        try:
            with opened_lines(self.file) as (raw, lines):
                num_reported = 0
                for number, line in enumerate(lines, 1):
                    if self.on_progress is not None and not number % 256 and raw.seekable():
                        self.on_progress(raw.tell() - num_reported)
                        num_reported = raw.tell()
                    if line.strip():
                        where = f"line {number} {of_trace}"
                        yield self._parser.skim(line, where) or self._parser.parse(line, where)
        except NOT_READ as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            if not number:
                raise TraceError(
                    f"trace {str(self.file)!r} cannot be read: {what}; give a JSONL file, gzipped or not"
                ) from error
            yield TraceError(
                f"after line {number} trace {str(self.file)!r} cannot be read: {what}; what follows is missing"
            )

    def _note_malformed(self, what: TraceError) -> None:
        if self.strict:
            raise what
        self.num_malformed += 1
        if len(self.malformed) < MAX_REPORTED_LINES:
            self.malformed.append(str(what))


def _read_numbers(text: bytes, count: int) -> PrefixKeys | None:
    """Read a text like `1, 2,3`. Returns its numbers, [count], or None for any other text."""
    from foreword.replay.compiled import read_numbers  # numba is slow to import

    numbers = np.empty(count, np.uint64)
    return numbers if read_numbers(np.frombuffer(text, np.uint8), numbers) else None


def _keys_of(lines: list[ParsedLine]) -> list[PrefixKeys]:
    if not lines:
        return []
    lengths = [len(line.content_ids) for line in lines]
    keys = chain_each(np.concatenate([line.content_ids for line in lines]), lengths)
    ends = list(accumulate(lengths, initial=0))
    return [keys[start:end] for start, end in pairwise(ends)]


@contextmanager
def opened_lines(file: Path) -> Iterator[tuple[IO[bytes], Iterable[bytes]]]:
    """Open a file. Yields the raw file, which knows the position in bytes, and the unpacked lines without a BOM."""
    with file.open("rb") as raw:
        begin = raw.peek(4)[:4]  # a pipe cannot seek
        if begin == ZSTD or ".lcp" in file.suffixes:
            what = "packed by zstd" if begin == ZSTD else "in libCacheSim's format lcp"
            raise TraceError(f"trace {str(file)!r} is {what}, which is not read; give JSON lines, gzipped or not")
        is_gzip = begin[:2] == b"\x1f\x8b"
        with gzip.GzipFile(fileobj=raw) if is_gzip else nullcontext(raw) as lines:
            first = lines.readline().removeprefix(codecs.BOM_UTF8)
            yield raw, chain((first,), lines)


# --------------------------------------------------------------------------------------------- writing


class TraceWriter:
    """Writes a recording that `TraceReader` reads: lengths, times and hashed ids, but no text and no tokens.

    Ids are hashes under a secret that is forgotten when the writer is closed, so nobody can test whether a guessed text
    was among the prompts. Equal prefixes have equal ids only within one file. A line is in the file when `write`
    returns, so no line is lost if the process is killed.
    """

    def __init__(self, file: Path, *, block_tokens: int = TOKEN_BLOCK_TOKENS, secret: bytes | None = None) -> None:
        """Start an empty `file`, gzipped if it ends in .gz. Files with the same `secret` (16 to 64 bytes) have the
        same ids for equal prefixes.
        """
        if block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens} is too small; use at least 1")
        if secret is not None and not 16 <= len(secret) <= 64:
            raise ConfigError(f"the secret has {len(secret)} bytes; use 16 to 64")
        self.block_tokens = block_tokens
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._path = file
        try:
            self._file: LineFile | None = LineFile(file)
        except OSError as error:
            raise self._unwritable(error, "choose another place") from error

    def write(
        self,
        *,
        timestamp_ms: float,
        prompt_token_ids: npt.ArrayLike,
        num_output_tokens: int,
        namespace: str = "",
        jumps: Sequence[tuple[int, int]] = (),
        spans: Sequence[tuple[int, str]] = (),
        linked: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one request. Prompts share ids only within a `namespace` (adapter and salt, say).

        `jumps`: index and position of each token whose position does not follow the token before it (a gap). After a
        gap, only prompts with equal gaps share ids.
        `spans`: index and digest of each picture, since a picture's tokens do not say what it shows.
        `linked`: facts about linked parts of the prompt, for people: `TraceReader` ignores them.

        Times should be relative to the recording's start, since an absolute time also says something about a user. If
        `write` raises TraceError, the file is unchanged, and the call may be repeated.
        """
        tokens = np.ascontiguousarray(prompt_token_ids, np.int32)
        size = self.block_tokens
        parent = hashlib.blake2b(namespace.encode(), key=self._secret, digest_size=16).digest()
        moved: dict[int, bytes] = {}
        for at, position in jumps:
            start = at // size * size
            moved[start] = moved.get(start, b"") + b"|%d:%d" % (at, position)
        for at, digest in spans:
            start = at // size * size
            moved[start] = moved.get(start, b"") + b"|%d=%s" % (at, digest.encode())
        ids = []
        for start in range(0, len(tokens), size):
            block = parent + tokens[start : start + size].tobytes() + moved.get(start, b"")
            parent = hashlib.blake2b(block, key=self._secret, digest_size=16).digest()
            ids.append(_id_of(parent))
        self._append(timestamp_ms, len(tokens), num_output_tokens, ids, {} if linked is None else {"linked": linked})

    def write_keys(self, *, timestamp_ms: float, keys: Sequence[int | bytes], num_output_tokens: int) -> None:
        """Append one request of whole blocks, from an engine's block keys instead of the prompt's tokens.

        Raises TraceError, as `write` does.
        """
        ids = []
        for key in keys:
            name = key if isinstance(key, bytes) else b"%d" % key
            ids.append(_id_of(hashlib.blake2b(name, key=self._secret, digest_size=16).digest()))
        self._append(timestamp_ms, len(ids) * self.block_tokens, num_output_tokens, ids)

    def _append(
        self,
        timestamp_ms: float,
        input_length: int,
        output_length: int,
        ids: list[int],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        assert self._file is not None, "writing after close()"
        record = {
            "timestamp": timestamp_ms,
            "input_length": input_length,
            "output_length": output_length,
            "block_tokens": self.block_tokens,
            "hash_ids": ids,
            **(more or {}),
        }
        try:
            self._file.write(json.dumps(record))
        except OSError as error:
            raise self._unwritable(error, "make room for it") from error

    def _unwritable(self, error: OSError, remedy: str) -> TraceError:
        return TraceError(f"trace {str(self._path)!r} cannot be written: {error.strerror or error}; {remedy}")

    def close(self) -> None:
        """Finish the file. It is closed even if this raises TraceError. A second call does nothing."""
        file, self._file, self._secret = self._file, None, b""
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            raise self._unwritable(error, "make room for it") from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _id_of(digest: bytes) -> int:
    """The first 63 bits, which fit into a signed 64-bit number."""
    return int.from_bytes(digest[:8], "little") >> 1

"""Recorded traffic: reading it, whatever its format, and writing it without its text.

Knows files, lines and what a line says of a request; knows nothing of caches. One JSON value a line, gzip
or plain; a line's keys tell its format:

    hash_ids            Mooncake: one id per block of the prompt, with input_length, output_length, timestamp (ms)
    prompt_token_ids    or token_ids, or a bare list: plain token ids
    prompt | messages   OpenAI: text or a conversation, alone or as the `body` of a batch line; needs a tokenizer

Lines are read one by one, so memory does not grow with the file.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError, ForewordError, TraceError
from foreword.replay.keys import PrefixKeys, as_content_ids, chain_each, content_ids_of_tokens

MOONCAKE_BLOCK_TOKENS = 512
TOKEN_BLOCK_TOKENS = 16
DEFAULT_OUTPUT_TOKENS = 1
MAX_REPORTED_LINES = 5
NUM_LINES_AHEAD = 256
_DECODER = json.JSONDecoder()


class PromptEncoder(Protocol):
    """The part of `foreword.text.Tokenizer` that turns prompts into token ids."""

    def encode(self, text: str) -> npt.NDArray[np.int32]: ...
    def render_chat(self, messages: Any) -> npt.NDArray[np.int32]: ...


class RecordedRequest(NamedTuple):
    """One request of a recording."""

    timestamp_ms: float | None
    """Arrival; None where the recording does not tell."""
    keys: PrefixKeys
    """[blocks]: one number for each block of the prompt, a partial last one included; equal for equal prefixes."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_tokens: int
    """Prompt tokens per block."""

    @property
    def num_full_blocks(self) -> int:
        return self.num_prompt_tokens // self.block_tokens

    def tokens_of(self, num_blocks: int) -> int:
        """Prompt tokens in the first `num_blocks` blocks."""
        return min(num_blocks * self.block_tokens, self.num_prompt_tokens)


# ---------------------------------------------------------------------------------------------- lines


class MooncakeRecord(NamedTuple):
    """One line as Mooncake publishes it."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[Any]


def parse_json_line(line: str, where: str) -> Any:
    """The value on a line; `where` names the line. Raises TraceError."""
    try:
        if line[:1] in "{[":  # half the time of `loads`, which looks for white space by regular expressions
            value, end = _DECODER.raw_decode(line)
            if end >= len(line) - 1 and line[end:] in ("", "\n"):
                return value
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON ({error}); each line must be one JSON object") from error


def parse_mooncake_record(record: object, where: str, *, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> MooncakeRecord:
    """Check what a line of Mooncake's format says. Raises TraceError, naming the value."""
    if not isinstance(record, dict):
        raise TraceError(f"{where} is {json.dumps(record)[:40]!r}; each line must be one JSON object")
    timestamp, input_length, output_length = map(record.get, ("timestamp", "input_length", "output_length"))
    if type(timestamp) not in (int, float) or not 0 <= timestamp < float("inf"):
        raise TraceError(f"{where}: timestamp={timestamp!r}; it must be a number of at least 0")
    if type(input_length) is not int or input_length < 1:
        raise TraceError(f"{where}: input_length={input_length!r}; it must be a number of at least 1")
    if type(output_length) is not int or output_length < 0:
        raise TraceError(f"{where}: output_length={output_length!r}; it must be a number of at least 0")
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        raise TraceError(f"{where}: hash_ids={str(ids)[:40]}; it must be a list of numbers of at least 0")
    num_blocks = -(-input_length // block_tokens)
    if len(ids) != num_blocks:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} ids, but input_length={input_length} takes {num_blocks} "
            f"blocks of {block_tokens} tokens; give one id per block"
        )
    return MooncakeRecord(float(timestamp), input_length, output_length, ids)


class _ParsedLine(NamedTuple):
    """A request whose prefix keys are not worked out yet."""

    timestamp_ms: float | None
    content_ids: PrefixKeys
    num_prompt_tokens: int
    num_output_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class _LineParser:
    """Turns the JSON value of a line into a request."""

    block_tokens: int | None
    tokenizer: PromptEncoder | None

    def parse(self, record: object, where: str) -> _ParsedLine:
        if isinstance(record, list) and record and isinstance(record[0], dict):
            raise TraceError(f"{where} is a list of {len(record)} objects; write each of them on a line of its own")
        if isinstance(record, list):
            return self._of_tokens({}, record, where)
        if not isinstance(record, dict):
            raise TraceError(f"{where} is {json.dumps(record)[:40]!r}; each line must be a JSON object or a list")
        if "hash_ids" in record:
            return self._of_block_ids(record, where)
        body = record.get("body")
        merged = {**record, **body} if isinstance(body, dict) else record
        for name in ("prompt_token_ids", "token_ids"):
            if name in merged:
                return self._of_tokens(merged, merged[name], where)
        if isinstance(merged.get("prompt"), list):
            return self._of_tokens(merged, merged["prompt"], where)
        if "prompt" in merged or "messages" in merged:
            return self._of_text(merged, where)
        raise TraceError(
            f"{where} has the keys {', '.join(list(record)[:6]) or '(none)'}; give hash_ids, prompt_token_ids, prompt "
            "or messages"
        )

    def _of_block_ids(self, record: dict[str, Any], where: str) -> _ParsedLine:
        block_tokens = self.block_tokens or _number(record, "block_tokens", 1, where) or MOONCAKE_BLOCK_TOKENS
        ids = record["hash_ids"]
        if isinstance(ids, list) and ids and set(map(type, ids)) == {str}:
            try:  # other recorders write digests
                content_ids = as_content_ids(ids)
            except ValueError as error:
                raise TraceError(f"{where}: hash_ids: {error}") from error
            record = {**record, "hash_ids": [0] * len(ids)}
        else:
            content_ids = None
        defaults = {"timestamp": 0, "output_length": 0}
        checked = parse_mooncake_record({**defaults, **record}, where, block_tokens=block_tokens)
        if content_ids is None:
            content_ids = as_content_ids(checked.hash_ids)
        timestamp = checked.timestamp_ms if "timestamp" in record else None
        return _ParsedLine(timestamp, content_ids, checked.input_length, checked.output_length, block_tokens)

    def _of_text(self, record: dict[str, Any], where: str) -> _ParsedLine:
        if self.tokenizer is None:
            raise TraceError(f"{where} holds text; give the folder of the model's tokenizer with --tokenizer")
        try:
            if "messages" in record:
                tokens = self.tokenizer.render_chat(record["messages"])
            else:
                tokens = self.tokenizer.encode(record["prompt"])
        except ForewordError as error:
            raise TraceError(f"{where}: {error}") from error
        return self._of_tokens(record, tokens.tolist(), where)

    def _of_tokens(self, record: dict[str, Any], tokens: object, where: str) -> _ParsedLine:
        if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
            raise TraceError(f"{where}: {str(tokens)[:40]} is not a prompt; give a list of at least one token id")
        if min(tokens) < 0 or max(tokens) >= 2**31:
            raise TraceError(f"{where}: token ids {min(tokens)} to {max(tokens)}; they must be from 0 to 2**31 - 1")
        names = ("output_length", "output_tokens", "max_completion_tokens", "max_tokens")
        lengths = [length for name in names if (length := _number(record, name, 0, where)) is not None]
        block_tokens = self.block_tokens or TOKEN_BLOCK_TOKENS
        return _ParsedLine(
            _timestamp_ms(record, where),
            content_ids_of_tokens(tokens, block_tokens),
            len(tokens),
            lengths[0] if lengths else DEFAULT_OUTPUT_TOKENS,
            block_tokens,
        )


def _number(record: Mapping[str, Any], name: str, least: int, where: str) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise TraceError(f"{where}: {name}={value!r}; it must be a whole number of at least {least}")
    return value


def _timestamp_ms(record: Mapping[str, Any], where: str) -> float | None:
    """`timestamp` is in ms, as in Mooncake's format; `created` in s, as in OpenAI's."""
    for name, scale in (("timestamp", 1.0), ("created", 1000.0)):
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise TraceError(f"{where}: {name}={value!r}; it must be a number of at least 0")
        return scale * value
    return None


# --------------------------------------------------------------------------------------------- reading


class TraceReader:
    """The requests of a file, in its order; may be iterated several times.

    A line that is not a request is passed over, counted and located, or, when `strict`, raises TraceError. So
    does a file that cannot be read or holds no request at all. `block_tokens` None: what the format says (512
    for Mooncake's, 16 for tokens). `on_progress` is told the bytes of the file that were read since the last call.
    """

    def __init__(
        self,
        file: Path,
        *,
        block_tokens: int | None = None,
        tokenizer: PromptEncoder | None = None,
        strict: bool = False,
        max_requests: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        if block_tokens is not None and block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens} is too small; use at least 1")
        if max_requests is not None and max_requests < 1:
            raise ConfigError(f"max_requests={max_requests} is too small; use at least 1")
        self.file = file
        self.strict = strict
        self.on_progress = on_progress
        self._parser = _LineParser(block_tokens, tokenizer)
        self._max_requests = max_requests
        self.num_requests = 0
        """Of the last iteration, as the next two."""
        self.num_malformed = 0
        self.malformed: list[str] = []
        """The first `MAX_REPORTED_LINES` malformed lines, each with its number and what is wrong."""

    def __iter__(self) -> Iterator[RecordedRequest]:
        self.num_requests = self.num_malformed = 0
        self.malformed = []
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
            found = f": {self.malformed[0]}" if self.malformed else "; give a file with one JSON object per line"
            raise TraceError(f"trace {str(self.file)!r} holds no requests{found}")

    def _requests(self) -> Iterator[RecordedRequest]:
        """A few lines are read ahead: their keys are worked out together, which is much faster."""
        parsed: list[_ParsedLine] = []
        for line in self._lines():
            if isinstance(line, _ParsedLine):
                parsed.append(line)
                if len(parsed) < NUM_LINES_AHEAD:
                    continue
            yield from _with_keys(parsed)
            parsed.clear()
            if not isinstance(line, _ParsedLine):
                self._note_malformed(line)
        yield from _with_keys(parsed)

    def _lines(self) -> Iterator[_ParsedLine | TraceError]:
        """The lines that are not empty, or what is wrong with them; an error in the file is the last of them."""
        number, of_trace = 0, f"of trace {str(self.file)!r}"
        try:
            with self._open() as (raw, lines):
                told = 0
                for number, line in enumerate(lines, 1):
                    if self.on_progress is not None and not number % 256:
                        self.on_progress(raw.tell() - told)
                        told = raw.tell()
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield self._parse(line, f"line {number} {of_trace}")
        except (EOFError, zlib.error, OSError) as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            if not number:
                raise TraceError(
                    f"trace {str(self.file)!r} cannot be read: {what}; give a JSONL file, gzipped or not"
                ) from error
            yield TraceError(
                f"after line {number} trace {str(self.file)!r} cannot be read: {what}; what follows is missing"
            )

    def _parse(self, line: bytes, where: str) -> _ParsedLine | TraceError:
        try:
            return self._parser.parse(parse_json_line(line.decode(), where), where)
        except UnicodeDecodeError as error:
            return TraceError(
                f"{where} is not UTF-8 ({error.reason} at byte {error.start}); give JSONL, gzipped or not"
            )
        except TraceError as error:
            return error

    def _note_malformed(self, what: TraceError) -> None:
        if self.strict:
            raise what
        self.num_malformed += 1
        if len(self.malformed) < MAX_REPORTED_LINES:
            self.malformed.append(str(what))

    def _open(self) -> _OpenTrace:
        return _OpenTrace(self.file)


def _with_keys(parsed: list[_ParsedLine]) -> Iterator[RecordedRequest]:
    if not parsed:
        return
    lengths = [len(line.content_ids) for line in parsed]
    keys = chain_each(np.concatenate([line.content_ids for line in parsed]), lengths)
    end = 0
    for line, length in zip(parsed, lengths, strict=True):
        start, end = end, end + length
        yield RecordedRequest(
            line.timestamp_ms, keys[start:end], line.num_prompt_tokens, line.num_output_tokens, line.block_tokens
        )


class _OpenTrace:
    """The file itself, to know the place in it, and its lines, unpacked."""

    def __init__(self, file: Path) -> None:
        self._raw = file.open("rb")
        is_gzip = self._raw.read(2) == b"\x1f\x8b"
        self._raw.seek(0)
        self._lines: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if is_gzip else self._raw  # type: ignore[assignment]

    def __enter__(self) -> tuple[IO[bytes], Iterable[bytes]]:
        return self._raw, self._lines

    def __exit__(self, *_: object) -> None:
        with closing(self._raw), closing(self._lines):
            pass


# --------------------------------------------------------------------------------------------- writing


class TraceWriter:
    """Writes a recording that `TraceReader` reads: lengths, times and hashed ids, no text and no token.

    Ids are hashes under a secret that is forgotten when the writer is closed, so nobody can try out whether
    a text that he guesses was among the prompts; equal prefixes get equal ids within one file only.
    """

    def __init__(self, file: Path, *, block_tokens: int = TOKEN_BLOCK_TOKENS, secret: bytes | None = None) -> None:
        """Begins `file` anew, gzipped if its name ends in .gz; `secret` joins several files (16 to 64 bytes)."""
        if block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens} is too small; use at least 1")
        if secret is not None and not 16 <= len(secret) <= 64:
            raise ConfigError(f"the secret has {len(secret)} bytes; use 16 to 64")
        self.block_tokens = block_tokens
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        try:
            opened: IO[Any] = gzip.open(file, "wt") if file.suffix == ".gz" else file.open("w")  # noqa: SIM115
        except OSError as error:
            raise TraceError(f"trace {str(file)!r} cannot be written: {error}; choose another place") from error
        self._file: IO[str] | None = opened

    def write(
        self, *, timestamp_ms: float, prompt_token_ids: npt.ArrayLike, num_output_tokens: int, namespace: str = ""
    ) -> None:
        """Append one request. Prompts share ids only within a `namespace` (adapter and salt, say).

        Times should be relative to the recording's start: an absolute one is a fact about a user too.
        """
        assert self._file is not None, "write() after close()"
        tokens = np.ascontiguousarray(prompt_token_ids, np.int32)
        size = self.block_tokens
        parent = hashlib.blake2b(namespace.encode(), key=self._secret, digest_size=16).digest()
        ids = []
        for start in range(0, len(tokens), size):
            block = parent + tokens[start : start + size].tobytes()
            parent = hashlib.blake2b(block, key=self._secret, digest_size=16).digest()
            ids.append(int.from_bytes(parent[:8], "little") >> 1)
        record = {
            "timestamp": timestamp_ms,
            "input_length": len(tokens),
            "output_length": num_output_tokens,
            "block_tokens": size,
            "hash_ids": ids,
        }
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._secret = b""

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

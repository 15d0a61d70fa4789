"""Linking: counts the tokens that a cache would find if chunks could stand anywhere, and the recomputed tokens.

Two caches with LRU and equal memory get the same requests. The first finds a chunk only if all chunks before it are
the same as before. The second finds a chunk wherever it stands. A chunk that both find is exact. If only the second
finds a chunk, a method of linking computes a part of it again. A chunk is found as a whole or not at all.

A recorded line has `chunks`, each with an id, its number of tokens and a name for its part of the prompt:

    {"timestamp": 82000, "output_length": 192, "chunks": [["rules", 530, "system"], [7398, 266, "passages"], ...]}

RAGPulse's lines (Wang et al., 2025) are read too: `hash_ids` has the chunks of each part, whose lengths are in other
files of the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from foreword.errors import ConfigError, TraceError
from foreword.replay.caches import Lru
from foreword.replay.lines import parse_json_line
from foreword.replay.trace import NOT_READ, opened_lines

RAGPULSE_TRACE = "0_trace.jsonl"
RAGPULSE_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""The parts of RAGPulse's prompts, in the order in which its own replay writes them."""
MAX_CHUNK_TOKENS = 1 << 31


class Chunk(NamedTuple):
    """A part of a prompt. Chunks with equal ids have equal tokens."""

    id: int | str
    num_tokens: int
    part: str


def chunk_file(trace: Path) -> Path | None:
    """The file of chunked requests at a path, which may be RAGPulse's folder. None if there is no such file."""
    file = trace / RAGPULSE_TRACE if trace.is_dir() else trace
    if not file.is_file():  # a pipe could not be read again
        return None
    try:
        with opened_lines(file) as (_, lines):
            record = json.loads(next((line for line in islice(lines, 8) if line.strip()), b""))
    except (*NOT_READ, ValueError, RecursionError, TraceError):
        return None
    is_chunked = isinstance(record, dict) and ("chunks" in record or isinstance(record.get("hash_ids"), dict))
    return file if is_chunked else None


def read_chunks(file: Path, max_requests: int | None = None) -> Iterator[tuple[Chunk, ...]]:
    """Yield the chunks of each request, in the file's order. Raises TraceError at the first line without a request."""
    lengths: Mapping[int, int] | None = None
    num_requests = 0
    for where, record in _records(file):
        if isinstance(record.get("hash_ids"), dict):
            lengths = _read_lengths(file.parent) if lengths is None else lengths
            chunks = _of_ragpulse(record["hash_ids"], lengths, where)
        else:
            chunks = tuple(_chunk(value, where) for value in _list(record.get("chunks"), "chunks", where))
        if chunks:
            yield chunks
            num_requests += 1
        if num_requests == max_requests:
            return
    if not num_requests:
        raise TraceError(f"trace {str(file)!r} holds no requests; give a file with one JSON object per line")


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield two values for each line: its name, for error messages, and its JSON object."""
    try:
        with opened_lines(file) as (_, lines):
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where, text = f"line {number} of trace {str(file)!r}", line.decode()
                record = parse_json_line(text, where)
                if not isinstance(record, dict):
                    raise TraceError(f"{where} is {text.strip()[:40]!r}; each line must be one JSON object")
                yield where, record
    except (*NOT_READ, UnicodeDecodeError) as error:
        raise TraceError(f"trace {str(file)!r} cannot be read: {error}; give JSONL in UTF-8, gzipped or not") from error


def _list(value: object, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise TraceError(f"{where}: {name}={str(value)[:40]}; it must be a list")
    return value


def _chunk(value: object, where: str) -> Chunk:
    if isinstance(value, list) and len(value) in (2, 3):
        chunk_id, num_tokens, part = (*value, "")[:3]
        if isinstance(chunk_id, int | str) and _is_length(num_tokens) and isinstance(part, str):
            return Chunk(chunk_id, num_tokens, part)
    raise TraceError(f"{where}: the chunk {str(value)[:40]} is not [id, tokens] or [id, tokens, part]")


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_CHUNK_TOKENS


def _of_ragpulse(ids: dict[str, Any], lengths: Mapping[int, int], where: str) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    for part in RAGPULSE_PARTS:
        for chunk_id in _list(ids.get(part, []), part, where):
            if type(chunk_id) is not int or chunk_id not in lengths:
                raise TraceError(f"{where}: {part} names chunk {chunk_id!r}, whose length is in no file of its folder")
            chunks.append(Chunk(chunk_id, lengths[chunk_id], part.removesuffix("_ids")))
    return tuple(chunks)


def _read_lengths(folder: Path) -> dict[int, int]:
    """Read the number of tokens of each chunk from RAGPulse's other files, whose lines have an id and a length."""
    lengths: dict[int, int] = {}
    for file in sorted(folder.glob("[1-9]_*.jsonl")):
        for where, record in _records(file):
            values = list(record.values())
            if len(values) != 2 or type(values[0]) is not int or not _is_length(values[1]):
                raise TraceError(f"{where}: {str(record)[:60]} is not a chunk's id and its length")
            lengths[values[0]] = values[1]
    if not lengths:
        raise TraceError(f"{str(folder)!r} has no files of chunk lengths; put 1_sys_prompt.jsonl and the others there")
    return lengths


@dataclass(frozen=True, slots=True)
class LinkMethod:
    """A method of linking, which computes a chunk's first `first_k` tokens and a share of the chunk again."""

    name: str
    first_k: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LinkMethod:
        """Parse `none`, `first-16` or `deviation-0.15`. Raises ConfigError."""
        if text == "none":
            return cls(text)
        if first := re.fullmatch(r"first-(\d{1,6})", text):
            return cls(text, first_k=int(first[1]))
        deviation = re.fullmatch(r"deviation-(0?\.\d{1,6}|1\.0|0|1)", text)
        if deviation is None:
            raise ConfigError(f"--link {text!r} is unknown; use none, first-16 or deviation-0.15, with any numbers")
        return cls(text, share=float(deviation[1]))

    def num_recomputed(self, num_tokens: int) -> float:
        """The number of a linked chunk's tokens that are computed again."""
        return min(self.first_k, num_tokens) + self.share * num_tokens


@dataclass(slots=True)
class PartCount:
    """Numbers of tokens in one part of the prompts."""

    num_tokens: int = 0
    prefix_tokens: int = 0
    found_tokens: int = 0


@dataclass(slots=True)
class LinkReplay:
    """The results for one capacity."""

    capacity_tokens: int | None
    """Capacity in tokens; None: unlimited."""
    num_tokens: int = 0
    prefix_tokens: int = 0
    """Tokens that prefix caching finds."""
    found_tokens: int = 0
    """Tokens that are found if chunks may stand anywhere."""
    num_linked: int = 0
    """Chunks that were found but not as part of a prefix. The first chunk of a prompt does not count."""
    recomputed: dict[str, float] = field(default_factory=dict)
    """Method's name -> the number of found tokens that the method computes again."""
    parts: dict[str, PartCount] = field(default_factory=dict)

    def share(self, method: str | None = None) -> float:
        """Returns the share of all prompt tokens that a method of linking saves; None: that prefix caching saves."""
        saved = self.prefix_tokens if method is None else self.found_tokens - self.recomputed[method]
        return saved / max(1, self.num_tokens)


def replay_linking(
    requests: Iterable[Sequence[Chunk]], capacities: Sequence[int | None], methods: Sequence[LinkMethod]
) -> list[LinkReplay]:
    """Replay the requests for each capacity in tokens. Returns one result for each capacity."""
    pairs = [_CachePair(capacity, methods) for capacity in capacities]
    for chunks in requests:
        prefixes: list[int] = []
        for chunk in chunks:
            # `repr`, because different small numbers may have equal hashes: hash(-1) == hash(-2).
            prefixes.append(hash((prefixes[-1] if prefixes else None, repr(chunk.id))))
        for pair in pairs:
            pair.admit(chunks, prefixes)
    return [pair.result for pair in pairs]


class _CachePair:
    """The two caches of one capacity: prefixes, and chunks that may stand anywhere."""

    def __init__(self, capacity: int | None, methods: Sequence[LinkMethod]) -> None:
        self.result = LinkReplay(capacity, recomputed={method.name: 0.0 for method in methods})
        self._methods = methods
        self._prefixes, self._chunks = Lru[int | str](capacity), Lru[int | str](capacity)

    def admit(self, chunks: Sequence[Chunk], prefixes: Sequence[int]) -> None:
        result = self.result
        is_prefix = True
        for number, (chunk, prefix) in enumerate(zip(chunks, prefixes, strict=True)):
            is_prefix = is_prefix and prefix in self._prefixes
            is_found = chunk.id in self._chunks
            part = result.parts.setdefault(chunk.part, PartCount())
            for count in (result, part):
                count.num_tokens += chunk.num_tokens
                count.prefix_tokens += chunk.num_tokens * is_prefix
                count.found_tokens += chunk.num_tokens * is_found
            if is_found and not is_prefix and number:  # a first chunk always stands where it was computed
                result.num_linked += 1
                for method in self._methods:
                    result.recomputed[method.name] += method.num_recomputed(chunk.num_tokens)
        for chunk, prefix in zip(reversed(chunks), reversed(prefixes), strict=True):  # evict last chunks first
            self._prefixes.use(prefix, chunk.num_tokens)
            self._chunks.use(chunk.id, chunk.num_tokens)
        self._prefixes.shrink()
        self._chunks.shrink()

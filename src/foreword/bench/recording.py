"""A recording of requests, as Mooncake publishes them or `serve --record` writes them, scaled down to a desk.

It computes the reuse that a recording allows from block ids alone, so an engine's own count can be checked against it.

A recording names the content of every block by an id. Blocks of 512 tokens become blocks of 16 tokens, and lengths
shrink by the same factor, so requests share the same parts; blocks of 16 tokens stay as they are:

    recorded   |-- id 0: 512 tokens --|-- id 7: 512 tokens --|- id 9: 102 -|    input_length 1126
    scaled     |-- id 0:  16 tokens --|-- id 7:  16 tokens --|- id 9:   4 -|    36 prompt tokens

A partial last block without an id is shared with no request, so it gets a new id.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.errors import TraceError
from foreword.replay.lines import parse_json_line, parse_mooncake_record

BLOCK_TOKENS = 16
FIRST_OWN_ID = 2**256
"""Recorded ids are smaller: they are numbers of 64 bits, or digests."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request, scaled down."""

    timestamp_ms: float
    block_ids: tuple[int, ...]
    """The id of each block of `BLOCK_TOKENS` prompt tokens; the last block may be partial."""
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def full_block_ids(self) -> tuple[int, ...]:
        return self.block_ids[: self.num_prompt_tokens // BLOCK_TOKENS]


def read_trace(file: Path, *, max_requests: int, max_output_tokens: int) -> list[TraceRequest]:
    """The first requests of a Mooncake-style JSONL file, in order of arrival.

    Raises TraceError, which names the line, for other files. Does not read beyond the last wanted request.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            requests = [
                _parse_line(line, number, f"line {number} of trace {str(file)!r}", max_output_tokens)
                for number, line in islice(filled, max_requests)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {str(file)!r} cannot be read: {error}; give a JSONL file") from error
    if not requests:
        raise TraceError(f"trace {str(file)!r} holds no requests; give a file with one JSON object per line")
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _parse_line(line: str, number: int, where: str, max_output_tokens: int) -> TraceRequest:
    record = parse_mooncake_record(parse_json_line(line, where), where)
    size = record.block_tokens
    has_own_id = len(record.hash_ids) * size < record.input_length
    return TraceRequest(
        record.timestamp_ms,
        (*record.hash_ids, FIRST_OWN_ID + number) if has_own_id else tuple(record.hash_ids),
        _scaled(record.input_length, size),
        max(1, min(_scaled(record.output_length, size), max_output_tokens)),
    )


def _scaled(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens * BLOCK_TOKENS // block_tokens)


def prompt_token_ids(request: TraceRequest, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    """The tokens of a prompt: each block id has the same tokens everywhere, a partial block the first of them."""
    blocks = [
        np.random.default_rng((seed, block_id)).integers(vocab_size, size=BLOCK_TOKENS)
        for block_id in request.block_ids
    ]
    return np.concatenate(blocks)[: request.num_prompt_tokens].astype(np.int32)


class UnlimitedCache:
    """The reuse of a prefix cache that never evicts, for requests that come one after the other."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, int], int] = {}  # (node of the blocks before, block id) -> node

    def admit(self, request: TraceRequest) -> int:
        """Add the next request; returns its reusable prompt tokens. Its full blocks are reusable from now on.

        That includes blocks that another request is still computing, because a request waits for them. A prompt's last
        token is always computed.
        """
        node, num_known = 0, 0
        for depth, block_id in enumerate(request.full_block_ids):
            if (node, block_id) in self._node_of:
                num_known = depth + 1
            node = self._node_of.setdefault((node, block_id), len(self._node_of) + 1)
        return min(num_known * BLOCK_TOKENS, request.num_prompt_tokens - 1)

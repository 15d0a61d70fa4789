"""Reads one line of a recording as a request.

A line's keys tell its format:

    hash_ids            Mooncake: one id per block of the prompt, with input_length, output_length, timestamp (ms);
                        the id of a partial last block may be left out
    prompt_token_ids    or token_ids, or a bare list: plain token ids
    prompt | messages   OpenAI: text or a conversation, alone or as the `body` of a batch line; needs a tokenizer

A line with `session_id` and hash_ids is a turn as AIPerf writes it. Its ids and input_length describe only the new
blocks, which follow the session's earlier blocks. If a turn repeats all earlier ids of its session, this turn and all
turns after it are whole prompts.

Other programs write bodies of requests too: vLLM's request log, LiteLLM's and OpenTelemetry's records. If such a line
lacks a needed part, such as text that was redacted, the error names the program and the setting.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foreword.errors import ForewordError, TraceError
from foreword.replay.keys import NO_KEYS, PrefixKeys, as_content_ids, content_ids_of_tokens

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_VLLM_LINE = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]\s]+:\d+\] ?(.*)$")
_VLLM_REQUEST = re.compile(
    r"Request \S+ details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds shape: "
)
REDACTED = "redacted-by-litellm"
OTEL_MESSAGES = "gen_ai.input.messages"
OTEL_OPERATIONS = (None, "chat", "text_completion", "generate_content")
"""Operations that call a model. Spans of other operations, such as agents and tools, have these spans as children."""
_LITELLM_CALL = re.compile(
    r"a?(text_)?completion(_with_retries)?|a?responses|a?anthropic_messages|a?generate_content(_stream)?"
    r"|(allm_|llm_)?pass_?through_(endpoint|route)"
)
DIGEST_DIGITS = 12
MOONCAKE_BLOCK_TOKENS = 512
TOKEN_BLOCK_TOKENS = 16
DEFAULT_OUTPUT_TOKENS = 1
MAX_TIME = 2.0**63
"""Largest time that stays a finite float in other units, too."""
MAX_LENGTH = 2**63 - 1
"""The most tokens of an answer; the number stays finite as a float."""
MAX_BLOCK_TOKENS = 2**31 - 1
_DECODER = json.JSONDecoder()
_SESSION = b'"session_id"'
_IDS_BEGIN = (b'"hash_ids": [', b'"hash_ids":[')


class NoRequestError(TraceError):
    """A line of a known program that has no prompt. The reader skips the line and does not count it as malformed."""


def of_vllm_log(line: str) -> dict[str, Any] | None:
    """The request in a line of vLLM's log; None for other formats. Without a request, raises NoRequestError."""
    entry = None if line.startswith(("{", "[")) else _VLLM_LINE.search(_COLOR.sub("", line.rstrip("\r\n")))
    if entry is None:
        return None
    request = _VLLM_REQUEST.match(entry[2])
    if request is None or request[1] == "None":
        raise NoRequestError("a line of vLLM's log without the token ids of a prompt")
    try:
        moment = datetime.strptime(f"2000-{entry[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)  # vLLM writes no year
        return {"prompt_token_ids": json.loads(request[1]), "timestamp": moment.timestamp() * 1000}
    except ValueError:
        return None


def as_body(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the request body in a record of LiteLLM or OpenTelemetry, and any other record as it is.

    Raises TraceError.
    """
    if {"resourceSpans", "resourceLogs"} & set(record):
        raise TraceError(f"{where} is an export of OpenTelemetry with many records; write one span or log on each line")
    try:
        attributes = _attributes(record.get("attributes"))
        if any(name.startswith("gen_ai.") for name in attributes):
            return _of_otel(record, attributes, where)
        if "litellm_call_id" in record or {"call_type", "startTime"} <= set(record):
            return _of_litellm(record, where)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(
            f"{where} looks like a record of LiteLLM or OpenTelemetry and cannot be read ({type(error).__name__}: "
            f"{str(error)[:60]}); give the body of the request"
        ) from error
    return record


def _of_litellm(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    call = record.get("call_type")
    if call and not _LITELLM_CALL.fullmatch(str(call)):
        raise NoRequestError(f"{where} is a call of LiteLLM that has no prompt: {call}")
    if str(record.get("cache_hit")).lower() == "true" or record.get("status") == "failure":
        raise NoRequestError(f"{where} is a call of LiteLLM that no model has answered")
    messages = _parsed(record.get("messages"))
    body: dict[str, Any] = {**(_parsed(record.get("model_parameters")) or {})}
    if not messages:
        sent = _parsed(record.get("proxy_server_request")) or {}
        body |= sent.get("body", sent)
        messages = body.get("messages")
    if not messages or REDACTED in json.dumps(messages):
        raise TraceError(f"{where}: LiteLLM left out the messages; log with turn_off_message_logging=false")
    body |= {"prompt" if isinstance(messages, str) else "messages": messages}
    return _with_numbers(body, record.get("startTime"), record.get("completion_tokens"))


def _of_otel(record: Mapping[str, Any], attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    operation = attributes.get("gen_ai.operation.name")
    if operation not in OTEL_OPERATIONS:
        raise NoRequestError(f"{where} is a span of {operation}, not of a call of a model")
    if OTEL_MESSAGES not in attributes:
        raise TraceError(
            f"{where}: the record of OpenTelemetry has no {OTEL_MESSAGES}; capture contents, with "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT and the conventions of gen_ai_latest_experimental"
        )
    system = _parsed(attributes.get("gen_ai.system_instructions")) or []
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(system)}] if system else []
    for message in _parsed(attributes[OTEL_MESSAGES]):
        parts = message["parts"]
        for part in parts:
            if part["type"] == "tool_call_response":
                result = part.get("response", part.get("result"))
                content = result if isinstance(result, str) else json.dumps(result)
                messages.append({"role": "tool", "tool_call_id": part.get("id") or "", "content": content})
        calls = [
            {
                "id": part.get("id") or "",
                "type": "function",
                "function": {"name": part["name"], "arguments": part.get("arguments")},
            }
            for part in parts
            if part["type"] == "tool_call"
        ]
        text = _text(parts)
        if text or calls:
            messages.append({"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})})
    tools = [
        {"type": "function", "function": tool} for tool in _parsed(attributes.get("gen_ai.tool.definitions")) or ()
    ]
    body = {"messages": messages, **({"tools": tools} if tools else {})}
    names = ("timestamp", "startTimeUnixNano", "timeUnixNano", "start_time")
    time = next((record[name] for name in names if record.get(name) is not None), None)
    return _with_numbers(body, time, attributes.get("gen_ai.usage.output_tokens"))


def _text(parts: Any) -> str:
    """Join the text of parts. A part without text, such as a picture, is written as its type and a digest."""
    return "\n".join(
        part["content"]
        if part["type"] == "text"
        else f"[{part['type']} {sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]}]"
        for part in parts
        if part["type"] not in ("tool_call", "tool_call_response", "reasoning")
    )


def _parsed(value: Any) -> Any:
    """Return the value; if it is a text that holds a JSON list or object, parse it first."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _attributes(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict. They may be a map, or OTLP's list of keys and typed values."""
    if isinstance(attributes, list):
        return {pair["key"]: next(iter(pair["value"].values()), None) for pair in attributes}
    return dict(attributes) if isinstance(attributes, Mapping) else {}


def _with_numbers(body: dict[str, Any], time: Any, num_output_tokens: Any) -> dict[str, Any]:
    """Add the time in ms and the length of the answer to a body.

    `time` is text in ISO 8601, or a number in s, ms or ns; the size of the number decides the unit.
    """
    if isinstance(time, str) and not time.isdigit():
        body["timestamp"] = datetime.fromisoformat(time).timestamp() * 1000
    elif time is not None:
        number = float(time)
        body["timestamp"] = number / 1e6 if number > 1e15 else number if number > 1e11 else number * 1000
    if num_output_tokens is not None:
        body["output_length"] = int(num_output_tokens)
    return body


class PromptEncoder(Protocol):
    """The part of `foreword.text.tokenizer.Tokenizer` that turns prompts into token ids."""

    def encode(self, text: str) -> npt.NDArray[np.int32]: ...
    def render_chat(self, messages: Any) -> npt.NDArray[np.int32]: ...


def parse_json_line(line: str, where: str) -> Any:
    """Parse the JSON value of a line; `where` names the line in errors. Raises TraceError."""
    line = line.rstrip(" \t\r\n")
    try:
        if line[:1] in "{[":  # takes half the time of `loads`, which looks for white space by regular expressions
            value, end = _DECODER.raw_decode(line)
            if end == len(line):
                return value
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise TraceError(f"{where} is not JSON ({what}); each line must be one JSON object") from error


def _times_and_lengths(record: dict[str, Any], num_ids: int, where: str, block_tokens: int) -> tuple[float, int, int]:
    """Check and return timestamp, input_length and output_length. Raises TraceError."""
    timestamp: Any = record.get("timestamp")
    input_length, output_length = record.get("input_length"), record.get("output_length")
    if type(timestamp) not in (int, float) or not 0 <= timestamp <= MAX_TIME:
        raise TraceError(f"{where}: timestamp={timestamp!r}; it must be a number of at least 0")
    if type(input_length) is not int or input_length < 1:
        raise TraceError(f"{where}: input_length={input_length!r}; it must be a number of at least 1")
    if type(output_length) is not int or not 0 <= output_length <= MAX_LENGTH:
        raise TraceError(f"{where}: output_length={output_length!r}; it must be a number from 0 to 2**63 - 1")
    num_full, num_blocks = input_length // block_tokens, -(-input_length // block_tokens)
    if num_ids not in (num_full, num_blocks):
        takes = f"{num_blocks}" if num_full == num_blocks else f"{num_full} full or {num_blocks}"
        raise TraceError(
            f"{where}: hash_ids has {num_ids} ids, but input_length={input_length} takes {takes} "
            f"blocks of {block_tokens} tokens; give one id per block, or per full block"
        )
    return float(timestamp), input_length, output_length


class ParsedLine(NamedTuple):
    """A request whose prefix keys are not computed yet."""

    timestamp_ms: float | None
    content_ids: PrefixKeys
    num_prompt_tokens: int
    num_output_tokens: int
    block_tokens: int


class SkimmedLine(NamedTuple):
    """A line in Mooncake's format whose ids are counted but not read yet. They may turn out not to be numbers."""

    request: ParsedLine
    """The request without its content ids."""
    num_ids: int
    ids: bytes
    """The ids as in the line, without the brackets."""
    line: bytes
    where: str


class _Turn(NamedTuple):
    """All blocks of a session, up to and including its latest turn."""

    ids: list[Any]
    pieces: list[tuple[Any, int]]
    """Each id with its number of tokens, because turns may end inside blocks. Tokens without id get a unique name."""
    timestamp: float | None


def _on_grid(pieces: list[tuple[Any, int]], block_tokens: int) -> list[Any]:
    """Returns the ids of the blocks into which an engine cuts these pieces.

    A block gets the id of a piece if it begins with the piece's first token, has no other piece's tokens, and the piece
    has an id. Other blocks get a digest.
    """
    blocks: dict[int, list[tuple[Any, int, int]]] = {}
    at = 0
    for name, length in pieces:
        start, end = at, at + length
        while at < end:
            num_tokens = min(end - at, block_tokens - at % block_tokens)
            blocks.setdefault(at // block_tokens, []).append((name, at - start, num_tokens))
            at += num_tokens
    if at % block_tokens and any(isinstance(name, tuple) for name, _, _ in blocks[at // block_tokens]):
        del blocks[at // block_tokens]  # some tokens of the partial last block have no id
    has_digests = any(isinstance(name, str) for name, _ in pieces)
    ids: list[Any] = []
    for block in blocks.values():
        (name, begin, _), *more = block
        if begin or more or isinstance(name, tuple):
            digest = hashlib.blake2b(repr(block).encode(), digest_size=8).digest()
            name = digest.hex() if has_digests else int.from_bytes(digest, "little") >> 1
        ids.append(name)
    return ids


def parse_mooncake_record(record: object, where: str) -> ParsedLine:
    """Read the request of a line in Mooncake's format. Raises TraceError, naming a value that is wrong or missing."""
    if not isinstance(record, dict):
        raise TraceError(f"{where} is {json.dumps(record)[:40]!r}; each line must be one JSON object")
    fields = {"timestamp": None, "output_length": None, "hash_ids": None, **record}
    return LineParser(None, None).of_block_ids(fields, where)


@dataclass(slots=True)
class LineParser:
    """Turns the JSON value of a line into a request."""

    block_tokens: int | None
    tokenizer: PromptEncoder | None
    sessions: dict[Any, _Turn | None] = field(default_factory=dict)
    """The state of each session in the lines parsed so far; None after a turn that was refused."""
    has_whole_turns: bool = False
    """Whether any turn so far repeated the earlier blocks of its session. Then each further turn is a whole prompt."""

    def start_again(self) -> None:
        """Forget all sessions: the next line is the first one of a file."""
        self.sessions.clear()
        self.has_whole_turns = False

    def skim(self, line: bytes, where: str) -> SkimmedLine | None:
        """Read a simple line without its ids, which are read later. None: `parse` must read the whole line."""
        for mark in _IDS_BEGIN:
            before, separator, ids_and_after = line.partition(mark)
            if separator:
                break
        ids, bracket, after = ids_and_after.partition(b"]")
        if not bracket or not ids.strip() or any(b"hash_ids" in part or _SESSION in part for part in (before, after)):
            return None
        num_ids = ids.count(b",") + 1
        try:
            record = parse_json_line((before + mark + bracket + after).decode(), where)
            if type(record) is not dict or record.get("hash_ids") != []:
                return None
            request = self._of_counted_ids(record, num_ids, NO_KEYS, where)
        except (UnicodeDecodeError, TraceError):
            return None  # `parse` reports the error
        return SkimmedLine(request, num_ids, ids, line, where)

    def parse(self, line: bytes, where: str) -> ParsedLine | TraceError:
        """Returns the request in a line, or the error that the line has."""
        try:
            text = line.decode()
            return self._of_value(of_vllm_log(text) or parse_json_line(text, where), where)
        except UnicodeDecodeError as error:
            return TraceError(
                f"{where} is not UTF-8 ({error.reason} at byte {error.start}); give JSONL, gzipped or not"
            )
        except TraceError as error:
            return error

    def _of_value(self, record: object, where: str) -> ParsedLine:
        if isinstance(record, list) and record and isinstance(record[0], dict):
            raise TraceError(f"{where} is a list of {len(record)} objects; write each of them on a line of its own")
        if isinstance(record, list):
            return self._of_tokens({}, record, where)
        if not isinstance(record, dict):
            raise TraceError(f"{where} is {json.dumps(record)[:40]!r}; each line must be a JSON object or a list")
        if "hash_ids" in record:
            session = record.get("session_id")
            try:
                line = self.of_block_ids(record, where)
                return line if session is None else self._of_turn(line, record["hash_ids"], session, record, where)
            except TraceError:
                if isinstance(session, str | int):
                    self.sessions[session] = None
                raise
        record = dict(as_body(record, where))
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

    def of_block_ids(self, record: dict[str, Any], where: str) -> ParsedLine:
        """The request of a line with `hash_ids`. Raises TraceError."""
        ids = record["hash_ids"]
        kinds = set(map(type, ids)) if isinstance(ids, list) else {None}
        if kinds != {str} and (kinds - {int} or min(ids, default=0) < 0):
            raise TraceError(
                f"{where}: hash_ids={str(ids)[:40]}; it must be a list of numbers of at least 0, or digests"
            )
        return self._of_counted_ids(record, len(ids), as_content_ids(ids), where)

    def _of_turn(
        self, line: ParsedLine, ids: list[Any], session: Any, record: dict[str, Any], where: str
    ) -> ParsedLine:
        """Put the session's earlier blocks before a turn's blocks. Answers are left out; the recording lacks them."""
        if not isinstance(session, str | int):
            raise TraceError(f"{where}: session_id={str(session)[:40]!r}; it must be a text or a number")
        before, time, size = self.sessions.get(session), line.timestamp_ms, line.block_tokens
        if before is None and session in self.sessions and not self.has_whole_turns:
            raise TraceError(f"{where}: an earlier turn of session {session!r} was refused, so its blocks are missing")
        names = ids if len(ids) * size >= line.num_prompt_tokens else [*ids, (session, where)]
        pieces = [(name, min(size, line.num_prompt_tokens - at * size)) for at, name in enumerate(names)]
        if before is not None and before.ids and ids[: len(before.ids)] == before.ids:
            self.has_whole_turns = True
        elif before is not None and not self.has_whole_turns:
            ids, pieces = before.ids + ids, before.pieces + pieces
        if before is not None and time is None and before.timestamp is not None:
            delay = record.get("delay") or 0
            if type(delay) not in (int, float) or not 0 <= delay <= MAX_TIME:
                raise TraceError(f"{where}: delay={delay!r}; it must be a number of at least 0")
            time = before.timestamp + delay
        self.sessions[session] = _Turn(ids, pieces, time)
        return line._replace(
            timestamp_ms=time,
            content_ids=as_content_ids(_on_grid(pieces, size)),
            num_prompt_tokens=sum(length for _, length in pieces),
        )

    def _of_counted_ids(self, record: dict[str, Any], num_ids: int, content_ids: PrefixKeys, where: str) -> ParsedLine:
        given = self.block_tokens or _number(record, "block_tokens", 1, MAX_BLOCK_TOKENS, where)
        block_tokens = given or MOONCAKE_BLOCK_TOKENS
        filled = {"timestamp": 0, "output_length": 0, **record}
        timestamp, num_prompt, num_output = _times_and_lengths(filled, num_ids, where, block_tokens)
        return ParsedLine(
            timestamp if "timestamp" in record else None, content_ids, num_prompt, num_output, block_tokens
        )

    def _of_text(self, record: dict[str, Any], where: str) -> ParsedLine:
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

    def _of_tokens(self, record: dict[str, Any], tokens: object, where: str) -> ParsedLine:
        if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
            raise TraceError(f"{where}: {str(tokens)[:40]} is not a prompt; give a list of at least one token id")
        if min(tokens) < 0 or max(tokens) >= 2**31:
            raise TraceError(f"{where}: token ids {min(tokens)} to {max(tokens)}; they must be from 0 to 2**31 - 1")
        names = ("output_length", "output_tokens", "max_completion_tokens", "max_tokens")
        lengths = [length for name in names if (length := _number(record, name, 0, MAX_LENGTH, where)) is not None]
        block_tokens = self.block_tokens or TOKEN_BLOCK_TOKENS
        return ParsedLine(
            timestamp_ms(record, where),
            content_ids_of_tokens(tokens, block_tokens),
            len(tokens),
            lengths[0] if lengths else DEFAULT_OUTPUT_TOKENS,
            block_tokens,
        )


def _number(record: Mapping[str, Any], name: str, least: int, most: int, where: str) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise TraceError(f"{where}: {name}={value!r}; it must be a whole number of at least {least}")
    if value > most:
        raise TraceError(f"{where}: {name}={value}; it must be at most {most}")
    return value


def timestamp_ms(record: Mapping[str, Any], where: str) -> float | None:
    """Read `timestamp`, in ms as in Mooncake's format, or `created`, in s as in OpenAI's; None without either."""
    for name, scale in (("timestamp", 1.0), ("created", 1000.0)):
        value = record.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            raise TraceError(f"{where}: {name}={value!r}; it must be a number of at least 0")
        return float(scale * value)
    return None

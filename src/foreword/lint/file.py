"""Reads a file of recorded requests as prompts.

Knows JSON lines, gzipped or plain, and the tokenizer. A line is the body of a request, alone or as `body` or `request`
of a line with a time; or a text; or token ids. A line that is none of these is passed over, counted and located.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ForewordError, TraceError
from foreword.lint.align import TokenIds
from foreword.lint.bodies import read_body
from foreword.lint.prompts import LintPrompt
from foreword.replay.lines import NoRequestError, as_body, of_vllm_log, parse_json_line, timestamp_ms
from foreword.text import Tokenizer

MAX_REPORTED_LINES = 5
DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""The call by which chat templates write today's date."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TIME_MS = 1e14
WITHOUT_TEXT = (
    "holds ids of hashed blocks, as `foreword serve --record` writes them, and neither text nor tokens; give bodies of "
    "requests as your client or proxy logs them, or look at the dashboard, which has the tokens of recent requests"
)


@dataclass(slots=True)
class RecordedPrompts:
    """The prompts of a file, in its order."""

    prompts: list[LintPrompt] = field(default_factory=list)
    num_malformed: int = 0
    malformed: list[str] = field(default_factory=list)
    """The first `MAX_REPORTED_LINES` errors, each with its line's number."""


def read_prompts(file: Path, tokenizer: Tokenizer, max_requests: int | None = None) -> RecordedPrompts:
    """The prompts of a file. Raises TraceError if it cannot be read or holds none."""
    found = RecordedPrompts()
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"file {str(file)!r} cannot be read: {error}; give JSON lines, gzipped or not") from error
    for number, line in enumerate(lines, 1):
        if len(found.prompts) == max_requests:
            break
        if not line.strip():
            continue
        where = f"line {number} of {str(file)!r}"
        try:
            text = line.decode("utf-8-sig")
            found.prompts.append(_prompt(of_vllm_log(text) or parse_json_line(text, where), where, tokenizer))
        except NoRequestError:
            continue
        except UnicodeDecodeError as error:
            _note(found, f"{where} is not UTF-8 ({error.reason} at byte {error.start}); give JSON lines")
        except TraceError as error:
            _note(found, str(error))
        except ForewordError as error:
            _note(found, f"{where}: {error}")
    if not found.prompts:
        why = f": {found.malformed[0]}" if found.malformed else "; give a file with one JSON object per line"
        raise TraceError(f"file {str(file)!r} holds no requests{why}")
    return found


def _note(found: RecordedPrompts, problem: str) -> None:
    found.num_malformed += 1
    if len(found.malformed) < MAX_REPORTED_LINES:
        found.malformed.append(problem)


def _prompt(record: Any, where: str, tokenizer: Tokenizer) -> LintPrompt:
    if isinstance(record, list):
        return LintPrompt(_token_ids(record, where))
    if not isinstance(record, dict):
        raise TraceError(f"{where} is {str(record)[:40]!r}; each line must be a JSON object or a list of token ids")
    record = dict(as_body(record, where))
    inner: dict[str, Any] = next(
        (record[name] for name in ("body", "request") if isinstance(record.get(name), dict)), {}
    )
    body = {**record, **inner}
    time, model = _time(body, where), body["model"] if isinstance(body.get("model"), str) else None
    for name in ("prompt_token_ids", "token_ids", "prompt"):
        if isinstance(body.get(name), list):
            return LintPrompt(_token_ids(body[name], where), time, model=model)
    if isinstance(body.get("prompt"), str):
        return LintPrompt(tokenizer.encode(body["prompt"]), time, (body["prompt"],), model)
    conversation = read_body(body)
    if conversation is None:
        if "hash_ids" in body:
            raise TraceError(f"{where} {WITHOUT_TEXT}")
        raise TraceError(
            f"{where} has the keys {', '.join(list(record)[:6]) or '(none)'}; give the body of a request with "
            "messages, input, contents or prompt, or token_ids"
        )
    token_ids = tokenizer.render_chat(
        conversation.messages,
        template_inputs=conversation.inputs,
        chat_template=_dated(tokenizer.chat_template or "", time),
    )
    return LintPrompt(token_ids, time, conversation.texts, model)


def _dated(template: str, time_ms: float | None) -> str | None:
    """The template with the date of the request in place of today's; None if it writes none, or if no time is known."""
    if time_ms is None or not DATE_CALL.search(template):
        return None
    moment = EPOCH + timedelta(milliseconds=min(time_ms, MAX_TIME_MS))
    return DATE_CALL.sub(lambda call: repr(moment.strftime(call[2])), template)


def _time(record: Mapping[str, Any], where: str) -> float | None:
    """`timestamp` in ms or as ISO 8601 text; `created` in s. Raises TraceError."""
    given = record.get("timestamp")
    if isinstance(given, str):
        try:
            return datetime.fromisoformat(given).timestamp() * 1000
        except (ValueError, OverflowError) as error:
            raise TraceError(
                f"{where}: timestamp={given[:40]!r} is no time; give milliseconds or such as 2026-11-24T18:00:00Z"
            ) from error
    return timestamp_ms(record, where)


def _token_ids(tokens: list[Any], where: str) -> TokenIds:
    if not tokens or any(type(token) is not int or not 0 <= token < 2**31 for token in tokens):
        raise TraceError(f"{where}: {str(tokens)[:40]} is no prompt; give at least one token id of 0 to 2**31 - 1")
    return np.array(tokens, np.int32)

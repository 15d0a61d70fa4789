"""What the linter reads: prompts as token ids, and which of them are of one kind.

Knows token ids and, where a file has them, the messages that were rendered. Prompts are of one kind if they share a
good part of their text, wherever it lies; so a date at the very beginning does not part them.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ForewordError, TraceError
from foreword.lint.align import Shingles, TokenIds, shingles
from foreword.lint.bodies import read_body
from foreword.replay.lines import NoRequestError, as_body, of_vllm_log, parse_json_line, timestamp_ms
from foreword.text import Tokenizer

SAME_KIND = 0.3
"""Least share of the shorter prompt's runs of tokens that two prompts of one kind have in common."""
SAME_CONVERSATION = 0.5
"""The same without the runs that most prompts of the kind have."""
MAX_KINDS = 256
"""Most kinds that a prompt is compared with, the first ones; a prompt beyond them is of no kind."""
MOST_RUNS = 2_000_000
"""Most runs of tokens that are kept; of more, an even sample."""
MAX_REPORTED_LINES = 5
MAX_TIME_MS = 1e14
WITHOUT_TEXT = (
    "holds ids of hashed blocks, as `foreword serve --record` writes them, and neither text nor tokens; give bodies of "
    "requests as your client or proxy logs them, or look at the dashboard, which has the tokens of recent requests"
)


@dataclass(frozen=True, slots=True)
class LintPrompt:
    """One request's prompt, in order of arrival."""

    token_ids: TokenIds
    timestamp_ms: float | None = None
    texts: tuple[str, ...] | None = None
    """The messages (and tools, first) as the client sent them; None if only tokens are known."""
    model: str | None = None
    """The model, or the adapter, that the request names."""


def same_kind(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Indices of prompts of one kind, two or more each."""
    return _groups(_sketches(prompts), SAME_KIND)


def same_conversation(prompts: Sequence[TokenIds], kind: Sequence[int]) -> list[list[int]]:
    """Indices of those prompts of a kind that share more than what most of the kind share."""
    sketches = _sketches([prompts[index] for index in kind])
    runs, counts = np.unique(np.concatenate(sketches), return_counts=True)
    common = runs[2 * counts > len(kind)]
    own = [np.setdiff1d(sketch, common, assume_unique=True) for sketch in sketches]
    return [[kind[place] for place in group] for group in _groups(own, SAME_CONVERSATION)]


def _sketches(prompts: Sequence[TokenIds]) -> list[Shingles]:
    """The different runs of each prompt; the same share of all runs for each."""
    every = np.uint64(1 + sum(map(len, prompts)) // MOST_RUNS)
    runs = (shingles(prompt) for prompt in prompts)
    return [np.unique(one[one % every == 0] if every > 1 else one) for one in runs]


def _groups(sketches: Sequence[Shingles], share: float) -> list[list[int]]:
    """Greedy: each joins the first prompt of the group with which it has most in common, or begins a group."""
    groups: list[list[int]] = []
    for index, sketch in enumerate(sketches):
        best: tuple[float, list[int]] | None = None
        for group in groups if len(sketch) else ():
            first = sketches[group[0]]
            in_common = len(np.intersect1d(sketch, first, assume_unique=True)) / min(len(sketch), len(first))
            if in_common >= share and (best is None or in_common > best[0]):
                best = in_common, group
        if best is not None:
            best[1].append(index)
        elif len(sketch) and len(groups) < MAX_KINDS:
            groups.append([index])
    return [group for group in groups if len(group) > 1]


DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""The call by which chat templates write today's date."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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

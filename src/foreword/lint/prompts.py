"""The linter's input: reads prompts as token ids, and groups prompts of one kind.

Prompts are of one kind if they share much of their text, wherever the shared text lies. So prompts with different dates
at the very beginning can be of one kind.
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
"""Two prompts are of one kind if they share at least this part of the shorter prompt's runs of tokens."""
SAME_CONVERSATION = 0.5
"""Two prompts of one kind are of one conversation if they share at least this part of their token runs. Runs that more
than half of the kind's prompts have do not count."""
MAX_KINDS = 256
"""The most kinds. Further prompts that fit no kind are left out."""
MOST_RUNS = 2_000_000
"""The most runs of tokens in memory. If there are more, an even sample is kept."""
MAX_REPORTED_LINES = 5
MAX_TIME_MS = 1e14
WITHOUT_TEXT = (
    "holds ids of hashed blocks, as `foreword serve --record` writes them, and neither text nor tokens; give bodies of "
    "requests as your client or proxy logs them, or look at the dashboard, which has the tokens of recent requests"
)


@dataclass(frozen=True, slots=True)
class LintPrompt:
    """One request's prompt."""

    token_ids: TokenIds
    timestamp_ms: float | None = None
    texts: tuple[str, ...] | None = None
    """The tools, if any, then the messages, as the client sent them; None if only tokens are known."""
    model: str | None = None
    """The model or adapter that the request names; None if it names no model."""


def same_kind(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Return groups of two or more prompts of one kind, by index."""
    return _groups(_sketches(prompts), SAME_KIND)


def same_conversation(prompts: Sequence[TokenIds], kind: Sequence[int]) -> list[list[int]]:
    """Group the prompts of one kind by conversation: a group shares token runs that at most half of the kind have.

    `kind`: indices of the prompts of the kind. Returns the indices of each group.
    """
    sketches = _sketches([prompts[index] for index in kind])
    runs, counts = np.unique(np.concatenate(sketches), return_counts=True)
    common = runs[2 * counts > len(kind)]
    distinct = [np.setdiff1d(sketch, common, assume_unique=True) for sketch in sketches]
    return [[kind[place] for place in group] for group in _groups(distinct, SAME_CONVERSATION)]


def _sketches(prompts: Sequence[TokenIds]) -> list[Shingles]:
    """Return a sketch of each prompt: the distinct hashes of its token runs, sampled at one rate for all prompts."""
    every = np.uint64(1 + sum(map(len, prompts)) // MOST_RUNS)
    runs = (shingles(prompt) for prompt in prompts)
    return [np.unique(hashes[hashes % every == 0] if every > 1 else hashes) for hashes in runs]


def _groups(sketches: Sequence[Shingles], share: float) -> list[list[int]]:
    """Group greedily: a sketch joins the group whose first sketch is most similar, or begins a new group.

    Similar sketches have at least `share` of the smaller one in common.
    """
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
    """The prompts of a file, in the file's order."""

    prompts: list[LintPrompt] = field(default_factory=list)
    num_malformed: int = 0
    malformed: list[str] = field(default_factory=list)
    """The first `MAX_REPORTED_LINES` errors, each with its line's number."""


def read_prompts(file: Path, tokenizer: Tokenizer, max_requests: int | None = None) -> RecordedPrompts:
    """Read the prompts of a file. Raises TraceError if the file cannot be read or holds no prompts."""
    recorded = RecordedPrompts()
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"file {str(file)!r} cannot be read: {error}; give JSON lines, gzipped or not") from error
    for number, line in enumerate(lines, 1):
        if len(recorded.prompts) == max_requests:
            break
        if not line.strip():
            continue
        where = f"line {number} of {str(file)!r}"
        try:
            text = line.decode("utf-8-sig")
            recorded.prompts.append(_prompt(of_vllm_log(text) or parse_json_line(text, where), where, tokenizer))
        except NoRequestError:
            continue
        except UnicodeDecodeError as error:
            _note(recorded, f"{where} is not UTF-8 ({error.reason} at byte {error.start}); give JSON lines")
        except TraceError as error:
            _note(recorded, str(error))
        except ForewordError as error:
            _note(recorded, f"{where}: {error}")
    if not recorded.prompts:
        why = f": {recorded.malformed[0]}" if recorded.malformed else "; give a file with one JSON object per line"
        raise TraceError(f"file {str(file)!r} holds no requests{why}")
    return recorded


def _note(recorded: RecordedPrompts, problem: str) -> None:
    recorded.num_malformed += 1
    if len(recorded.malformed) < MAX_REPORTED_LINES:
        recorded.malformed.append(problem)


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
    """Return the template with the request's date in place of today's. None if no date is written or no time known."""
    if time_ms is None or not DATE_CALL.search(template):
        return None
    moment = EPOCH + timedelta(milliseconds=min(time_ms, MAX_TIME_MS))
    return DATE_CALL.sub(lambda call: repr(moment.strftime(call[2])), template)


def _time(record: Mapping[str, Any], where: str) -> float | None:
    """Read a time in ms from `timestamp` (ms or ISO 8601 text) or `created` (seconds). Raises TraceError."""
    timestamp = record.get("timestamp")
    if isinstance(timestamp, str):
        try:
            return datetime.fromisoformat(timestamp).timestamp() * 1000
        except (ValueError, OverflowError) as error:
            raise TraceError(
                f"{where}: timestamp={timestamp[:40]!r} is no time; give milliseconds or such as 2026-11-24T18:00:00Z"
            ) from error
    return timestamp_ms(record, where)


def _token_ids(tokens: list[Any], where: str) -> TokenIds:
    if not tokens or any(type(token) is not int or not 0 <= token < 2**31 for token in tokens):
        raise TraceError(f"{where}: {str(tokens)[:40]} is no prompt; give at least one token id of 0 to 2**31 - 1")
    return np.array(tokens, np.int32)

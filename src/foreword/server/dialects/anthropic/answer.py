"""Writes messages, whole or as events.

The event message_start waits for the first token. Clients read the prompt's usage from this event, and the engine knows
only then how much of the prompt was cached.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from pydantic_core import from_json

from foreword.cache import common_length
from foreword.server.answer_stream import Delta
from foreword.server.chats.chat import ChatAnswer
from foreword.server.dialect import Event
from foreword.server.dialects.anthropic.fields import CreateMessageRequest
from foreword.server.dialects.anthropic.messages import TTL_S
from foreword.server.http import AnswerWriter
from foreword.server.service import Service
from foreword.text.conversation import parse_json
from foreword.text.reply import Call, Part, Reasoning, Text

BYTES_PER_TOKEN = 64
"""Estimated bytes of an event with one token."""

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""Anthropic's stop reasons by foreword's finish reasons. "refusal" means that the grammar allows no further token."""


class MessageAnswer(AnswerWriter):
    """Writes one message."""

    piece_depth = 4

    def __init__(self, answer: ChatAnswer, body: CreateMessageRequest, service: Service) -> None:
        self.answer = answer.stream
        self._service = service
        self._chat_answer = answer
        self._body = body
        self._num_output_tokens = self._num_thinking_tokens = 0
        self._is_begun, self._blocks = False, _BlockEvents()

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        is_last = any(delta.finish_reason is not None for delta in deltas)
        counted = self._chat_answer.num_usage_bytes() if is_last else 0
        return counted + BYTES_PER_TOKEN * sum(len(delta.token_ids) for delta in deltas)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        if not self._body.max_tokens:  # the call only prepares the cache
            ended = {"stop_reason": "max_tokens", "stop_sequence": None}
            return self._message() | ended | {"usage": {**self._usage(), "service_tier": "standard"}}
        self._num_output_tokens = len(delta.token_ids)
        reply = self._chat_answer.read(delta)
        self._num_thinking_tokens = self._chat_answer.num_reasoning_tokens()
        message = self._message() | {"content": _blocks(reply.parts)} | self._end(delta, reply.finish_reason)
        return message | {"usage": {**self._usage(), "service_tier": "standard"}}

    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        (delta,) = deltas
        self._num_output_tokens += len(delta.token_ids)
        reply = self._chat_answer.read(delta)
        events: list[dict[str, Any]] = []
        if not self._is_begun:
            self._is_begun = True
            usage = {**self._usage(), "service_tier": "standard"}
            events.append({"type": "message_start", "message": {**self._message(), "usage": usage}})
        events += (event for part in reply.parts for event in self._blocks.of(part))
        if delta.finish_reason is not None:
            self._num_thinking_tokens = self._chat_answer.num_reasoning_tokens()
            events += self._blocks.close()
            end = {"type": "message_delta", "delta": self._end(delta, reply.finish_reason), "usage": self._usage()}
            events += ({**end, **self._context_management()}, {"type": "message_stop"})
        return [(event["type"], event) for event in events]

    def _message(self) -> dict[str, Any]:
        """Return the fields of a message that are known at its start."""
        message: dict[str, Any] = {
            "id": self.answer.jobs[0].record.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        if self._body.diagnostics is not None:
            message["diagnostics"] = self._diagnostics(self._body.diagnostics.previous_message_id)
        return message | self._context_management()

    def _diagnostics(self, previous_id: str | None) -> dict[str, Any] | None:
        """Say why this prompt and an earlier prompt differ; None without an id, or if one begins with the other."""
        if previous_id is None:
            return None
        record = self.answer.jobs[0].record
        earlier = self._service.records.of_response(previous_id, record.tenant)
        if earlier is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        if earlier.salt != record.salt:
            return {"cache_miss_reason": {"type": "unavailable"}}
        shared = common_length(record.prompt_token_ids, earlier.prompt_token_ids)
        if shared == min(record.num_prompt_tokens, earlier.num_prompt_tokens):
            return None
        ours, theirs = record.template_digests, earlier.template_digests
        changed = next((name for name in ("tools", "system") if ours.get(name) != theirs.get(name)), "messages")
        missed = record.num_prompt_tokens - shared
        return {"cache_miss_reason": {"type": f"{changed}_changed", "cache_missed_input_tokens": missed}}

    def _context_management(self) -> dict[str, Any]:
        return {} if self._body.context_management is None else {"context_management": {"applied_edits": []}}

    def _end(self, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        """Return why the answer ended. If a stop string ended an answer with whole calls, the reason is "tool_use"."""
        reason, sequence = _REASONS.get(finish_reason or "", "end_turn"), None
        if finish_reason == "length" and self._num_output_tokens < self._body.max_tokens:
            reason = "model_context_window_exceeded"
        elif finish_reason == "stop" and delta.stop_reason in (self._body.stop_sequences or ()):
            reason, sequence = "stop_sequence", delta.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Return the usage. Its three counts of input tokens add up to the prompt."""
        record, by_ttl_s = self.answer.jobs[0].record, self.answer.num_written_tokens()
        num_written = sum(by_ttl_s.values())
        return {
            "input_tokens": record.num_computed_tokens - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": record.num_cached_tokens,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": by_ttl_s.get(TTL_S[ttl], 0) for ttl in TTL_S},
            "output_tokens": self._num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thinking_tokens},
        }


# ----------------------------------------------------------------------- blocks


def _blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the content of a whole message, put together from the events of a stream, as clients do."""
    blocks: list[dict[str, Any]] = []
    events = _BlockEvents()
    block_events = [event for part in parts for event in events.of(part)]
    for event in (*block_events, *events.close()):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = _object(delta["partial_json"])
            else:
                blocks[-1] |= {key: blocks[-1][key] + value for key, value in delta.items() if key != "type"}
    return blocks


class _BlockEvents:
    """Turns parts of a reply into events. Neighbouring pieces of text, or of reasoning, become one block."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._open: type[Part] | None = None
        self._digest = sha256()

    def of(self, part: Part) -> Iterator[dict[str, Any]]:
        if isinstance(part, Call):
            yield from self.close()
            name = {"id": f"toolu_{secrets.token_hex(12)}", "name": part.name}
            yield self._start({"type": "tool_use", **name, "input": {}})
            yield self._delta("input_json_delta", partial_json=_input_json(part))
            yield self._stop()
            return
        if self._open is not type(part):
            yield from self.close()
            self._open = type(part)
            is_text = isinstance(part, Text)
            empty = {"text": ""} if is_text else {"thinking": "", "signature": ""}
            yield self._start({"type": "text" if is_text else "thinking", **empty})
        if isinstance(part, Text):
            yield self._delta("text_delta", text=part.text)
        else:
            self._digest.update(part.text.encode("utf-8", "surrogatepass"))
            yield self._delta("thinking_delta", thinking=part.text)

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block, if any. Reasoning gets a signature, because some clients require it."""
        if self._open is None:
            return
        if self._open is Reasoning:
            yield self._delta("signature_delta", signature=self._digest.hexdigest())
            self._digest = sha256()
        self._open = None
        yield self._stop()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._num_begun += 1
        return {"type": "content_block_start", "index": self._num_begun - 1, "content_block": block}

    def _delta(self, kind: str, **change: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_begun - 1, "delta": {"type": kind, **change}}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._num_begun - 1}


def _object(text: str) -> Any:
    """Read the object in a JSON text, or in the beginning of such a text; {} if it cannot be read."""
    with suppress(ValueError):
        return parse_json(text)
    try:
        return from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}


def _input_json(call: Call) -> str:
    """Return the arguments of a call as the text of a JSON object, or as its beginning if the call is not complete."""
    if not call.is_complete:
        return call.arguments
    try:
        value = parse_json(call.arguments or "{}")
    except ValueError:
        value = call.arguments
    return call.arguments if isinstance(value, dict) else json.dumps({"arguments": value})

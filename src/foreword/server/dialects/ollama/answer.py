"""Ollama's answers, whole or as lines of JSON. The last line has counts and durations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.chats.chat import ChatAnswer, ReplyDelta, arguments_of, chat_logprobs, num_bytes
from foreword.server.dialect import Event
from foreword.server.dialects.ollama.fields import GenerateRequest, OllamaChatRequest
from foreword.server.http import AnswerWriter
from foreword.server.records import RequestRecord
from foreword.server.service import Service
from foreword.text.reply import Call, Part, Reasoning, Text

Json = dict[str, Any]


def now() -> str:
    """Return the current time in Ollama's form."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(AnswerWriter):
    """Writes one answer."""

    piece_depth = 4

    def __init__(
        self, service: Service, answer: ChatAnswer | AnswerStream, body: OllamaChatRequest | GenerateRequest
    ) -> None:
        """`answer`: an AnswerStream for prompts without a chat template."""
        self.answer = answer.stream if isinstance(answer, ChatAnswer) else answer
        self._chat_answer = answer if isinstance(answer, ChatAnswer) else None
        self._service = service
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._with_context = isinstance(body, GenerateRequest) and not body.raw
        """Whether the answer ends with its tokens, so that a later call can continue it."""
        self._num_calls = 0

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        context = 8 * len(self.answer.outputs[0].prompt_token_ids) if self._with_context else 0
        return context + num_bytes(deltas, self._num_top)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        [delta] = deltas
        return self._line(delta, self._read(delta).parts) | self._end(delta)

    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        """Return the lines: one for each part, then the end."""
        lines: list[Json] = []
        for delta in deltas:
            parts = self._read(delta).parts
            lines += [self._line(delta if not at else None, [part]) for at, part in enumerate(parts)]
            if delta.finish_reason is not None:
                lines.append(self._line(None if parts else delta, []) | self._end(delta))
            elif delta.logprobs and not parts:
                lines.append(self._line(delta, []))
        return [(None, line) for line in lines]

    def _read(self, delta: Delta) -> ReplyDelta:
        if self._chat_answer is None:
            return ReplyDelta([Text(delta.text)] if delta.text else [], delta.finish_reason)
        return self._chat_answer.read(delta)

    def _line(self, delta: Delta | None, parts: Sequence[Part]) -> Json:
        """Return a line with these parts, and the log probabilities of a delta's tokens."""
        text = "".join(_text(part) for part in parts if not isinstance(part, Reasoning))
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [call for part in parts if (call := self._call(part)) is not None]
        thinking = {"thinking": thoughts} if thoughts else {}
        line: Json = {"model": self._body.model, "created_at": now()}
        if isinstance(self._body, OllamaChatRequest):
            called = {"tool_calls": calls} if calls else {}
            line["message"] = {"role": "assistant", "content": text, **thinking, **called}
        else:
            line |= {"response": text, **thinking}
        line["done"] = False
        if delta is not None and delta.logprobs:
            line["logprobs"] = chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        return line

    def _call(self, part: Part) -> Json | None:
        if not isinstance(part, Call) or (arguments := arguments_of(part)) is None:
            return None
        index, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = {} if part.id is None else {"id": part.id}
        return {**call_id, "function": {"index": index, "name": part.name, "arguments": arguments}}

    def _end(self, delta: Delta) -> Json:
        [output] = self.answer.outputs
        end: Json = {
            "done": True,
            "done_reason": delta.finish_reason,
            **_durations(self.answer.jobs[0].record),
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_cached_count": output.num_cached_tokens,
            "eval_count": len(output.outputs[0].token_ids),
        }
        if self._with_context:
            token_ids, ends = list(output.outputs[0].token_ids), self._service.llm.engine.limits.eos_token_ids
            if token_ids and token_ids[-1] in ends:  # the template writes the end token in the next turn
                token_ids.pop()
            end["context"] = [*output.prompt_token_ids, *token_ids]
        wished = None if self._body.options is None else self._body.options.num_ctx
        if wished not in (None, self._service.max_model_len):
            end["num_ctx"] = self._service.max_model_len
        return end


def _durations(record: RequestRecord) -> Json:
    """Return the durations in nanoseconds. The wait for the first step counts as the time to load.

    The durations of loading, the prompt and the answer add up to the total.
    """
    end = record.token_times[-1] if record.token_times else time.monotonic()
    first = record.token_times[0] if record.token_times else end
    begun = record.first_scheduled_time if record.first_scheduled_time is not None else first
    at = [round(1e9 * (moment - record.arrival_time)) for moment in (begun, first, end)]
    return {
        "total_duration": at[2],
        "load_duration": at[0],
        "prompt_eval_duration": at[1] - at[0],
        "eval_duration": at[2] - at[1],
    }


def _text(part: Part) -> str:
    """Return the text of a part. A malformed call appears as text, other calls as an empty text."""
    if not isinstance(part, Call):
        return part.text
    return "" if arguments_of(part) is not None else f"{part.name}({part.arguments})"

"""/v1/chat/completions and /v1/completions.

Knows OpenAI's fields and their meaning for a prompt and its sampling; format.py writes the answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import TokenLogprobs
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.bodies.off_loop import off_loop
from foreword.server.calls import (
    Limits,
    caller_of,
    check_call,
    ending_of,
    plain_messages,
    sampling_params,
    template_inputs,
)
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.extras import Extras
from foreword.server.dialects.openai.fields import ChatRequest, CompletionRequest
from foreword.server.dialects.openai.structured import structured_outputs
from foreword.server.dialects.openai.tools import ToolCall, ToolCallReader, ToolUse
from foreword.server.http import Authorized, Event, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.service import Service, digests, new_id

router = APIRouter(tags=["openai"])

Call = ChatRequest | CompletionRequest
Chunk = dict[str, Any]


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    check_call(service, body)
    tool_use = ToolUse(body, None if service.llm.tokenizer is None else service.llm.tokenizer.chat_template)

    def read() -> tuple[dict[str, Any], dict[str, str], str | None, list[dict[str, Any]]]:
        inputs = {**template_inputs(body.reasoning_effort, body.chat_template_kwargs), **tool_use.for_template}
        return inputs, digests(inputs), tool_use.grammar(), plain_messages(body.messages)

    inputs, inputs_digests, forced, messages = await with_body(request, read)
    caller = caller_of(body, request, tenant, "chat.completions", inputs_digests)
    extras = Extras(service, tenant, request, body)
    limits = _chat_limits(body)
    params = await sampling_params(service, body, limits, structured_outputs(body, body.response_format))
    params = replace(params, stop=(*params.stop, *tool_use.stop))
    if forced is not None:
        if params.open_constraint is not None:
            raise bad_request("structured outputs cannot be combined with a forced tool_choice", param="tool_choice")
        params = replace(params, open_constraint=await service.compile_grammar(forced))
    prompt = service.fit(await service.conversation(messages, inputs, ending_of(body)), params)
    answer = await service.start(caller, new_id("chatcmpl-"), [prompt], params, stream=bool(body.stream))
    return await respond(request, _ChatAnswer(service, answer, body, extras, tool_use))


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def completions(
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))], request: Request, tenant: Authorized
) -> Response:
    """Continue one or several texts."""
    service = service_of(request)
    check_call(service, body)
    if body.best_of not in (None, body.n or 1):
        raise bad_request(f"best_of={body.best_of} is not supported, other than equal to n", param="best_of")
    caller = caller_of(body, request, tenant, "completions")
    extras = Extras(service, tenant, request, body)
    limits = _completion_limits(body)
    params = await sampling_params(service, body, limits, structured_outputs(body, body.response_format))
    prompts = [service.fit(Prompt(prompt), params) for prompt in await _prompts(service, body, request)]
    answer = await service.start(caller, new_id("cmpl-"), prompts, params, stream=bool(body.stream))
    return await respond(request, _CompletionAnswer(service, answer, body, extras))


# ------------------------------------------------------------------- requests


def _chat_limits(body: ChatRequest) -> Limits:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return Limits(most, (body.top_logprobs or 0) if body.logprobs else None)


def _completion_limits(body: CompletionRequest) -> Limits:
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 asks for nothing; use 1 or more, or echo=true", param="max_tokens")
    # The engine always generates something; with max_tokens=0 the answer does not show it.
    most = 16 if body.max_tokens is None else max(1, body.max_tokens)
    return Limits(most, body.logprobs, body.logprobs if body.echo else None)


async def _prompts(service: Service, body: CompletionRequest, request: Request) -> list[npt.NDArray[np.int32]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if isinstance(prompt[0], str):
        return [await service.encode(one) for one in prompt]
    return await with_body(request, lambda: [np.array(one, np.int32) for one in prompt])


# -------------------------------------------------------------------- answers


class _Answer(ABC):
    """The parts that chat and completions share: the frame around choices."""

    object_name: str
    chunk_name: str
    piece_depth = 5

    def __init__(self, service: Service, answer: AnswerStream, body: Call, extras: Extras) -> None:
        self.answer = answer
        self._extras = extras
        self._service = service
        self._body = body
        self._num_top = 0

    def _frame(self, object_name: str, choices: list[Chunk]) -> Chunk:
        record = self.answer.jobs[0].record
        return {
            "id": record.response_id,
            "object": object_name,
            "created": int(record.created),
            "model": self._service.model_name,
            "system_fingerprint": None,
            "choices": choices,
        }

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        """Estimated bytes of these deltas."""
        return form.num_bytes(deltas, self._num_top)

    def whole(self, deltas: Sequence[Delta]) -> Chunk:
        """The body of an answer that is not streamed."""
        choices = [self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)]
        last = {"usage": form.usage(self.answer.outputs, self._service.llm), **self._extras.of(self.answer)}
        return self._frame(self.object_name, choices) | last

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events of a streamed answer; their names are None, as OpenAI's are here."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        empty = {"usage": None} if with_usage else {}
        first: list[Event] = [(None, {**chunk, **empty}) for chunk in self._first_chunks()]
        if first:
            yield first
        async for deltas in self.answer.deltas():
            choices = await off_loop(self.num_bytes(deltas), partial(self._choices_of, deltas))
            yield [(None, {**self._frame(self.chunk_name, [choice]), **empty}) for choice in choices]
        extras = self._extras.of(self.answer)
        if with_usage or extras:
            last = {"usage": form.usage(self.answer.outputs, self._service.llm)} if with_usage else {}
            yield [(None, {**self._frame(self.chunk_name, []), **last, **extras})]

    def _choices_of(self, deltas: Sequence[Delta]) -> list[Chunk]:
        return [choice for delta in deltas for choice in self._chunk_choices(delta)]

    def _first_chunks(self) -> list[Chunk]:
        return []

    @abstractmethod
    def _choice(self, delta: Delta) -> Chunk:
        """One choice of a whole answer."""

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        """The choices of the chunks that contain new text."""


class _ChatAnswer(_Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, service: Service, answer: AnswerStream, body: ChatRequest, extras: Extras, tool_use: ToolUse
    ) -> None:
        super().__init__(service, answer, body, extras)
        self._num_top = body.top_logprobs or 0
        self._tool_use = tool_use
        self._readers: dict[int, ToolCallReader | None] = {}
        self._num_sent: dict[int, int] = {}
        """Number of calls that a stream has sent, by choice."""

    def _parts(self, delta: Delta) -> tuple[list[str | ToolCall], str | None]:
        """New text and calls of a choice, and its finish reason."""
        reader = self._readers.setdefault(delta.choice, self._tool_use.reader())
        if reader is None:
            return [delta.text] if delta.text else [], delta.finish_reason
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        return parts, self._tool_use.finish_reason(delta.finish_reason, reader.num_calls)

    def _choice(self, delta: Delta) -> Chunk:
        parts, finish_reason = self._parts(delta)
        calls = [part.as_json() for part in parts if isinstance(part, ToolCall)]
        text = "".join(part for part in parts if isinstance(part, str))
        message: Chunk = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": delta.choice,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _first_chunks(self) -> list[Chunk]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._frame(self.chunk_name, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(self._body.n or 1)
        ]

    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        parts, finish_reason = self._parts(delta)
        logprobs = self._logprobs(delta)
        if not parts and (logprobs or finish_reason is None):  # tokens without text yet: shows that the answer is alive
            parts = [""]
        changes = [change for part in parts for change in self._changes(delta.choice, part)]
        choices: list[Chunk] = [
            {"index": delta.choice, "delta": change, "logprobs": logprobs if not at else None, "finish_reason": None}
            for at, change in enumerate(changes)
        ]
        if finish_reason is not None:
            end = {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}
            choices.append({"index": delta.choice, "delta": {}, "logprobs": None, **end})
        return choices

    def _changes(self, choice: int, part: str | ToolCall) -> list[Chunk]:
        """`delta`s for a piece of text, or for a call: its name first, then its arguments."""
        if isinstance(part, str):
            return [{"content": part}]
        index = self._num_sent.get(choice, 0)
        self._num_sent[choice] = index + 1
        call = part.as_json()
        begun = {"index": index, **call, "function": {"name": part.name, "arguments": ""}}
        return [{"tool_calls": [begun]}, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}]

    def _logprobs(self, delta: Delta) -> Chunk | None:
        if not delta.logprobs:
            return None
        content = form.chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        return {"content": content, "refusal": None}


class _CompletionAnswer(_Answer):
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, answer: AnswerStream, body: CompletionRequest, extras: Extras) -> None:
        super().__init__(service, answer, body, extras)
        self._num_top = body.logprobs or 0
        self._echo = bool(body.echo)
        self._hides_answer = body.max_tokens == 0
        self._num_each = body.n or 1
        self._offsets: dict[int, int] = {}

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        echoed = sum(
            len(self.answer.jobs[delta.choice // self._num_each].prompt.token_ids)
            for delta in deltas
            if self._echo and delta.choice not in self._offsets
        )
        return super().num_bytes(deltas) + echoed * form.bytes_per_token(
            self._num_top if self._body.logprobs is not None else None
        )

    def _choice(self, delta: Delta) -> Chunk:
        """A whole choice, or the next piece of one: OpenAI gives both the same form."""
        token_ids, text = list(delta.token_ids), delta.text
        logprobs: list[TokenLogprobs | None] | None = None if delta.logprobs is None else list(delta.logprobs)
        if self._hides_answer:
            token_ids, text, logprobs = [], "", None if logprobs is None else []
        offset = self._offsets.get(delta.choice, 0)
        if self._echo and delta.choice not in self._offsets:
            prompt_ids, prompt_text, prompt_logprobs = self._echoed(delta.choice // self._num_each)
            token_ids, text = prompt_ids + token_ids, prompt_text + text
            logprobs = None if logprobs is None else prompt_logprobs + logprobs
        self._offsets[delta.choice] = offset + len(text)
        return {
            "index": delta.choice,
            "text": text,
            "logprobs": None
            if logprobs is None
            else form.completion_logprobs(self._service.llm.tokenizer, token_ids, logprobs, self._num_top, offset),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _echoed(self, number: int) -> tuple[list[int], str, list[TokenLogprobs | None]]:
        """Tokens, text and log probabilities of a prompt."""
        token_ids: list[int] = self.answer.jobs[number].prompt.token_ids.tolist()
        tokenizer = self._service.llm.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(token_ids)
        return token_ids, text, self.answer.outputs[number].prompt_logprobs or []

    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        return [self._choice(delta)]

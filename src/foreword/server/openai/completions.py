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
from foreword.request import SamplingParams, TokenLogprobs
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
from foreword.server.dialect import ChatRequest, CompletionRequest
from foreword.server.http import Authorized, Event, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.openai import format as form
from foreword.server.openai.extras import Extras
from foreword.server.openai.structured import structured_outputs
from foreword.server.openai.tools import ToolUse, call_as_json
from foreword.server.service import Service, digests, new_id
from foreword.text.reply import Call, Part, Reasoning, ReplyReader, Text
from foreword.text.reply.turn import Turn

router = APIRouter(tags=["openai"])

Body = ChatRequest | CompletionRequest
Chunk = dict[str, Any]


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    check_call(service, body)
    tool_use = ToolUse(body, service.llm.tokenizer)

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
    turn = Turn(service.tokenizer, prompt.token_ids)
    params = _limited(service, body, turn, params, is_call=forced is not None)
    answer = await service.start(caller, new_id("chatcmpl-"), [prompt], params, stream=bool(body.stream))
    return await respond(request, _ChatAnswer(service, answer, body, extras, (tool_use, turn)))


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


def _limited(
    service: Service, body: ChatRequest, turn: Turn, params: SamplingParams, *, is_call: bool
) -> SamplingParams:
    """The parameters with the limit of the thinking, and with markers in the text for the reader of the reply."""
    limits = service.llm.engine.limits
    limit = turn.limit(
        params.open_constraint,
        budget=body.thinking_budget,
        vocab_size=limits.vocab_size,
        end_token_ids=limits.eos_token_ids,
        is_call=is_call,
    )
    return replace(params, open_constraint=limit, keep_markers=True)


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

    def __init__(self, service: Service, answer: AnswerStream, body: Body, extras: Extras) -> None:
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
        last = {"usage": self._usage(), **self._extras.of(self.answer)}
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
            last = {"usage": await off_loop(self._num_usage_bytes(), self._usage)} if with_usage else {}
            yield [(None, {**self._frame(self.chunk_name, []), **last, **extras})]

    def _usage(self) -> Chunk:
        return form.usage(self.answer.outputs, self._service.llm)

    def _num_usage_bytes(self) -> int:
        """Estimated bytes that `usage` is computed from."""
        return 0

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
        self,
        service: Service,
        answer: AnswerStream,
        body: ChatRequest,
        extras: Extras,
        reading: tuple[ToolUse, Turn],
    ) -> None:
        super().__init__(service, answer, body, extras)
        self._num_top = body.top_logprobs or 0
        self._tool_use, self._turn = reading
        self._readers: dict[int, ReplyReader | None] = {}
        self._num_calls: dict[int, int] = {}
        """Number of calls that were shown, by choice."""

    def _parts(self, delta: Delta) -> tuple[list[Part], str | None]:
        """New parts of a choice, and its finish reason."""
        if delta.choice not in self._readers:
            self._readers[delta.choice] = self._tool_use.reader(self._turn)
        reader = self._readers[delta.choice]
        if reader is None:
            return [Text(delta.text)] if delta.text else [], delta.finish_reason
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        if not self._tool_use.is_parallel:
            num_before = reader.num_calls - sum(isinstance(part, Call) for part in parts)
            parts = _with_one_call(parts, num_before)
        return parts, self._tool_use.finish_reason(delta.finish_reason, reader.num_calls)

    def _usage(self) -> Chunk:
        usage = super()._usage()
        usage["completion_tokens_details"]["reasoning_tokens"] = sum(
            self._service.tokenizer.num_tokens_in(choice.token_ids, reader.reasoning_spans)
            for choice in self.answer.outputs[0].outputs
            if (reader := self._readers.get(choice.index)) is not None and reader.reasoning_spans
        )
        return usage

    def _num_usage_bytes(self) -> int:
        return 8 * sum(len(choice.token_ids) for choice in self.answer.outputs[0].outputs)

    def _choice(self, delta: Delta) -> Chunk:
        parts, finish_reason = self._parts(delta)
        calls = [call_as_json(part) for part in parts if isinstance(part, Call)]
        text = "".join(part.text for part in parts if isinstance(part, Text))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        message: Chunk = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
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
            parts = [Text("")]
        changes = [change for part in parts for change in self._changes(delta.choice, part)]
        choices: list[Chunk] = [
            {"index": delta.choice, "delta": change, "logprobs": logprobs if not at else None, "finish_reason": None}
            for at, change in enumerate(changes)
        ]
        if finish_reason is not None:
            end = {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}
            choices.append({"index": delta.choice, "delta": {}, "logprobs": None, **end})
        return choices

    def _changes(self, choice: int, part: Part) -> list[Chunk]:
        """`delta`s for a piece of text or reasoning, or for a call: its name first, then its arguments."""
        if isinstance(part, Text):
            return [{"content": part.text}]
        if isinstance(part, Reasoning):
            return [{"reasoning_content": part.text}]
        index = self._num_calls.get(choice, 0)
        self._num_calls[choice] = index + 1
        begun = {"index": index, **call_as_json(part), "function": {"name": part.name, "arguments": ""}}
        return [{"tool_calls": [begun]}, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}]

    def _logprobs(self, delta: Delta) -> Chunk | None:
        if not delta.logprobs:
            return None
        content = form.chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        return {"content": content, "refusal": None}


def _with_one_call(parts: list[Part], num_before: int) -> list[Part]:
    """The parts without the calls after the first one of a choice."""
    kept: list[Part] = []
    for part in parts:
        if not isinstance(part, Call):
            kept.append(part)
            continue
        if not num_before:
            kept.append(part)
        num_before += 1
    return kept


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

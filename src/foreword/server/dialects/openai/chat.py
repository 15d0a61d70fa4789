"""/v1/chat/completions.

Knows OpenAI's fields and their meaning for a chat; choices.py has the frame of answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.server.answer_stream import Delta
from foreword.server.api_errors import bad_request
from foreword.server.calls import Limits, caller_of, sampling_params
from foreword.server.chats.chat import Chat, ChatAnswer, calls_of, chat_logprobs, reasoning_of, start_chat, text_of
from foreword.server.chats.tools import ToolChoice
from foreword.server.dialects.openai.caching import Breakpoints, Caching
from foreword.server.dialects.openai.choices import ChoicesAnswer, Chunk
from foreword.server.dialects.openai.extras import Extras, structured_outputs
from foreword.server.dialects.openai.fields import ChatRequest, NamedToolChoice
from foreword.server.dialects.openai.messages import check_call, ending_of, plain_messages, plain_tools, template_inputs
from foreword.server.http import Authorized, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.service import Service, new_id
from foreword.text.reply import Call, Part, Reasoning, Text

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    check_call(service, tenant, body)
    chat, caching = await with_body(request, lambda: _chat(body, request.state.num_body_bytes))
    params = await sampling_params(service, body, _limits(body), structured_outputs(body, body.response_format))
    if body.prediction is not None:
        params = replace(params, prediction_token_ids=await service.encode_part(body.prediction.text))
    caller = caller_of(body, request, tenant, "chat.completions")
    caller = replace(caller, is_uncached=caching.is_off)
    extras = Extras(service, caller, request, body, caching)
    answer = await start_chat(service, caller, new_id("chatcmpl-"), chat, params, stream=bool(body.stream))
    return await respond(request, _ChatCompletion(service, answer, body, extras))


def _chat(body: ChatRequest, num_bytes: int) -> tuple[Chat, Caching]:
    breakpoints = Breakpoints()
    messages = plain_messages(body.messages, breakpoints)
    caching = Caching(body, breakpoints)
    chat = Chat(
        messages,
        plain_tools(body.tools),
        _tool_choice(body),
        template_inputs(body.reasoning_effort, body.chat_template_kwargs),
        ending_of(body),
        thinking_budget=body.thinking_budget,
        marks=caching.chat_marks(len(messages)),
        num_bytes=num_bytes,
        link=body.link,
    )
    return chat, caching


def _tool_choice(body: ChatRequest) -> ToolChoice:
    wanted, at_most_one = body.tool_choice, body.parallel_tool_calls is False
    if wanted not in (None, "none") and not body.tools:
        raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
    if wanted is None or isinstance(wanted, str):
        choice = ToolChoice(wanted or "auto", at_most_one=at_most_one)
    else:
        choice = ToolChoice("required", (wanted.function.name,), at_most_one=True)
    if choice.mode == "required" and body.response_format is not None and body.response_format.type != "text":
        raise bad_request("response_format cannot be combined with a forced tool_choice", param="tool_choice")
    return choice


def _limits(body: ChatRequest) -> Limits:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return Limits(most, (body.top_logprobs or 0) if body.logprobs else None)


class _ChatCompletion(ChoicesAnswer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, answer: ChatAnswer, body: ChatRequest, extras: Extras) -> None:
        super().__init__(service, answer.stream, body, extras)
        self._num_top = body.top_logprobs or 0
        self._chat_answer = answer
        self._is_named = isinstance(body.tool_choice, NamedToolChoice)
        self._num_sent: dict[int, int] = {}
        """Number of calls that a stream has sent, by choice."""

    def _parts(self, delta: Delta) -> tuple[Sequence[Part], str | None]:
        """New parts of a choice, and its finish reason: for a function that the client named it is "stop"."""
        reply = self._chat_answer.read(delta)
        return reply.parts, delta.finish_reason if self._is_named else reply.finish_reason

    def _num_reasoning_tokens(self) -> int:
        return self._chat_answer.num_reasoning_tokens()

    def _num_usage_bytes(self) -> int:
        return self._chat_answer.num_usage_bytes()

    def _choice(self, delta: Delta) -> Chunk:
        parts, finish_reason = self._parts(delta)
        calls, text, reasoning = [_call(call) for call in calls_of(parts)], text_of(parts), reasoning_of(parts)
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
        """`delta`s for a piece of text, or for a call: its name first, then its arguments."""
        if not isinstance(part, Call):
            return [{"reasoning_content" if isinstance(part, Reasoning) else "content": part.text}]
        index = self._num_sent.get(choice, 0)
        self._num_sent[choice] = index + 1
        call = _call(part)
        begun = {"index": index, **call, "function": {"name": part.name, "arguments": ""}}
        return [{"tool_calls": [begun]}, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}]

    def _logprobs(self, delta: Delta) -> Chunk | None:
        if not delta.logprobs:
            return None
        content = chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        return {"content": content, "refusal": None}


def _call(call: Call) -> Chunk:
    """A call in OpenAI's form, with the id that the model wrote, or a new one."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

"""/v1/responses: OpenAI's newer API.

Knows the fields of responses. Keeps a limited number of conversations for `previous_response_id`, each for its own
tenant only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import Delta
from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.json_scan import to_long_json
from foreword.server.bodies.off_loop import off_loop
from foreword.server.calls import Limits, caller_of, sampling_params
from foreword.server.chats.chat import Chat, ChatAnswer, chat_logprobs, start_chat
from foreword.server.dialect import Event
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.caching import Breakpoints, Caching
from foreword.server.dialects.openai.extras import Extras, structured_outputs
from foreword.server.dialects.openai.fields import JsonSchema, ResponseFormat
from foreword.server.dialects.openai.messages import check_call, template_inputs
from foreword.server.dialects.openai.response_fields import Item, ResponsesRequest, TextOptions
from foreword.server.dialects.openai.response_input import (
    all_functions,
    called_name,
    continued,
    plain_tools,
    tool_choice,
)
from foreword.server.dialects.openai.response_output import CalledTool, OutputItems
from foreword.server.http import Authorized, json_response, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.kept_responses import PIECE_DEPTH, KeptResponses, Messages
from foreword.server.service import Service, new_id
from foreword.text.reply import Text

router = APIRouter(tags=["openai"])

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def create_response(
    body: Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a text or a conversation."""
    service = service_of(request)
    check_call(service, tenant, body)
    if body.background:
        raise bad_request("background=true is not supported by this server; leave it out", param="background")
    before = _kept(request).get(tenant, body.previous_response_id)[0] if body.previous_response_id is not None else []
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    breakpoints = Breakpoints(len(head))
    conversation = await with_body(request, lambda: continued(before, body.input, breakpoints))
    caching = Caching(body, breakpoints)
    tools = plain_tools(body.tools or ())
    chat = Chat(
        [*head, *conversation],
        tools,
        tool_choice(body),
        template_inputs(body.reasoning.effort if body.reasoning is not None else None, body.chat_template_kwargs),
        shortens=body.truncation == "auto",
        marks=caching.chat_marks(len(head) + len(conversation)),
        num_bytes=request.state.num_body_bytes,
    )
    wants_logprobs = "message.output_text.logprobs" in (body.include or []) or body.top_logprobs is not None
    limits = Limits(body.max_output_tokens, (body.top_logprobs or 0) if wants_logprobs else None)
    params = await sampling_params(service, body, limits, structured_outputs(body, _response_format(body.text)))
    if caching.is_prewarm:  # the engine always generates something
        params = replace(params, max_tokens=1, min_tokens=0)
    caller = caller_of(body, request, tenant, "responses")
    caller = replace(caller, is_uncached=caching.is_off)
    extras = Extras(service, caller, request, body, caching)
    answer = await start_chat(service, caller, new_id("resp_"), chat, params, stream=bool(body.stream))
    return await respond(request, _ResponseAnswer(service, answer, body, tenant, conversation, extras))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request, tenant: Authorized) -> Response:
    """A kept response."""
    return Response(_kept(request).get(tenant, response_id)[1], media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, tenant: Authorized) -> Response:
    """Forget a response."""
    _kept(request).delete(tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _kept(request: Request) -> KeptResponses:
    return service_of(request).kept_responses


def _why_incomplete(finish_reason: str | None) -> str:
    return "content_filter" if finish_reason == "content_filter" else "max_output_tokens"


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    """The format of a response's text, as chat writes it."""
    if text is None or text.format is None:
        return None
    wanted = text.format
    schema = JsonSchema(name=wanted.name, schema=wanted.json_schema, strict=wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema)


class _ResponseAnswer:
    """Writes one response, whole or as events."""

    piece_depth = PIECE_DEPTH

    def __init__(
        self,
        service: Service,
        answer: ChatAnswer,
        body: ResponsesRequest,
        tenant: Tenant,
        conversation: Messages,
        extras: Extras,
    ) -> None:
        self.answer = answer.stream
        self._chat_answer = answer
        self._extras = extras
        self._service = service
        self._body = body
        self._tenant = tenant
        self._conversation = conversation
        tools = {
            called_name(tool.name or "", namespace): CalledTool(tool.name or "", namespace, tool.type == "custom")
            for _, namespace, tool in all_functions(body.tools or ())
        }
        with_encrypted = "reasoning.encrypted_content" in (body.include or ())
        self._output = OutputItems(tools, with_encrypted=with_encrypted)
        self._num_bytes = 0
        """Estimated bytes of everything that the stream has sent."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        return form.num_bytes(deltas, self._body.top_logprobs or 0)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        for delta in deltas:
            self._read(delta)
        return self._finish(deltas[-1].finish_reason)[1]

    async def events(self) -> AsyncIterator[list[Event]]:
        begun = self._response("in_progress")
        yield [self._output.event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]
        async for (delta,) in self.answer.deltas():
            new = self.num_bytes([delta])
            self._num_bytes += new
            events = await off_loop(new, partial(self._read, delta))
            if events:
                yield events
            if delta.finish_reason is not None:
                yield await off_loop(self._num_bytes, partial(self._last_events, delta.finish_reason))

    def _read(self, delta: Delta) -> list[Event]:
        if self._extras.caching.is_prewarm:
            return []
        logprobs = self._logprobs(delta)
        parts = self._chat_answer.read(delta).parts or ([Text("")] if logprobs else [])
        events: list[Event] = []
        for part in parts:
            events += self._output.add(part, logprobs)
            logprobs = []
        return events

    def _last_events(self, finish_reason: str | None) -> list[Event]:
        """They repeat the whole answer three times; that may take a second, so a thread writes them."""
        events, response = self._finish(finish_reason)
        events.append(self._output.event(f"response.{response['status']}", response=response))
        return [(name, to_long_json(data, PIECE_DEPTH + 1)) for name, data in events]

    def _finish(self, finish_reason: str | None) -> tuple[list[Event], dict[str, Any]]:
        """The events that end the output, and the finished response, which is kept."""
        is_prewarm = self._extras.caching.is_prewarm
        status = "completed" if finish_reason == "stop" or is_prewarm else "incomplete"
        events = [] if is_prewarm else [*self._output.finish(status)]
        items = self._output.items
        response = self._response(
            status,
            output=items,
            usage=self._usage(),
            incomplete_details=None if status == "completed" else {"reason": _why_incomplete(finish_reason)},
            completed_at=int(time.time()),
            **self._extras.of(self.answer),
        )
        if self._body.store is not False:
            said = [item for item in items if item["type"] == "message" or item["status"] == "completed"]
            with suppress(APIError):  # a call that the server would not take back is not kept either
                conversation = continued(self._conversation, _ITEMS.validate_python(said), Breakpoints())
                self._service.kept_responses.keep(self._tenant, conversation, response)
        return events, response

    def _usage(self) -> dict[str, Any]:
        answer = self.answer
        num_reasoning = self._chat_answer.num_reasoning_tokens()
        usage = form.response_usage(answer.outputs, self._service.llm, answer.num_written_tokens(), num_reasoning)
        if self._extras.caching.is_prewarm:
            usage |= {"output_tokens": 0, "total_tokens": usage["input_tokens"]}
        return usage

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.logprobs is None:
            return []
        top = self._body.top_logprobs or 0
        return chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, top)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body, record, params = self._body, self.answer.jobs[0].record, self.answer.jobs[0].params
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        return {
            "id": record.response_id,
            "object": "response",
            "created_at": int(record.created),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or self._service.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_options": self._extras.caching.options(),
            "prompt_cache_retention": body.prompt_cache_retention,
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": _dumped(body.tool_choice) or ("auto" if body.tools else "none"),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **more,
        }


def _dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value

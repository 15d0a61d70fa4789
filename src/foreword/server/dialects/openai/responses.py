"""/v1/responses: OpenAI's newer API, for text.

Knows the fields of responses, and the names and order of their events. Keeps a limited number of conversations for
`previous_response_id`, each for its own tenant only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.bodies.json_pieces import to_long_json
from foreword.server.bodies.off_loop import off_loop
from foreword.server.calls import Limits, caller_of, sampling_params
from foreword.server.dialects.dialect import Event
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.extras import Extras
from foreword.server.dialects.openai.fields import JsonSchema, ResponseFormat, ResponsesRequest, TextOptions
from foreword.server.dialects.openai.messages import check_call, plain_messages, template_inputs
from foreword.server.dialects.openai.structured import structured_outputs
from foreword.server.http import Authorized, json_response, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.kept_responses import PIECE_DEPTH, KeptResponses, Messages
from foreword.server.service import Service, digests, new_id

router = APIRouter(tags=["openai"])


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
async def create_response(
    body: Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a text or a conversation."""
    service = service_of(request)
    check_call(service, body)
    if body.background:
        raise bad_request("background=true is not supported by this server; leave it out", param="background")
    if body.tool_choice not in (None, "none", "auto"):
        raise bad_request(
            "tool_choice is only allowed with tools, which /v1/responses does not take", param="tool_choice"
        )
    given = body.input
    new: Messages = [{"role": "user", "content": given}] if isinstance(given, str) else []
    new += await with_body(request, lambda: plain_messages(given)) if not isinstance(given, str) else []
    before = _kept(request).get(tenant, body.previous_response_id)[0] if body.previous_response_id is not None else []
    conversation = [*before, *new]
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wants_logprobs = "message.output_text.logprobs" in (body.include or []) or body.top_logprobs is not None
    limits = Limits(body.max_output_tokens, (body.top_logprobs or 0) if wants_logprobs else None)
    params = await sampling_params(service, body, limits, structured_outputs(body, _response_format(body.text)))
    inputs = template_inputs(body.reasoning.effort if body.reasoning is not None else None)
    prompt = service.fit(await service.conversation([*head, *conversation], inputs), params)
    extras = Extras(service, tenant, request, body)
    caller = caller_of(body, request, tenant, "responses", cache_key=body.prompt_cache_key)
    caller = replace(caller, template_digests=digests(inputs))
    answer = await service.start(caller, new_id("resp_"), [prompt], params, stream=bool(body.stream))
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
        answer: AnswerStream,
        body: ResponsesRequest,
        tenant: Tenant,
        conversation: Messages,
        extras: Extras,
    ) -> None:
        self.answer = answer
        self._extras = extras
        self._item_id = new_id("msg_")
        self._service = service
        self._body = body
        self._tenant = tenant
        self._conversation = conversation
        self._num_events = 0

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        return form.num_bytes(deltas, self._body.top_logprobs or 0)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = [position for delta in deltas for position in self._logprobs(delta)]
        return self._finished(text, logprobs, deltas[-1].finish_reason)

    def _finished(self, text: str, logprobs: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        status = "completed" if finish_reason == "stop" else "incomplete"
        response = self._response(
            status,
            output=[self._item(status, [self._part(text, logprobs)])],
            usage=form.response_usage(self.answer.outputs, self._service.llm),
            incomplete_details=None if status == "completed" else {"reason": _why_incomplete(finish_reason)},
            completed_at=int(time.time()),
            **self._extras.of(self.answer),
        )
        if self._body.store is not False:
            said = [*self._conversation, {"role": "assistant", "content": text}]
            self._service.kept_responses.keep(self._tenant, said, response)
        return response

    async def events(self) -> AsyncIterator[list[Event]]:
        where: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **where, part=self._part("", [])),
        ]
        texts: list[str] = []
        logprobs: list[dict[str, Any]] = []
        finish_reason = None
        async for (delta,) in self.answer.deltas():
            finish_reason = delta.finish_reason
            new = self._logprobs(delta)
            texts.append(delta.text)
            logprobs += new
            if delta.text or new:
                yield [self._event("response.output_text.delta", **where, delta=delta.text, logprobs=new)]
        text = "".join(texts)
        num_bytes = len(text) + len(logprobs) * form.bytes_per_token(self._body.top_logprobs or 0)
        yield await off_loop(num_bytes, partial(self._last_events, text, logprobs, finish_reason, where))

    def _last_events(
        self, text: str, logprobs: list[dict[str, Any]], finish_reason: str | None, where: dict[str, Any]
    ) -> list[Event]:
        """They repeat the whole answer three times; that may take a second, so a thread writes them here."""
        response = self._finished(text, logprobs, finish_reason)
        item = response["output"][0]
        events = [
            self._event("response.output_text.done", **where, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **where, part=item["content"][0]),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]
        return [(name, to_long_json(data, PIECE_DEPTH + 1)) for name, data in events]

    def _event(self, kind: str, **data: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return kind, event

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.logprobs is None:
            return []
        top = self._body.top_logprobs or 0
        return form.chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, top)

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body, record = self._body, self.answer.jobs[0].record
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
            "model": self._service.model_name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **more,
        }

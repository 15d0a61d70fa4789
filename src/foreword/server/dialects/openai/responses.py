"""/v1/responses: OpenAI's newer API, with conversations kept for `previous_response_id`."""

from __future__ import annotations

import base64
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from foreword.server.answer_stream import Delta
from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.json_scan import to_long_json
from foreword.server.calls import Call, CallWith, sampling_of, sampling_params
from foreword.server.chats.chat import Chat, ChatAnswer, chat_logprobs, num_bytes, start_chat
from foreword.server.chats.tools import ToolChoice
from foreword.server.crews import off_loop
from foreword.server.dialect import Event
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.caching import Breakpoints, Caching, Extras, refuse_breakpoint
from foreword.server.dialects.openai.fields import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputMessage,
    Item,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
    pictures_in,
)
from foreword.server.dialects.openai.messages import (
    arguments_for_template,
    check_call,
    structured_outputs,
    template_inputs,
)
from foreword.server.http import AnswerWriter, Authorized, json_response, respond, service_of
from foreword.server.kept_responses import PIECE_DEPTH, Messages
from foreword.server.service import new_id
from foreword.text.conversation import earlier_call, function_tool, read_arguments
from foreword.text.reply import Call as ToolCall
from foreword.text.reply import Part, Reasoning, Text

logger = logging.getLogger(__name__)

Message = dict[str, Any]

EVENT_DEPTH = {"response.output_text.done": 2, "response.content_part.done": 3, "response.output_item.done": 5}
"""For events that hold only a part of a response: the depth to use in place of `PIECE_DEPTH`."""
CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool, which the model sees as a function."""


def continued(conversation: Sequence[Message], items: str | Sequence[Item], breakpoints: Breakpoints) -> list[Message]:
    """Add items to a copy of a conversation, and collect the items' breakpoints.

    Raises APIError 400 for items that make no sense in their place.
    """
    messages = list(conversation)
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    calls: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(items):
        where, index = f"input[{number}]", len(messages)
        refuse_breakpoint(item, where)
        match item:
            case InputMessage(role="assistant"):
                _refuse_pictures(item, where)
                answer = _assistant("", reasoning)
                if reasoning is None and messages and messages[-1].get("tool_calls"):  # text between calls and outputs
                    answer = messages.pop()
                place = f"{where}.content"
                text = breakpoints.text(item.content, place, len(messages), item.role, answer["content"])
                messages.append({**answer, "content": text})
                reasoning = None
            case InputMessage():
                role = "system" if item.role == "developer" else item.role
                text = breakpoints.text(item.content, f"{where}.content", index, role)
                messages.append({"role": role, "content": text, **pictures_in(item.content)})
            case FunctionCallItem() | CustomCallItem():
                if reasoning is not None or not messages or messages[-1]["role"] != "assistant":
                    messages.append(_assistant("", reasoning))
                    reasoning = None
                if messages[-1].get("tool_calls") is not calls:  # the message may belong to a kept conversation
                    calls = [*messages[-1].get("tool_calls", ())]
                    messages[-1] = {**messages[-1], "tool_calls": calls}
                calls.append(_call(item))
                names[item.call_id] = calls[-1]["function"]["name"]
            case CallOutputItem():
                if item.call_id not in names:
                    message = f"No tool call found for the output with call_id {item.call_id[:100]!r}"
                    raise bad_request(f"{message}; send the call before it", param=f"{where}.call_id")
                result = {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id]}
                text = breakpoints.text(item.output, f"{where}.output", index, "tool")
                messages.append({**result, "content": text, **pictures_in(item.output)})
            case ReasoningItem():
                reasoning = (reasoning or "") + _reasoning(item, where)
            case _:
                raise bad_request(
                    f"Items of the type {item.type[:100]!r} are not supported by this server; leave them out",
                    param=f"{where}.type",
                )
    return messages


def _refuse_pictures(item: InputMessage, where: str) -> None:
    if pictures_in(item.content):
        message = f"{where} is the model's, and has a picture; models write text, send it in a user's message"
        raise bad_request(message, param=f"{where}.content")


def _assistant(text: str, reasoning: str | None) -> Message:
    message = {"role": "assistant", "content": text}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _call(item: FunctionCallItem | CustomCallItem) -> Message:
    arguments: Mapping[str, Any] | str
    if isinstance(item, CustomCallItem):
        name, arguments = item.name, {"input": item.input}
    else:
        name, arguments = called_name(item.name, item.namespace), arguments_for_template(item.arguments)
    return earlier_call(item.call_id, name, arguments)


def _reasoning(item: ReasoningItem, where: str) -> str:
    if item.content or item.encrypted_content is None:
        return "".join(part.text for part in item.content or item.summary or ())
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except ValueError:
        message = "encrypted_content is not of this server; leave the reasoning item out"
        raise bad_request(message, param=f"{where}.encrypted_content") from None


# ---------------------------------------------------------------------- tools


def called_name(name: str, namespace: str | None) -> str:
    """Return the model's name for a function. It includes the namespace, because templates have no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def all_functions(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, str | None, ResponseTool]]:
    """Yield place, namespace and tool of each function and custom tool. Raises APIError 400 for a tool's breakpoint."""
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        refuse_breakpoint(tool, where)
        if tool.type == "namespace":
            for inner, function in enumerate(tool.tools or ()):
                refuse_breakpoint(function, f"{where}.tools[{inner}]")
                yield f"{where}.tools[{inner}]", tool.name, function
        elif tool.type.startswith("web_search"):
            _warn_of_search()
        else:
            yield where, None, tool


@functools.cache
def _warn_of_search() -> None:
    logger.warning("requests have a web_search tool, which this server cannot run; the model does not see it")


def plain_tools(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Convert tools to the form for chat templates. Raises APIError 400 for tools that only the vendor can run.

    Web searches are left out without an error, because agents send them with every call.
    """
    plain = []
    for where, namespace, tool in all_functions(tools):
        if tool.type not in ("function", "custom"):
            message = f"Tools of the type {tool.type[:100]!r} are not supported by this server; leave it out"
            raise bad_request(message, param=f"{where}.type")
        if tool.name is None:
            raise bad_request(f"Missing required parameter: {where}.name", param=f"{where}.name")
        description = tool.description
        if tool.type == "custom":
            grammar = (tool.format or {}).get("definition")
            description = "\n\n".join(text for text in (description, grammar) if isinstance(text, str)) or None
        parameters = CUSTOM_INPUT if tool.type == "custom" else tool.parameters
        plain.append(function_tool(called_name(tool.name, namespace), description, parameters))
    return plain


def tool_choice(body: ResponsesRequest) -> ToolChoice:
    """Return the calls that a response may make. Raises APIError 400 if the choice lacks the tools that it needs."""
    choice, at_most_one = body.tool_choice, body.parallel_tool_calls is False
    if choice is None or isinstance(choice, str):
        if choice == "required" and not body.tools:
            raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
        return ToolChoice(choice or "auto", at_most_one=at_most_one)
    if choice.type == "allowed_tools":
        names = tuple(tool.name for tool in choice.tools or ())
        if not names:
            raise bad_request("allowed_tools names no tools; name one or more", param="tool_choice.tools")
        return ToolChoice(choice.mode, names, at_most_one)
    if choice.name is None:
        raise bad_request("Missing required parameter: tool_choice.name", param="tool_choice.name")
    return ToolChoice("required", (choice.name,), at_most_one=True)


Json = dict[str, Any]
Logprobs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool under the client's names, which may differ from the name that the model uses."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether it is a custom tool, which is called with a text."""


class OutputItems:
    """The items of one response, while the response's parts arrive. The methods yield events of the stream."""

    def __init__(self, tools: Mapping[str, CalledTool], *, with_encrypted: bool) -> None:
        """`tools`: the model's name -> tool. `with_encrypted`: whether items of reasoning get `encrypted_content`."""
        self.items: list[Json] = []
        self._tools = tools
        self._with_encrypted = with_encrypted
        self._num_events = 0
        self._texts: list[str] = []
        """The pieces of the open item's text."""
        self._logprobs: Logprobs = []
        self._open: type[Text] | type[Reasoning] | None = None

    def event(self, kind: str, **data: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return kind, event

    def add(self, part: Part, logprobs: Logprobs) -> Iterator[Event]:
        """Add a part of the answer. `logprobs`: its tokens' log probabilities, which only parts of text report."""
        if isinstance(part, ToolCall):
            yield from self._close()
            yield from self._call(part)
            return
        if self._open is not type(part):
            yield from self._close()
            yield from self._begin(part)
        self._texts.append(part.text)
        if isinstance(part, Reasoning):
            yield self.event("response.reasoning_text.delta", **self._where, delta=part.text)
        else:
            self._logprobs += logprobs
            yield self.event("response.output_text.delta", **self._where, delta=part.text, logprobs=logprobs)

    @property
    def ends_with_text(self) -> bool:
        """Whether the output ends with a text, or is empty, so that more text makes no second item."""
        return self._open is Text or not self.items

    def finish(self, status: str) -> Iterator[Event]:
        """End the output. An empty response gets one empty message."""
        if not self.items:
            yield from self._begin(Text(""))
        yield from self._close(status)

    @property
    def _where(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _begin(self, part: Text | Reasoning) -> Iterator[Event]:
        self._open = type(part)
        item: Json = {"status": "in_progress", "content": []}
        if isinstance(part, Text):
            item |= {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        else:
            item |= {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        self.items.append(item)
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))
        yield self.event("response.content_part.added", **self._where, part=self._part("", []))

    def _part(self, text: str, logprobs: Logprobs) -> Json:
        if self._open is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        text, logprobs, item = "".join(self._texts), self._logprobs, self.items[-1]
        part = self._part(text, logprobs)
        item |= {"status": status, "content": [part]}
        if self._open is Text:
            yield self.event("response.output_text.done", **self._where, text=text, logprobs=logprobs)
        else:
            yield self.event("response.reasoning_text.done", **self._where, text=text)
            if self._with_encrypted:  # not secret: it is for clients that keep only this field and send it back
                item["encrypted_content"] = base64.b64encode(text.encode()).decode()
        yield self.event("response.content_part.done", **self._where, part=part)
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open, self._texts, self._logprobs = None, [], []

    def _call(self, call: ToolCall) -> Iterator[Event]:
        tool = self._tools.get(call.name, CalledTool(call.name))
        is_custom = tool.is_custom
        kind, field, value = ("function_call", "arguments", call.arguments)
        if is_custom:
            kind, field, value = ("custom_tool_call", "input", _input_of(call.arguments))
        item = {"id": new_id("ctc_" if is_custom else "fc_"), "type": kind, "status": "in_progress"}
        item |= {"call_id": call.id or f"call_{secrets.token_hex(12)}", "name": tool.name, field: ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self.items.append(item)
        index = len(self.items) - 1
        yield self.event("response.output_item.added", output_index=index, item=dict(item))
        where = {"item_id": item["id"], "output_index": index}
        stem = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
        yield self.event(f"{stem}.delta", **where, delta=value)
        item |= {field: value, "status": "completed" if call.is_complete else "incomplete"}
        yield self.event(f"{stem}.done", **where, **{field: value}, **({} if is_custom else {"name": tool.name}))
        yield self.event("response.output_item.done", output_index=index, item=item)


def _input_of(arguments: str) -> str:
    """Return the text under "input" in a custom tool's arguments, or all arguments if there is no such text."""
    value = read_arguments(arguments)
    text = value.get("input") if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else arguments


router = APIRouter(tags=["openai"])

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@router.post("/v1/responses")
async def create_response(call: CallWith[ResponsesRequest]) -> Response:
    """Answer a text or a conversation."""
    body, service, tenant = call.body, call.service, call.tenant
    check_call(call)
    if body.background:
        raise bad_request("background=true is not supported by this server; leave it out", param="background")
    before = (
        service.kept_responses.get(tenant, body.previous_response_id)[0]
        if body.previous_response_id is not None
        else []
    )
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    breakpoints = Breakpoints(len(head))
    conversation = await call.work(lambda: continued(before, body.input, breakpoints))
    caching = Caching(body, breakpoints)
    tools = plain_tools(body.tools or ())
    chat = Chat(
        [*head, *conversation],
        tools,
        tool_choice(body),
        template_inputs(body.reasoning.effort if body.reasoning is not None else None, body.chat_template_kwargs),
        shortens=body.truncation == "auto",
        marks=caching.chat_marks(len(head) + len(conversation)),
        num_bytes=call.num_bytes,
    )
    wants_logprobs = "message.output_text.logprobs" in (body.include or []) or body.top_logprobs is not None
    fields = sampling_of(body) | {
        "max_tokens": body.max_output_tokens,
        "logprobs": (body.top_logprobs or 0) if wants_logprobs else None,
    }
    params = await sampling_params(
        service, fields, structured_outputs(body, None if body.text is None else body.text.format)
    )
    if caching.is_prewarm:  # the engine always generates something
        params = replace(params, max_tokens=1, min_tokens=0)
    extras = Extras(call, "responses", caching)
    answer = await start_chat(service, extras.caller, new_id("resp_"), chat, params, stream=bool(body.stream))
    return await respond(call.request, _ResponseAnswer(call, answer, conversation, extras))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request, tenant: Authorized) -> Response:
    """Return a kept response."""
    return Response(service_of(request).kept_responses.get(tenant, response_id)[1], media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, tenant: Authorized) -> Response:
    """Forget a response."""
    service_of(request).kept_responses.delete(tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


class _ResponseAnswer(AnswerWriter):
    piece_depth = PIECE_DEPTH

    def __init__(
        self, call: Call[ResponsesRequest], answer: ChatAnswer, conversation: Messages, extras: Extras
    ) -> None:
        self.answer = answer.stream
        self._chat_answer = answer
        self._extras = extras
        self._service, self._body, self._tenant = call.service, call.body, call.tenant
        self._conversation = conversation
        tools = {
            called_name(tool.name or "", namespace): CalledTool(tool.name or "", namespace, tool.type == "custom")
            for _, namespace, tool in all_functions(call.body.tools or ())
        }
        with_encrypted = "reasoning.encrypted_content" in (call.body.include or ())
        self._output = OutputItems(tools, with_encrypted=with_encrypted)
        self._finish_reason: str | None = None
        self._num_bytes = 0
        """The estimated bytes of all deltas so far. The last events repeat the contents of these deltas."""
        self._detokenizer = self._service.tokenizer.detokenizer(self._service.tokenizer.marker_ids)
        self._num_chars = 0
        """The number of characters in the text of all deltas so far."""
        self._held: Logprobs = []
        """The log probabilities of tokens whose text the reply's reader has not yet returned in a part."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        return num_bytes(deltas, self._body.top_logprobs or 0)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        self.events_of(deltas)
        return self._finish()[1]

    async def events(self) -> AsyncIterator[list[Event]]:
        begun = self._response("in_progress")
        yield [self._output.event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]
        async for events in super().events():
            yield events
        for event in await off_loop(self._num_bytes, self._last_events):
            yield [event]

    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        (delta,) = deltas
        self._num_bytes += self.num_bytes(deltas)
        self._finish_reason = delta.finish_reason
        if self._extras.caching.is_prewarm:
            return []
        events: list[Event] = []
        for piece in self._pieces(delta):
            self._held += self._logprobs(piece)
            for part in self._chat_answer.read(piece).parts:
                events += self._output.add(part, self._held)
                self._held = []
        if delta.finish_reason is not None and self._held and self._output.ends_with_text:  # such as an end token's
            events += self._output.add(Text(""), self._held)
        return events

    def _pieces(self, delta: Delta) -> Iterator[Delta]:
        """Cut a delta into its tokens, so that a log probability stays with its text.

        Without log probabilities, the delta stays whole.
        """
        if not delta.logprobs:
            yield delta
            return
        begins = self._service.tokenizer.offsets(delta.token_ids, self._detokenizer)
        ends = [max(0, begin - self._num_chars) for begin in begins[1:]]
        self._num_chars += len(delta.text)
        begin = 0
        for token_id, of_position, end in zip(delta.token_ids, delta.logprobs, ends, strict=False):
            yield Delta(delta.choice, delta.text[begin:end], [token_id], [of_position], None)
            begin = max(begin, end)
        yield replace(delta, text=delta.text[begin:], token_ids=delta.token_ids[-1:], logprobs=delta.logprobs[-1:])

    def _last_events(self) -> list[Event]:
        """Make the last events. Run it in a thread: events repeat the whole answer three times, which takes time."""
        events, response = self._finish()
        events.append(self._output.event(f"response.{response['status']}", response=response))
        return [(name, to_long_json(data, EVENT_DEPTH.get(name or "", PIECE_DEPTH))) for name, data in events]

    def _finish(self) -> tuple[list[Event], dict[str, Any]]:
        """Finish the response, and keep it unless `store` is false. Returns its last events, and the response."""
        is_prewarm, finish_reason = self._extras.caching.is_prewarm, self._finish_reason
        status = "completed" if finish_reason == "stop" or is_prewarm else "incomplete"
        events = [] if is_prewarm else [*self._output.finish(status)]
        items = self._output.items
        why = finish_reason if finish_reason == "content_filter" else "max_output_tokens"
        response = self._response(
            status,
            output=items,
            usage=self._usage(),
            incomplete_details=None if status == "completed" else {"reason": why},
            completed_at=int(time.time()),
            **self._extras.of(self.answer),
        )
        if self._body.store is not False:
            complete_items = [item for item in items if item["type"] == "message" or item["status"] == "completed"]
            with suppress(APIError):  # an item that the server would refuse as input is not kept
                conversation = continued(self._conversation, _ITEMS.validate_python(complete_items), Breakpoints())
                self._service.kept_responses.keep(self._tenant, conversation, response)
        return events, response

    def _usage(self) -> dict[str, Any]:
        usage = form.response_usage(self.answer, self._service, self._chat_answer.num_reasoning_tokens())
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

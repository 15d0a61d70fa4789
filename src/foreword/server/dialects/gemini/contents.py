"""Reads Google's contents, tools and thinking into a chat, and `generationConfig` into sampling.

A function's result names its call by id or by name. A result that names no waiting call belongs to the oldest waiting
call. A call without an id gets an id from its place in the conversation, so that the next turn renders the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.alias_generators import to_camel

from foreword.engine import Keep
from foreword.pictures import PictureFile
from foreword.request import StructuredOutputsParams
from foreword.server import calls
from foreword.server.api_errors import APIError, UnknownFieldError, bad_request
from foreword.server.chats.chat import Chat, thinking_inputs
from foreword.server.chats.tools import ToolChoice
from foreword.server.dialects.gemini.fields import (
    CachedSource,
    Content,
    ContentPart,
    FunctionDeclaration,
    GenerateContentRequest,
    GenerationConfig,
    GoogleFunctionCall,
    GoogleFunctionResponse,
    GoogleTool,
    GoogleToolConfig,
    ThinkingConfig,
)
from foreword.server.service import ChatMark, Service
from foreword.text.conversation import MARK, PICTURES, Place, earlier_call, function_tool, joined_parts, take_call

_TYPES = frozenset("string number integer boolean array object null".split())
_NUMBERS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
"""Fields with 64-bit numbers, which Google sometimes writes as strings."""
_SAME = frozenset("description title default pattern minimum maximum enum required".split()) | _NUMBERS
_INNER = {"items": False, "anyOf": True, "prefixItems": True}
"""Name of a field that contains schemas -> whether the field is a list of schemas (otherwise it is one schema)."""
_IGNORED = frozenset("format example propertyOrdering nullable".split())
"""Fields without a counterpart in JSON schemas, and fields that are read together with another field."""
JSON, ENUM, TEXT = "application/json", "text/x.enum", "text/plain"
MOST_CALLS = 1024
"""Limit of one turn's calls that wait for their results."""


def json_schema(schema: Any, where: str) -> dict[str, Any]:
    """Convert one of Google's schemas to a JSON schema. Raises APIError 400, with the place, for unknown fields."""
    if not isinstance(schema, Mapping):
        raise bad_request(f"Invalid value for {where}: a schema must be an object", param=where)
    fields = {_spelled(name): value for name, value in schema.items() if value is not None}
    converted: dict[str, Any] = {}
    for name, value in fields.items():
        place = f"{where}.{name}"
        match name:
            case "type":
                converted |= _type(value, place)
            case "properties":
                converted[name] = _properties(value, fields.get("propertyOrdering"), place)
            case "$defs":
                converted[name] = _properties(value, None, place)
            case "$ref":
                converted[name] = value
            case "additionalProperties":
                converted[name] = value if isinstance(value, bool) else json_schema(value, place)
            case _ if name in _INNER:
                converted[name] = _schemas(value, place) if _INNER[name] else json_schema(value, place)
            case _ if name in _SAME:
                converted[name] = int(value) if name in _NUMBERS and _is_count(value) else value
            case _ if name not in _IGNORED:
                message = f"Unrecognized request argument supplied: {place}"
                raise UnknownFieldError(message, param=place, where=(place,), problem="unknown")
    if "properties" in converted:
        converted.setdefault("additionalProperties", False)
    return _or_null(converted) if fields.get("nullable") is True else converted


def _spelled(name: str) -> str:
    return {"ref": "$ref", "defs": "$defs"}.get(name) or (name if name.startswith("$") else to_camel(name))


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) < 20


def _type(value: Any, where: str) -> dict[str, str]:
    kind = value.lower() if isinstance(value, str) else None
    if kind == "type_unspecified":
        return {}
    if kind not in _TYPES:
        kinds = ", ".join(sorted(kind.upper() for kind in _TYPES))
        raise bad_request(f"Invalid value for {where}: {value!r:.60} is not a type; use one of {kinds}", param=where)
    return {"type": kind}


def _properties(value: Any, order: Any, where: str) -> dict[str, Any]:
    """Convert properties, in the order in which answers have them. Properties that `order` leaves out come last."""
    if not isinstance(value, Mapping):
        raise bad_request(f"Invalid value for {where}: it must be an object", param=where)
    first = [name for name in order if isinstance(name, str) and name in value] if isinstance(order, list) else []
    return {name: json_schema(value[name], f"{where}.{name}") for name in dict.fromkeys([*first, *value])}


def _schemas(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise bad_request(f"Invalid value for {where}: it must be a list", param=where)
    return [json_schema(item, f"{where}[{number}]") for number, item in enumerate(value)]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    outside = ("title", "description", "default", "$defs")
    outer: dict[str, Any] = {name: schema.pop(name) for name in outside if name in schema}
    return {**outer, "anyOf": [schema, {"type": "null"}]}


def sampling_of(config: GenerationConfig) -> dict[str, Any]:
    """Return the sampling parameters of a request. Raises APIError 400."""
    if config.logprobs is not None and not config.response_logprobs:
        raise _wrong("logprobs", "is only allowed with responseLogprobs: true")
    return calls.sampling_of(config) | {
        "n": config.candidate_count,
        "max_tokens": config.max_output_tokens,
        "stop": config.stop_sequences,
        "logprobs": (config.logprobs or 0) if config.response_logprobs else None,
    }


def structured_outputs(config: GenerationConfig) -> StructuredOutputsParams | None:
    """Return the structured outputs that a call asks for; None for any text. Raises APIError or InvalidRequestError."""
    schema, plain, kind = config.response_schema, config.response_json_schema, config.response_mime_type or TEXT
    if kind not in (JSON, ENUM, TEXT):
        raise _wrong("responseMimeType", f"is {kind!r}; use {TEXT}, {JSON} or {ENUM}")
    if schema is not None and plain is not None:
        raise _wrong("responseSchema", "and responseJsonSchema cannot be combined; give one of them")
    if schema is not None:
        plain = json_schema(schema, "generationConfig.responseSchema")
    if kind == TEXT:
        if plain is not None:
            raise _wrong("responseMimeType", f"must be {JSON} or {ENUM} where a schema is given")
        return None
    if kind == JSON:
        return StructuredOutputsParams(json_object=True) if plain is None else StructuredOutputsParams(json=plain)
    choices = (plain or {}).get("enum")
    if not isinstance(choices, list):
        raise _wrong("responseSchema", f"must be a schema of the type STRING with an enum for {ENUM}")
    return StructuredOutputsParams(choice=tuple(choices))


def _wrong(name: str, complaint: str) -> APIError:
    return bad_request(f"generationConfig.{name} {complaint}", param=f"generationConfig.{name}")


def template_of(service: Service) -> str:
    """Return the chat template of the served model; "" if it has no template."""
    return (service.llm.tokenizer and service.llm.tokenizer.chat_template) or ""


@dataclass(frozen=True, slots=True)
class CachedBeginning:
    """A cached content at the beginning of a chat."""

    source: CachedSource
    keep: Keep


def read_chat(
    body: GenerateContentRequest, chat_template: str, num_bytes: int, cached: CachedBeginning | None = None
) -> Chat:
    """Return the chat that a request asks for, with a mark that keeps the prompt up to the end of `cached`.

    Raises APIError 400 for fields that make no sense.
    """
    thinking = body.generation_config.thinking_config if body.generation_config is not None else None
    first = body if cached is None else cached.source
    tools, conversation = _tools(first.tools), _Conversation()
    marks: list[ChatMark] = []
    if first.system_instruction is not None and first.system_instruction.parts:
        texts = _texts(first.system_instruction.parts, "systemInstruction")
        conversation.messages.append({"role": "system", "content": joined_parts(texts, "system")})
    if cached is not None:
        conversation.add(cached.source.contents or (), "cachedContent.contents")
    before, messages = len(conversation.messages), conversation.messages
    last_size = _size(messages[-1]) if messages else (0, 0)
    conversation.add(body.contents, "contents")
    if cached is not None:  # the cached content may end inside an answer, which the request continues
        is_whole = before > 0 and _size(messages[before - 1]) == last_size
        marks.append(ChatMark(Place(max(0, before - 1), None if is_whole else last_size[0]), cached.keep))
    return Chat(
        conversation.messages,
        tools,
        _tool_choice(first.tool_config, [tool["function"]["name"] for tool in tools]),
        {} if thinking is None else _thinking_inputs(thinking, chat_template),
        num_bytes=num_bytes,
        marks=marks,
        thinking_budget=None if thinking is None or (thinking.thinking_budget or 0) < 1 else thinking.thinking_budget,
    )


# ------------------------------------------------------------------- messages


def _size(message: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of characters of a message, and the number of its calls."""
    return len(message["content"]), len(message.get("tool_calls", ()))


@dataclass(slots=True)
class _Conversation:
    """The messages so far, and the calls that wait for their results."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0

    def add(self, contents: Sequence[Content], name: str) -> None:
        """Add contents. Raises APIError 400."""
        for number, content in enumerate(contents):
            where = f"{name}[{number}]"
            if not content.parts:
                raise bad_request(f"{where}.parts must not be empty", param=f"{where}.parts")
            match content.role:
                case "model":
                    self._add_answer(content.parts, where)
                case None | "" | "user" | "function":
                    self._add_question(content.parts, where)
                case _:
                    message = f"{where}.role is not valid; use a valid role: user, model"
                    raise bad_request(message, param=f"{where}.role")

    def _add_answer(self, parts: Sequence[ContentPart], where: str) -> None:
        """Add parts of the model. Successive contents of the model become one answer, because clients keep each chunk
        of a stream as a content of its own.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self.waiting = []
        message = self.messages[-1]
        if any(part.inline_data is not None for part in parts):
            raise bad_request(f"{where} is the model's; it has no pictures", param=where)
        for number, part in enumerate(parts):
            match _value_of(part, f"{where}.parts[{number}]"):
                case str() as text:
                    name = "reasoning_content" if part.thought else "content"
                    whole, message[name] = message.get(name, ""), ""  # one reference, so that += copies nothing
                    whole += text
                    message[name] = whole
                case GoogleFunctionCall() as call:
                    message.setdefault("tool_calls", []).append(self._call(call))
                case GoogleFunctionResponse():
                    raise bad_request(f"{where} is the model's; it has calls, not their results", param=where)

    def _call(self, call: GoogleFunctionCall) -> dict[str, Any]:
        earlier = earlier_call(call.id or f"call{self.num_calls:05d}", call.name, call.args or {})
        self.num_calls += 1
        if len(self.waiting) == MOST_CALLS:
            raise bad_request(f"a turn has more than {MOST_CALLS} calls; send fewer", param="contents")
        self.waiting.append(earlier)
        return earlier

    def _add_question(self, parts: Sequence[ContentPart], where: str) -> None:
        """Add the user's texts and pictures, and the results of calls."""
        texts: list[str] = []
        files: list[PictureFile] = []
        for number, part in enumerate(parts):
            place = f"{where}.parts[{number}]"
            if part.inline_data is not None:
                files.append(part.inline_data.file(place))
            match _value_of(part, place):
                case str() as more:
                    texts.append(more)
                case GoogleFunctionResponse() as result:
                    if texts:
                        self._say(texts, files)
                        texts, files = [], []
                    self.messages.append(self._result(result, place))
                case GoogleFunctionCall():
                    raise bad_request(f"{where} is the user's; it has results of calls, not calls", param=place)
        if texts:
            self._say(texts, files)

    def _say(self, texts: Sequence[str], files: Sequence[PictureFile]) -> None:
        pictures = {PICTURES: files} if files else {}
        self.messages.append({"role": "user", "content": joined_parts(texts, "user"), **pictures})

    def _result(self, result: GoogleFunctionResponse, where: str) -> dict[str, Any]:
        """Return the message of a result. It belongs to the waiting call with the result's id, or else to the first
        with the result's name, or else to the first waiting call.
        """
        call = take_call(self.waiting, result.id, result.name, any_name=True)
        if call is None:
            message = (
                f"{where} is the result of {result.name!r}, but no call before it waits for one; send the call too"
            )
            raise bad_request(message, param=where)
        content = json.dumps(result.response or {}, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": call["id"], "name": result.name, "content": content}


def _value_of(part: ContentPart, where: str) -> str | GoogleFunctionCall | GoogleFunctionResponse | None:
    """Return the value of a part; None if it has only a signature, which has no meaning here."""
    picture = None if part.inline_data is None else MARK
    values = [value for value in (part.text, picture, part.function_call, part.function_response) if value is not None]
    if len(values) > 1 or (not values and part.thought_signature is None):
        raise bad_request(
            f"{where} must have exactly one of text, inlineData, functionCall and functionResponse, and has "
            f"{len(values)}",
            param=where,
        )
    return values[0] if values else None


def _texts(parts: Sequence[ContentPart], where: str) -> list[str]:
    values = [_value_of(part, f"{where}.parts[{number}]") for number, part in enumerate(parts)]
    texts = [value for value in values if isinstance(value, str) and value != MARK]
    if len(texts) < len(values):
        raise bad_request(f"{where} takes texts only", param=where)
    return texts


# ---------------------------------------------------------------------- tools


def _tools(tools: Sequence[GoogleTool] | None) -> list[dict[str, Any]]:
    """Convert tools to the form for chat templates."""
    return [
        _tool(declaration, f"tools[{number}].functionDeclarations[{at}]")
        for number, tool in enumerate(tools or ())
        for at, declaration in enumerate(tool.function_declarations or ())
    ]


def _tool(declaration: FunctionDeclaration, where: str) -> dict[str, Any]:
    schema, plain = declaration.parameters, declaration.parameters_json_schema
    if schema is not None and plain is not None:
        raise bad_request(f"{where} has parameters and parametersJsonSchema; give one of them", param=where)
    if schema is not None:
        plain = json_schema(schema, f"{where}.parameters")
    return function_tool(declaration.name, declaration.description, plain or {"type": "object", "properties": {}})


def _tool_choice(tool_config: GoogleToolConfig | None, function_names: Sequence[str]) -> ToolChoice:
    config = tool_config.function_calling_config if tool_config is not None else None
    where = "toolConfig.functionCallingConfig"
    if config is None:
        return ToolChoice()
    names = config.allowed_function_names
    if names and config.mode != "ANY":
        param = f"{where}.allowedFunctionNames"
        raise bad_request("allowedFunctionNames is only allowed with the mode ANY", param=param)
    missing = next((name for name in names or () if name not in function_names), None)
    if missing is not None:
        message = f"allowedFunctionNames has {missing!r}, which is not among the functionDeclarations"
        raise bad_request(message, param=f"{where}.allowedFunctionNames")
    if config.mode == "ANY" and not function_names:
        raise bad_request("the mode ANY is only allowed with functionDeclarations", param=f"{where}.mode")
    if config.mode == "ANY":
        return ToolChoice("required", tuple(names) if names else None)
    return ToolChoice("none" if config.mode == "NONE" else "auto")


# ------------------------------------------------------------------- thinking


def _thinking_inputs(config: ThinkingConfig, chat_template: str) -> dict[str, Any]:
    """Return the template's inputs that switch thinking. Inputs that the template does not mention are left out."""
    budget, level = config.thinking_budget, config.thinking_level
    level = None if level == "THINKING_LEVEL_UNSPECIFIED" else level
    if budget is not None and level is not None:
        where = "generationConfig.thinkingConfig"
        raise bad_request("thinkingBudget and thinkingLevel cannot be combined; give one of them", param=where)
    enabled = None if budget is None and level is None else budget != 0 and level != "MINIMAL"
    effort = None if level is None else "low" if level == "MINIMAL" else level.lower()
    return thinking_inputs(chat_template, enabled=enabled, effort=effort)

"""The fields of /v1/responses: items of its input, tools, and the request itself.

Clients send the items of an earlier answer back whole, so their unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from foreword.server.bodies.fields import Body, Identifier, Part, Positive, TemplateInputs, Unsupported, Word
from foreword.server.dialects.openai.fields import (
    AnyCall,
    ContentPart,
    ResponseCacheOptions,
    StreamOptions,
    ToolName,
    Unmarkable,
)

Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class InputMessage(Unmarkable):
    """A message, or the text of an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(Unmarkable):
    """A call in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Unmarkable):
    """A call of a custom tool in an earlier response; its input is any text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CallOutputItem(Unmarkable):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningText(Part):
    """A piece of reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Unmarkable):
    """The reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class OtherItem(Unmarkable):
    """An item of another type, which is refused by its name."""

    type: str


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None) or "message"
    return kind if kind in _ITEM_KINDS else "other"


_ITEM_KINDS = "message function_call custom_tool_call function_call_output custom_tool_call_output reasoning".split()

Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of_item),
]


class ResponseTool(Unmarkable):
    """One of `tools`: a function, a custom tool, whose input is any text, or a namespace of functions."""

    type: Word
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None


class AllowedTool(Part):
    """A tool that a `tool_choice` names."""

    type: Literal["function", "custom"]
    name: ToolName


class ResponseToolChoice(Part):
    """`tool_choice` that names one tool, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    name: ToolName | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(max_length=128)] | None = None


class TextFormat(Body):
    """`text.format` of a response, whose schema is a field beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text` of a response."""

    format: TextFormat | None = None
    verbosity: Word | None = None


class ReasoningOptions(Part):
    """`reasoning` of a response; only its effort is used."""

    effort: Word | None = None


class ResponsesRequest(AnyCall):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: Identifier | None = None
    store: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: ReasoningOptions | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    background: bool | None = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    chat_template_kwargs: TemplateInputs | None = None
    # Accepted, without effect here.
    client_metadata: dict[str, Any] | None = None

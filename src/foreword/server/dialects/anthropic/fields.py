"""The requests of Anthropic's API as pydantic models.

Clients send whole blocks of earlier answers back, so a field of a block counts as absent if it is null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from foreword.pictures import PictureFile, file_of_base64, file_of_url
from foreword.server.bodies.fields import Body, Count, Priority, Salt, SessionId, Unsupported, Word
from foreword.text.conversation import MARK

MIN_THINKING_TOKENS = 1024

Id = Annotated[str, Field(min_length=1, max_length=256)]
Opaque = Annotated[str, Field(max_length=4096)]
"""A string that has no effect here."""


StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class CacheControl(Body):
    """`cache_control`: the end of a prefix that the client wants kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Word | None = None


class _Block(Body):
    """A part of a body. Its fields count as absent if they are null."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextBlock(_Block):
    """Text of a message, a system prompt or a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None
    parsed_output: Any = None

    @model_validator(mode="after")
    def _has_text_to_keep(self) -> TextBlock:
        if self.cache_control is not None and not self.text:
            raise PydanticCustomError("empty_text", "cache_control cannot be set for empty text blocks")
        return self


class ImageSource(_Block):
    """The bytes of a picture, or the picture's URL."""

    type: Literal["base64", "url"]
    media_type: Opaque | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(_Block):
    """A picture."""

    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return MARK

    def file(self) -> PictureFile:
        """Return the picture's file. Raises InvalidRequestError."""
        source = self.source
        return file_of_url(source.url) if source.type == "url" else file_of_base64(source.data or "")


ShownBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class DirectCaller(Body):
    """`caller` of a call that the model itself made."""

    type: Literal["direct"]


class ToolUseBlock(_Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ThinkingBlock(_Block):
    """Reasoning in an earlier answer. Its signature is not checked, because reasoning is not secret here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Reasoning that another server has encrypted."""

    type: Literal["redacted_thinking"]
    data: str


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[
    list[TextBlock], Field(fail_fast=True), BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]
"""A string or blocks of text. A string is converted to a block."""


Shown = Annotated[
    list[ShownBlock], Field(fail_fast=True), BeforeValidator(_as_blocks, json_schema_input_type=str | list[ShownBlock])
]
"""A string, or blocks of text and pictures."""


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Shown | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


AnyBlock = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[
    list[AnyBlock], Field(fail_fast=True), BeforeValidator(_as_blocks, json_schema_input_type=str | list[AnyBlock])
]


class Message(Body):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def _custom(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise PydanticCustomError("server_tool", "'{kind}' is not supported by this server", {"kind": kind})
    return kind


class Tool(_Block):
    """One of `tools`: a function of the client."""

    type: Annotated[Word | None, AfterValidator(_custom)] = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    # Accepted, but without effect.
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Word] | None = None


class ToolChoice(_Block):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Id | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Block):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_TOKENS, le=2**31 - 1)] | None = None
    display: Word | None = None


class OutputFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Block):
    """`output_config`."""

    effort: Word | None = None
    format: OutputFormat | None = None


class RequestMetadata(_Block):
    """`metadata`, in which Claude Code names its session."""

    user_id: Opaque | None = None


class Diagnostics(Body):
    """`diagnostics`."""

    previous_message_id: Id | None = None


class ContextManagement(_Block):
    """`context_management`. `endpoints.py` checks the edits, and accepts only edits that can have no effect here."""

    edits: Annotated[list[dict[str, Any]], Field(max_length=16)] | None = None


class _Conversation(Body):
    """Fields of calls about a conversation."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The name of `output_config.format` in older clients."""
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    # Accepted, but without effect.
    speed: Literal["standard"] | None = None
    user_profile_id: Opaque | None = None
    workspace_id: Opaque | None = None
    mcp_servers: Unsupported = None
    compaction: Unsupported = None
    billing_policy: Unsupported = None


class CreateMessageRequest(_Conversation):
    """POST /v1/messages."""

    max_tokens: Count
    """0: compute and keep the prompt, and answer nothing."""
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], Field(max_length=128)] | None = None
    diagnostics: Diagnostics | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    metadata: RequestMetadata | None = None
    # Fields of foreword itself.
    session_id: SessionId | None = None
    seed: int | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    # Accepted, but without effect.
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Opaque | None = None
    container: Unsupported = None
    fallbacks: Unsupported = None
    fallback_credit_token: Unsupported = None
    thread: Any = None

    @property
    def stop(self) -> list[str] | None:
        """The stop strings, under the name that all dialects share."""
        return self.stop_sequences


class CountMessageTokensRequest(_Conversation):
    """POST /v1/messages/count_tokens."""

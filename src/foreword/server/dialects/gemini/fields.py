"""The paths of Google's Gemini API, and its requests as pydantic models.

Each field has two spellings, camelCase and snake_case, as in all JSON that Google's services read. Google's own client
mixes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import APIRouter
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from foreword.errors import InvalidRequestError
from foreword.pictures import PictureFile, file_of_base64
from foreword.server.api_errors import bad_request
from foreword.server.bodies.fields import (
    Body,
    Identifier,
    Penalty,
    Positive,
    Priority,
    Probability,
    Salt,
    SessionId,
    Unsupported,
    Whole,
    Word,
)

VERSIONS = ("v1", "v1beta", "v1alpha")
PAGE_SIZE, MAX_PAGE_SIZE = 50, 1000

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def served(router: APIRouter, method: str, path: str) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that makes a function an endpoint in all versions."""

    def add(function: Endpoint) -> Endpoint:
        for version in VERSIONS:
            router.add_api_route(f"/{version}/{path}", function, methods=[method])
        return function

    return add


def page_size(query: Mapping[str, str]) -> int:
    """Return the number of items that a list's page may have."""
    return min(number_in(query, "pageSize") or PAGE_SIZE, MAX_PAGE_SIZE)


def number_in(query: Mapping[str, str], name: str) -> int:
    """Read a number in a query; 0 if it is missing. Raises APIError 400."""
    text = query.get(name, "") or "0"
    if not text.isdecimal() or len(text) > 9:
        raise bad_request(f"{name}={text!r:.60} is not valid; send a number, or leave it out", param=name)
    return int(text)


def _listed(value: Any) -> Any:
    """If a field needs a list and gets an object, put the object into a list. Google's API accepts such fields too."""
    return [value] if isinstance(value, dict) else value


Listed = BeforeValidator(_listed)
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}$")]


class GoogleBody(Body):
    """A body, or a part of a body. Its fields have two spellings."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        name = self.asks_for_unsupported()
        if name is not None:
            message = "{name} is not supported by this server; leave it out"
            raise PydanticCustomError("unsupported", message, {"name": to_camel(name)})
        return self


class GoogleFunctionCall(GoogleBody):
    """`functionCall`: a call in an earlier answer."""

    id: Identifier | None = None
    name: FunctionName
    args: dict[str, Any] | None = None
    partial_args: Unsupported = None
    will_continue: Unsupported = None


class GoogleFunctionResponse(GoogleBody):
    """`functionResponse`: the result of a call."""

    id: Identifier | None = None
    name: FunctionName
    response: dict[str, Any] | None = None
    parts: Unsupported = None
    scheduling: Unsupported = None
    will_continue: Unsupported = None


class InlineData(GoogleBody):
    """`inlineData`: the bytes of a picture."""

    mime_type: Word
    data: str
    display_name: Word | None = None

    def file(self, where: str) -> PictureFile:
        """Return the picture's file. Raises InvalidRequestError."""
        if not self.mime_type.lower().startswith("image/"):
            raise InvalidRequestError(
                f"{where}.inlineData is of the type {self.mime_type!r}; this server takes pictures (image/png) and text"
            )
        return file_of_base64(self.data.replace("-", "+").replace("_", "/"))


class ContentPart(GoogleBody):
    """A part of a content: a text, a picture, a call or a call's result."""

    text: str | None = None
    function_call: GoogleFunctionCall | None = None
    function_response: GoogleFunctionResponse | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    part_metadata: dict[str, Any] | None = None
    inline_data: InlineData | None = None
    file_data: Unsupported = None
    executable_code: Unsupported = None
    code_execution_result: Unsupported = None
    tool_call: Unsupported = None
    tool_response: Unsupported = None
    audio_transcription: Unsupported = None
    video_metadata: Unsupported = None
    media_resolution: Unsupported = None


class Content(GoogleBody):
    """One of `contents`, or the system instruction."""

    role: Word | None = None
    parts: Annotated[Annotated[list[ContentPart], Field(fail_fast=True)], Listed] | None = None


class FunctionDeclaration(GoogleBody):
    """A function that the model may call. The schema of its result is not part of the prompt."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    response_json_schema: Any | None = None
    behavior: Literal["UNSPECIFIED", "BLOCKING"] | None = None


class GoogleTool(GoogleBody):
    """One of `tools`: functions, or one of Google's own tools."""

    function_declarations: (
        Annotated[Annotated[list[FunctionDeclaration], Field(max_length=128, fail_fast=True)], Listed] | None
    ) = None
    google_search: Unsupported = None
    google_search_retrieval: Unsupported = None
    google_maps: Unsupported = None
    code_execution: Unsupported = None
    url_context: Unsupported = None
    file_search: Unsupported = None
    computer_use: Unsupported = None
    mcp_servers: Unsupported = None

    def asks_for_unsupported(self) -> str | None:
        """Return the first of Google's own tools that the call asks for (even by an empty object), or None."""
        return next((name for name in self.UNSUPPORTED if getattr(self, name) is not None), None)


class FunctionCallingConfig(GoogleBody):
    """`toolConfig.functionCallingConfig`."""

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE"] | None = None
    allowed_function_names: Annotated[list[FunctionName], Field(max_length=128)] | None = None
    stream_function_call_arguments: Unsupported = None


class GoogleToolConfig(GoogleBody):
    """`toolConfig`."""

    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Unsupported = None
    include_server_side_tool_invocations: Unsupported = None


class ThinkingConfig(GoogleBody):
    """`generationConfig.thinkingConfig`."""

    include_thoughts: bool | None = None
    thinking_budget: Annotated[int, Whole, Field(ge=-1, le=2**31 - 1)] | None = None
    thinking_level: Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH"] | None = None


class GenerationConfig(GoogleBody):
    """`generationConfig`."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Whole, Field(ge=0, le=2**31 - 1)] | None = None
    candidate_count: Annotated[Positive, Whole] | None = None
    max_output_tokens: Annotated[Positive, Whole] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Whole, Field(ge=0, le=20)] | None = None
    response_mime_type: Word | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[Literal["TEXT", "text", "MODALITY_UNSPECIFIED"]] | None = None
    thinking_config: ThinkingConfig | None = None
    speech_config: Unsupported = None
    image_config: Unsupported = None
    media_resolution: Unsupported = None
    audio_transcription_config: Unsupported = None
    translation_config: Unsupported = None
    response_format: Unsupported = None
    enable_enhanced_civic_answers: Unsupported = None
    enable_affective_dialog: Unsupported = None


Contents = Annotated[Annotated[list[Content], Field(min_length=1, fail_fast=True)], Listed]
Tools = Annotated[Annotated[list[GoogleTool], Field(max_length=128, fail_fast=True)], Listed]


class GenerateContentRequest(GoogleBody):
    """POST /v1/models/NAME:generateContent and :streamGenerateContent."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    contents: Contents
    system_instruction: Content | None = None
    tools: Tools | None = None
    tool_config: GoogleToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: Annotated[str, Field(max_length=1024)] | None = None
    store: Unsupported = None
    continuation_token: Unsupported = None
    # Accepted, but without effect.
    safety_settings: list[dict[str, Any]] | None = None
    labels: dict[str, str] | None = None
    service_tier: Word | None = None
    # Fields of foreword itself.
    session_id: SessionId | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class CachedSource(GoogleBody):
    """The beginning of a conversation, which a cached content holds."""

    contents: Contents | None = None
    system_instruction: Content | None = None
    tools: Tools | None = None
    tool_config: GoogleToolConfig | None = None


class CreateCachedContentRequest(CachedSource):
    """POST /v1/cachedContents."""

    model: Annotated[str, Field(max_length=1024)]
    display_name: Annotated[str, Field(max_length=128)] | None = None
    ttl: Word | None = None
    expire_time: Word | None = None
    name: Unsupported = None
    kms_key_name: Unsupported = None
    # Fields of foreword itself.
    cache_salt: Salt | None = None
    priority: Priority | None = None


class UpdateCachedContentRequest(GoogleBody):
    """PATCH /v1/cachedContents/ID: the fields of a cached content. Only the time at which it ends can change."""

    ttl: Word | None = None
    expire_time: Word | None = None
    name: Any | None = None
    model: Any | None = None
    display_name: Any | None = None
    contents: Any | None = None
    system_instruction: Any | None = None
    tools: Any | None = None
    tool_config: Any | None = None
    create_time: Any | None = None
    update_time: Any | None = None
    usage_metadata: Any | None = None


class CountTokensRequest(GoogleBody):
    """POST /v1/models/NAME:countTokens: contents alone, or a whole request."""

    contents: Contents | None = None
    generate_content_request: GenerateContentRequest | None = None

"""The requests of OpenAI's dialect, and our own beside them, as pydantic models.

Knows field names, types and ranges; knows nothing of tokens. A field that we do not know is an error, so that a
typing mistake is not taken for a default. Fields that ask for what this engine cannot do are known, and refused
by name (`UNSUPPORTED`); those that change nothing in an answer are taken and left alone.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()

    def asks_for_unsupported(self) -> str | None:
        """Name of a field that asks for what cannot be done; None if there is none."""
        return next((name for name in self.UNSUPPORTED if getattr(self, name) not in (None, [], {}, "none")), None)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ForewordOptions(_Body):
    """Our own wishes beside OpenAI's."""

    cache: bool = False
    """Have the response say what the cache held of the prompt, and why not more."""


class JsonSchema(_Body):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """`response_format` of chat and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Call(_Body):
    """What every call that generates may ask for."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    # Of OpenAI's caching.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Taken, and without effect here.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # Ours, and vLLM's.
    foreword: ForewordOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    skip_reading_prefix_cache: bool | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None


class _ChoicesCall(_Call):
    """What chat and completions have in common."""

    n: Positive | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None


class TextPart(BaseModel):
    """A piece of a message's content. Cache breakpoints of other dialects may stand in it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "input_text", "output_text"]
    text: str


class ChatMessage(BaseModel):
    """A message; fields of OpenAI's answers that carry nothing here may stand in it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class ChatRequest(_ChoicesCall):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any | None = None
    functions: list[Any] | None = None
    function_call: Any | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    UNSUPPORTED = ("tools", "functions", "audio", "web_search_options")


class CompletionRequest(_ChoicesCall):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None

    UNSUPPORTED = ("suffix",)


class InputMessage(BaseModel):
    """An item of a response's input: a message, or an earlier response's output."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class TextFormat(_Body):
    """`text.format` of a response: the schema stands beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(_Body):
    """`text` of a response."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(_Call):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    tool_choice: Any | None = None
    tools: list[Any] | None = None
    background: bool | None = None
    conversation: Any | None = None
    prompt: dict[str, Any] | None = None

    UNSUPPORTED = ("tools", "conversation", "prompt")


class TokenizeRequest(_Body):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class ExplainRequest(_Body):
    """POST /v1/cache/explain: a text, token ids or a conversation."""

    model: str | None = None
    prompt: str | Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

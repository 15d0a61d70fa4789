"""The dialect: the requests of OpenAI's API, and of our endpoints, as pydantic models.

Knows field names, types and ranges; knows nothing of tokens. An unknown field is an error, so that a typing mistake is
not taken for a default. Fields for features that this engine lacks are known and refused by name (`UNSUPPORTED`);
fields that do not affect the answer are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Identifier = Annotated[str, Field(max_length=64)]
"""A string of at most 64 characters, as OpenAI allows."""
Word = Annotated[str, Field(max_length=64)]
"""A name of one of a few choices."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
TemplateInputs = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=512)] | None],
    Field(max_length=16),
]
"""Inputs of a chat template besides the messages, such as {"enable_thinking": false}."""
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _read_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a long list of token ids: milliseconds for a million ids, where pydantic would look at each one."""
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return check(value[:1] if isinstance(value, list) else value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(f"token ids are numbers of 0 to {MAX_TOKEN_ID}")
    return value


TokenIds = Annotated[list[TokenId], WrapValidator(_read_token_ids)]
SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()

    def asks_for_unsupported(self) -> str | None:
        """Name of the first field that asks for an unsupported feature; None if there is none."""
        return next((name for name in self.UNSUPPORTED if getattr(self, name) not in (None, [], {}, "none")), None)


class _Part(BaseModel):
    """A part of a body whose unknown fields are ignored: clients send earlier answers back as they got them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ForewordOptions(_Body):
    """Options that OpenAI's API does not have."""

    cache: bool = False
    """Report in the response which part of the prompt was cached, and why not more."""


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


BadWord = Annotated[str, Field(min_length=1, max_length=64)]


class StructuredOutputs(_Body):
    """vLLM's `structured_outputs`: one of these fields."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Call(_Body):
    """Fields of every call that generates."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    # OpenAI's caching.
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Accepted, without effect here.
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Identifier | None = None
    metadata: Metadata | None = None
    service_tier: Word | None = None
    # Ours, and vLLM's.
    foreword: ForewordOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    skip_reading_prefix_cache: bool | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class _ChoicesCall(_Call):
    """Fields that chat and completions share."""

    n: Positive | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None


class TextPart(_Part):
    """A piece of a message's content. Cache breakpoints of other APIs are ignored."""

    type: Literal["text", "input_text", "output_text"]
    text: str


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolFunction(_Body):
    """`tools[].function`."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """One of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(_Body):
    """`tool_choice.function`."""

    name: ToolName


class NamedToolChoice(_Body):
    """`tool_choice` that names one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Part):
    """`tool_calls[].function` in an earlier answer."""

    name: str
    arguments: str


class EarlierCall(_Part):
    """One of `tool_calls` in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Part):
    """A message; fields of OpenAI's answers that mean nothing here are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class ChatRequest(_ChoicesCall):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Word | None = None
    verbosity: Word | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    functions: list[Any] | None = None
    function_call: Any | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateInputs | None = None
    thinking_budget: Count | None = None

    UNSUPPORTED = ("functions", "audio", "web_search_options")


class CompletionRequest(_ChoicesCall):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | SomeTokenIds
        | Annotated[list[SomeTokenIds], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None

    UNSUPPORTED = ("suffix",)


class InputMessage(_Part):
    """An item of a response's input: a message, or the output of an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


class TextFormat(_Body):
    """`text.format` of a response, whose schema is a field beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(_Body):
    """`text` of a response."""

    format: TextFormat | None = None
    verbosity: Word | None = None


class Reasoning(_Part):
    """`reasoning` of a response; only its effort is used."""

    effort: Word | None = None


class ResponsesRequest(_Call):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: Identifier | None = None
    store: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    tool_choice: Any | None = None
    tools: list[Any] | None = None
    background: bool | None = None
    conversation: Any | None = None
    prompt: dict[str, Any] | None = None

    UNSUPPORTED = ("tools", "conversation", "prompt")


class _PromptOrMessages(_Body):
    """Fields of calls that ask about a text or a conversation without running it."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateInputs | None = None
    reasoning_effort: Word | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None


class TokenizeRequest(_PromptOrMessages):
    """POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    return_token_strs: bool = False


class ExplainRequest(_PromptOrMessages):
    """POST /v1/cache/explain: a text, token ids or a conversation."""

    prompt: str | SomeTokenIds | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

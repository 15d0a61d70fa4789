"""The requests of OpenAI's API, and of foreword's own endpoints, as pydantic models.

Fields that do not affect the answer are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from foreword.pictures import PictureFile, file_of_url
from foreword.server.bodies.fields import (
    Body,
    Count,
    Identifier,
    Metadata,
    Part,
    Penalty,
    Positive,
    Priority,
    Probability,
    Salt,
    SessionId,
    SomeTokenIds,
    TemplateInputs,
    TokenId,
    TokenIds,
    Unsupported,
    Word,
)
from foreword.server.hints import KvHints
from foreword.text.conversation import MARK, PICTURES

Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[SomeTokenIds], Field(min_length=1, fail_fast=True)]
Link = Annotated[str, Field(max_length=32)]


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """An option of vLLM. If `include_usage` is set too, every chunk reports the usage so far."""
    include_obfuscation: bool | None = None


class CertificateOptions(Body):
    """Options of calls that read logits. They extend OpenAI's API."""

    certificate: bool = False
    """Whether to report digests of the read logits, the weights and the arithmetic. Needs log probabilities."""


class ForewordOptions(CertificateOptions):
    """Options that extend OpenAI's API."""

    cache: bool = False
    """Whether the response reports which part of the prompt was cached, and why the rest was not."""


class JsonSchema(Body):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format` of chat and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


CacheTtl = Literal["30m", "12h"]


class Breakpoint(Body):
    """`prompt_cache_breakpoint` of a content part."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class CacheOptions(Body):
    """`prompt_cache_options`. In OpenAI's own API, only responses have `comparison_response_id`."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheTtl | None = None
    comparison_response_id: str | None = None


class ShortCacheOptions(CacheOptions):
    """`prompt_cache_options` of chat and completions."""

    ttl: Literal["30m"] | None = None


class ResponseCacheOptions(CacheOptions):
    """`prompt_cache_options` of responses."""

    prewarm: bool | None = None


BadWord = Annotated[str, Field(min_length=1, max_length=64)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`. A call sets one of these fields."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class AnyCall(Body):
    """Fields of every call that generates."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    # OpenAI's caching.
    prompt_cache_key: Identifier | None = None
    prompt_cache_options: CacheOptions | None = None
    # Accepted, but without effect.
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Identifier | None = None
    metadata: Metadata | None = None
    service_tier: Word | None = None
    # Fields of foreword and of vLLM.
    foreword: ForewordOptions | None = None
    session_id: SessionId | None = None
    kv_hints: KvHints | None = None
    cache_salt: Salt | None = None
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
    priority: Priority | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class _ChoicesCall(AnyCall):
    """Fields that chat and completions share."""

    prompt_cache_options: ShortCacheOptions | None = None
    n: Positive | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None


class TextPart(Part):
    """A text in a message's content. Cache marks of other APIs, such as `cache_control`, are ignored."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: Any = None
    """A `Breakpoint`. It is checked in caching.py, where the part's place in the prompt is known."""


class Unmarkable(Part):
    """A part that cannot have a breakpoint. A request with a breakpoint here is refused."""

    prompt_cache_breakpoint: Any = None


class ImageUrl(Part):
    """`image_url` of a part. A `detail` is ignored, because the model decides about it."""

    url: str


class ImagePart(Unmarkable):
    """A picture in a message's content."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str

    @property
    def text(self) -> str:
        return MARK

    def file(self) -> PictureFile:
        """Return the picture's file. Raises InvalidRequestError."""
        return file_of_url(self.image_url if isinstance(self.image_url, str) else self.image_url.url)


def _read_part(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Read a part by its type, so that errors name only the fields of that type."""
    is_image = isinstance(value, dict) and value.get("type") in ("image_url", "input_image")
    return ImagePart.model_validate(value) if is_image else check(value)


ContentPart = Annotated[TextPart, WrapValidator(_read_part, json_schema_input_type=TextPart | ImagePart)]
"""A `TextPart` or an `ImagePart`."""


def pictures_in(content: str | Sequence[TextPart] | None) -> dict[str, list[PictureFile]]:
    """Return a content's pictures as a field of a message; empty without pictures. Raises InvalidRequestError."""
    parts: Sequence[TextPart | ImagePart] = () if content is None or isinstance(content, str) else content
    files = [part.file() for part in parts if isinstance(part, ImagePart)]
    return {PICTURES: files} if files else {}


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolFunction(Body):
    """`tools[].function`."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(Body):
    """`tool_choice.function`."""

    name: ToolName


class NamedToolChoice(Body):
    """`tool_choice` that names one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Part):
    """`tool_calls[].function` in an earlier answer."""

    name: str
    arguments: str


class EarlierCall(Unmarkable):
    """One of `tool_calls` in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Unmarkable):
    """A message. Unknown fields are ignored, because clients send OpenAI's answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class PredictedText(Part):
    """A part of `prediction.content`."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """`prediction`: the probable text of the answer. It affects only the speed."""

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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
    functions: Unsupported = None
    function_call: Any | None = None
    audio: Unsupported = None
    prediction: Prediction | None = None
    web_search_options: Unsupported = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateInputs | None = None
    thinking_budget: Count | None = None
    link: Link | None = Field(
        None,
        description="Method that copies the KV of the tokens after an edit from an earlier prompt of the session, such "
        "as first-16. The answer is then approximate, and names the method in `approximate`. Without this field it is "
        "exact. The server must allow links (--allow-links), with measurements of edits (`foreword pml measure --tasks "
        "independent,parameters,edit`).",
    )


class TextCall(_ChoicesCall):
    """Fields of calls that continue a text."""

    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    score_from: Count | None = None
    """Position of the first prompt token that gets a log probability. Needs `echo` and `logprobs`."""
    best_of: Positive | None = None
    suffix: Unsupported = None


class PromptEmbeds(Body):
    """Embeddings in place of a prompt's first tokens: raw little-endian values, or a safetensors file, in base64."""

    data: str | None = None
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(min_length=2, max_length=2)] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    safetensors: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError(
                "prompt_embeds",
                'send {"data": base64 of little-endian values, "shape": [tokens, hidden size], "dtype": "float32"}, '
                'or {"safetensors": base64 of a file of one tensor}; files of torch.save are refused',
            )
        return value


class CompletionRequest(TextCall):
    """POST /v1/completions."""

    HOLDS = "prompts"

    prompt_embeds: PromptEmbeds | None = None

    prompt: str | Texts | SomeTokenIds | TokenIdLists


class _ScoringCall(Body):
    """Fields of calls that read several prompts and generate no text."""

    HOLDS = "prompts"

    model: str | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class EmbeddingsRequest(_ScoringCall):
    """POST /v1/embeddings."""

    input: str | Texts | SomeTokenIds | TokenIdLists
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None


class LabelCall(_ScoringCall):
    """Fields of calls that read the logits of a few tokens after each of several prompts."""

    foreword: CertificateOptions | None = None


class ScoreRequest(LabelCall):
    """POST /v1/score."""

    query: str | SomeTokenIds
    items: str | Texts | TokenIdLists
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=128)]
    apply_softmax: bool | None = None
    """Whether the scores of an item add up to 1. Otherwise each score is a label's probability among all tokens."""
    item_first: bool | None = None
    """Whether the item stands before the query."""


class RankedDocument(Part):
    """A document of /v1/rerank as an object."""

    text: str


class RerankRequest(LabelCall):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | RankedDocument], Field(min_length=1, fail_fast=True)]
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    """Replaces the score template's instruction."""


class ClassifyRequest(LabelCall):
    """POST /v1/classify."""

    input: str | Texts
    use_activation: bool | None = None
    """False: `probs` are the labels' log probabilities."""
    instruction: str | None = None
    """Replaces the classify template's instruction."""


class ModulesRequest(TextCall):
    """POST /v1/pml/completions, /v1/pml/explain: a prompt made from a schema's modules, or from documents."""

    HOLDS = "tokens"

    schema_name: Annotated[str, Field(max_length=256)] | None = Field(
        None, alias="schema", description="Name of a schema of /v1/pml/schemas; documents need none."
    )
    prompt: str | None = Field(None, description="A prompt of the schema as PML, in place of the next three fields.")
    modules: dict[str, Any] | None = Field(
        None, description="The arguments and nested modules of each module, by its name."
    )
    text: str | None = Field(None, description="Text after the modules.")
    messages: dict[Word, str] | None = Field(None, description="Texts of messages by role, after the modules.")
    positions: Word = Field("schema", description="How the schema's parts get positions: schema, shift or dense.")
    trailing: Word = Field(
        "last",
        description="Where text after the last module begins: after the last part (last) or the schema (schema).",
    )
    documents: Annotated[list[str | SomeTokenIds], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Texts, or lists of token ids, that can be linked in any order, in place of a schema."
    )
    question: str | SomeTokenIds | None = Field(None, description="What follows the documents.")
    instructions: str | TokenIds | None = Field(None, description="What stands before the documents.")
    separator: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Text after the instructions and after each document that is a text; default: an empty line."
    )
    link: Link | None = Field(
        None,
        description="Method that reuses the KV of parts at any position, such as first-16. The answer is then "
        "approximate, and names the method in `approximate`. Without this field it is exact. The server must allow "
        "links (--allow-links).",
    )


class _PromptOrMessages(Body):
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

    HOLDS = "tokens"

    prompt: str | SomeTokenIds | None = None
    cache_salt: Salt | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    HOLDS = "tokens"

    model: str | None = None
    tokens: TokenIds


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
    """A call of a custom tool in an earlier response. The call's input is any text."""

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
    """An item of any other type. The server refuses it, and the error names the type."""

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
    """One of `tools`: a function, a custom tool (whose input is any text), or a namespace of functions."""

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
    """`text.format` of a response. Unlike `response_format`, it has the schema's fields beside its type."""

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
    """`reasoning` of a response. Only `effort` is used."""

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
    # Accepted, but without effect.
    client_metadata: dict[str, Any] | None = None

"""The requests of Ollama's API as pydantic models. Options that choose how Ollama runs a model have no effect here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from foreword.server.bodies.fields import (
    Body,
    Part,
    Penalty,
    Positive,
    Priority,
    Probability,
    Salt,
    SessionId,
    TokenIds,
    Unsupported,
    Whole,
)

Integer = Annotated[int, Whole, Field(ge=-(2**63), le=2**63 - 1)]
KeepAlive = Annotated[str, Field(max_length=64)] | float
Name = Annotated[str, Field(max_length=256)]


class Options(Body):
    """`options`."""

    num_predict: Integer | None = None
    """Limit of the answer's tokens; 0 or less: as many as fit."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Integer | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Probability | None = None
    seed: Integer | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Integer | None = None
    # Accepted, but without effect.
    numa: bool | None = None
    num_batch: Integer | None = None
    num_gpu: Integer | None = None
    main_gpu: Integer | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: Integer | None = None
    num_keep: Integer | None = None
    repeat_last_n: Integer | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    # Ways of sampling that this engine lacks. Only values that switch the method off are accepted.
    mirostat: Literal[0] | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None


class ModelRequest(Body):
    """POST /api/show; `name` is the older name of `model`."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Options | None = None


class _Call(Body):
    """Fields of calls that compute something."""

    model: Name
    options: Options | None = None
    # Fields of foreword itself.
    cache_salt: Salt | None = None
    priority: Priority | None = None
    # Accepted, but without effect.
    keep_alive: KeepAlive | None = None


class EmbedRequest(_Call):
    """POST /api/embed."""

    HOLDS = "prompts"

    input: str | Annotated[list[str], Field(fail_fast=True)]
    truncate: bool | None = None
    """Whether to cut the end off a text that is too long. None counts as true, as in Ollama's own server."""
    dimensions: Positive | None = None


class OldEmbedRequest(_Call):
    """POST /api/embeddings, Ollama's older form of /api/embed."""

    prompt: str | None = None


class _Generation(_Call):
    """Fields of calls that generate."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["", "low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None
    """Whether the earliest messages may be left out if the conversation is too long."""
    # Fields of foreword itself.
    session_id: SessionId | None = None
    # Accepted, but without effect.
    shift: bool | None = None


class CalledFunction(Part):
    """`tool_calls[].function`."""

    name: str
    arguments: dict[str, Any] | None = None


class EarlierCall(Part):
    """One of `tool_calls` in an earlier answer."""

    id: Name | None = None
    function: CalledFunction


class OllamaMessage(Part):
    """A message. Unknown fields of earlier answers are ignored."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=128)] | None = None
    tool_name: Name | None = None
    name: Name | None = None
    """The older name of `tool_name`."""
    tool_call_id: Name | None = None


class DescribedFunction(Part):
    """`tools[].function`."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Part):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: DescribedFunction


class OllamaChatRequest(_Generation):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=128, fail_fast=True)] | None = None


class GenerateRequest(_Generation):
    """POST /api/generate."""

    HOLDS = "tokens"

    prompt: str | None = None
    system: str | None = None
    context: TokenIds | None = None
    """The tokens of an earlier prompt and its answer, which this call continues."""
    raw: bool | None = None
    """Whether the prompt is used as it is, without a chat template."""
    images: list[str] | None = None
    suffix: Unsupported = None
    template: Unsupported = None

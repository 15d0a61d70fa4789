"""Reads `generationConfig`: how an answer is sampled, and the form that it must have.

Knows Google's fields; foreword.grammar builds the constraints.
"""

from __future__ import annotations

from foreword.request import SamplingParams, StructuredOutputsParams
from foreword.server.api_errors import APIError, bad_request
from foreword.server.dialects.gemini.fields import GenerationConfig
from foreword.server.dialects.gemini.schemas import json_schema
from foreword.server.service import Service

JSON, ENUM, TEXT = "application/json", "text/x.enum", "text/plain"


async def sampling_params(
    service: Service, config: GenerationConfig, form: StructuredOutputsParams | None
) -> SamplingParams:
    """The sampling parameters of a request whose answer has a form. Raises InvalidRequestError or APIError."""
    if config.logprobs is not None and not config.response_logprobs:
        raise _wrong("logprobs", "is only allowed with responseLogprobs: true")
    same = "temperature top_p top_k seed presence_penalty frequency_penalty".split()
    return SamplingParams(
        n=config.candidate_count or 1,
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        logprobs=(config.logprobs or 0) if config.response_logprobs else None,
        open_constraint=None if form is None else await service.compile_grammar(form),
        **{
            **service.sampling_defaults,
            **{name: value for name in same if (value := getattr(config, name)) is not None},
        },
    )


def structured_outputs(config: GenerationConfig) -> StructuredOutputsParams | None:
    """The form that an answer must have; None for any text. Raises APIError or InvalidRequestError."""
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

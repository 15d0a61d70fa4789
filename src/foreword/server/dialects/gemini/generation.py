"""Reads `generationConfig`: how an answer is sampled, and the form that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from foreword.request import SamplingParams, StructuredOutputsParams
from foreword.server.api_errors import APIError, UnknownFieldError, bad_request
from foreword.server.dialects.gemini.fields import GenerationConfig
from foreword.server.service import Service

_TYPES = frozenset("string number integer boolean array object null".split())
_NUMBERS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
"""Google writes these 64-bit numbers as strings in places."""
_SAME = frozenset("description title default pattern minimum maximum enum required".split()) | _NUMBERS
_INNER = {"items": False, "anyOf": True, "prefixItems": True}
"""Fields with schemas, and whether they hold a list of them."""
_NOT_ASKED = frozenset("format example propertyOrdering nullable".split())
"""Fields without a counterpart, and those that change another field."""
JSON, ENUM, TEXT = "application/json", "text/x.enum", "text/plain"


def json_schema(schema: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a schema. Raises APIError 400, with the place, for fields that Google's schemas lack."""
    if not isinstance(schema, Mapping):
        raise bad_request(f"Invalid value for {where}: a schema must be an object", param=where)
    given = {_spelled(name): value for name, value in schema.items() if value is not None}
    made: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where}.{name}"
        match name:
            case "type":
                made |= _type(value, place)
            case "properties":
                made[name] = _properties(value, given.get("propertyOrdering"), place)
            case "$defs":
                made[name] = _properties(value, None, place)
            case "$ref":
                made[name] = value
            case "additionalProperties":
                made[name] = value if isinstance(value, bool) else json_schema(value, place)
            case _ if name in _INNER:
                made[name] = _schemas(value, place) if _INNER[name] else json_schema(value, place)
            case _ if name in _SAME:
                made[name] = int(value) if name in _NUMBERS and _is_count(value) else value
            case _ if name not in _NOT_ASKED:
                message = f"Unrecognized request argument supplied: {place}"
                raise UnknownFieldError(message, param=place, where=(place,), problem="unknown")
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return _or_null(made) if given.get("nullable") is True else made


def _spelled(name: str) -> str:
    return {"ref": "$ref", "defs": "$defs"}.get(name) or (name if name.startswith("$") else to_camel(name))


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) < 20


def _type(value: Any, where: str) -> dict[str, str]:
    kind = value.lower() if isinstance(value, str) else None
    if kind == "type_unspecified":
        return {}
    if kind not in _TYPES:
        known = ", ".join(sorted(kind.upper() for kind in _TYPES))
        raise bad_request(f"Invalid value for {where}: {value!r:.60} is not a type; use one of {known}", param=where)
    return {"type": kind}


def _properties(value: Any, order: Any, where: str) -> dict[str, Any]:
    """The properties in the wanted order, in which answers will have them; those that it leaves out come last."""
    if not isinstance(value, Mapping):
        raise bad_request(f"Invalid value for {where}: it must be an object", param=where)
    first = [name for name in order if isinstance(name, str) and name in value] if isinstance(order, list) else []
    return {name: json_schema(value[name], f"{where}.{name}") for name in dict.fromkeys([*first, *value])}


def _schemas(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise bad_request(f"Invalid value for {where}: it must be a list", param=where)
    return [json_schema(one, f"{where}[{number}]") for number, one in enumerate(value)]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    outside = ("title", "description", "default", "$defs")
    kept: dict[str, Any] = {name: schema.pop(name) for name in outside if name in schema}
    return {**kept, "anyOf": [schema, {"type": "null"}]}


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

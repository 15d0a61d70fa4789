"""The form that an answer must have, in each way that clients can ask for it.

Knows OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields; foreword.grammar.grammars
builds the constraints.
"""

from __future__ import annotations

from typing import Any

from foreword.request import StructuredOutputsParams
from foreword.server.api_errors import bad_request
from foreword.server.dialect import ResponseFormat, StructuredOutputs

GUIDED = ("json", "regex", "choice", "grammar")


def structured_outputs(body: Any, response_format: ResponseFormat | None) -> StructuredOutputsParams | None:
    """The form that a call asks for; None for any text. Raises APIError or InvalidRequestError."""
    asked: dict[str, StructuredOutputsParams] = {}
    of_format = _of_format(response_format)
    if of_format is not None:
        asked["response_format"] = of_format
    own: StructuredOutputs | None = body.structured_outputs
    if own is not None:
        asked["structured_outputs"] = StructuredOutputsParams(
            json=own.json_schema,
            regex=own.regex,
            choice=None if own.choice is None else tuple(own.choice),
            grammar=own.grammar,
            json_object=own.json_object,
        )
    for kind in GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            given: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
            asked[f"guided_{kind}"] = StructuredOutputsParams(**given)
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} cannot be combined; give one of them", param=list(asked)[1])
    return next(iter(asked.values()), None)


def _of_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = wanted.json_schema.json_schema if wanted.json_schema is not None else None
    if schema is None:
        raise bad_request("response_format json_schema needs json_schema.schema", param="response_format")
    return StructuredOutputsParams(json=schema)

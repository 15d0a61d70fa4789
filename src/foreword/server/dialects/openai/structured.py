"""The form that an answer must have, in each way that clients can ask for it.

Knows OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields; foreword.grammar
builds the constraints.
"""

from __future__ import annotations

from typing import Any

from foreword.request import StructuredOutputsParams
from foreword.server.api_errors import bad_request
from foreword.server.dialects.openai.fields import ResponseFormat, StructuredOutputs

GUIDED = ("json", "regex", "choice", "grammar")


def structured_outputs(body: Any, response_format: ResponseFormat | None) -> StructuredOutputsParams | None:
    """The form that a call asks for; None for any text. Raises APIError or InvalidRequestError."""
    forms: dict[str, StructuredOutputsParams] = {}
    of_format = _of_format(response_format)
    if of_format is not None:
        forms["response_format"] = of_format
    vllm_form: StructuredOutputs | None = body.structured_outputs
    if vllm_form is not None:
        forms["structured_outputs"] = StructuredOutputsParams(
            json=vllm_form.json_schema,
            regex=vllm_form.regex,
            choice=None if vllm_form.choice is None else tuple(vllm_form.choice),
            grammar=vllm_form.grammar,
            json_object=vllm_form.json_object,
        )
    for kind in GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            given: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
            forms[f"guided_{kind}"] = StructuredOutputsParams(**given)
    if len(forms) > 1:
        raise bad_request(f"{' and '.join(forms)} cannot be combined; give one of them", param=list(forms)[1])
    return next(iter(forms.values()), None)


def _of_format(wanted: ResponseFormat | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = wanted.json_schema.json_schema if wanted.json_schema is not None else None
    if schema is None:
        raise bad_request("response_format json_schema needs json_schema.schema", param="response_format")
    return StructuredOutputsParams(json=schema)

"""Extras: fields about the cache that a response gets on demand, beside the API's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import Request

from foreword.cache import LookupExplanation, MissReason, common_length
from foreword.request import StructuredOutputsParams
from foreword.server.answer_stream import AnswerStream
from foreword.server.api_errors import bad_request
from foreword.server.dialects.openai.caching import Caching
from foreword.server.dialects.openai.fields import AnyCall, ResponseFormat, StructuredOutputs
from foreword.server.observe.explanations import cache_report, told_to_client
from foreword.server.records import RequestRecord
from foreword.server.service import Caller, Service

GUIDED = ("json", "regex", "choice", "grammar")
_TEMPLATE_REASONS = {"tools": "tools_changed", "reasoning_effort": "reasoning_effort_changed"}
"""Other inputs of a prompt, and OpenAI's names for a change in them.

OpenAI's other reasons cannot arise: one model is served, conversations are not compacted, and neither a text's format,
nor its verbosity, nor a service tier changes a prompt.
"""
FORGOTTEN = "forgotten"
"""The cache no longer has an account of the prompt: it was reset, or evicted the prompt long ago."""
UNCACHED = "uncached"
"""One of the two asked that the cache have no part in it."""
HEADER = "x-foreword-cache"


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


def diagnose(record: RequestRecord, earlier: RequestRecord | None, block_size: int) -> dict[str, Any]:
    """Compare a request after its lookup with an earlier one of the same tenant, or None if there is none.

    `unavailable` means that the prompts do not differ: the later one repeats or continues the earlier one, but was not
    found. Our own field `reason` says what happened to the earlier one's blocks.
    """
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    if record.first_scheduled_time is None:
        return {"type": "unavailable"}
    if record.is_uncached or earlier.is_uncached:
        return {"type": "unavailable", "reason": UNCACHED}
    ours, theirs = record.prompt_token_ids, earlier.prompt_token_ids
    shared = common_length(ours, theirs)
    if record.salt != earlier.salt:
        return _miss("prompt_cache_key_changed", len(ours), len(theirs))
    if shared < min(len(ours), len(theirs)):
        return _miss(_what_changed(record, earlier), len(ours) - shared, len(theirs))
    # The last token is always computed, and a partial block may not be cached.
    if record.num_cached_tokens >= max(1, shared - max(1, shared % block_size)):
        return {"type": "cache_hit"}
    reason = _what_became_of_it(record.explanation)
    return {"type": "unavailable"} | ({} if reason is None else {"reason": reason})


def _what_changed(record: RequestRecord, earlier: RequestRecord) -> str:
    """Why two prompts differ: an input of the template, or else the messages."""
    for name, reason in _TEMPLATE_REASONS.items():
        if record.template_digests.get(name) != earlier.template_digests.get(name):
            return reason
    return "input_changed"


def _what_became_of_it(explanation: LookupExplanation | None) -> str | None:
    """Why a prompt that ran before was not found; None if no account is kept."""
    if explanation is None or explanation.reason is None:
        return None
    reason = told_to_client(explanation.reason)
    return FORGOTTEN if reason is MissReason.NEVER_SEEN else str(reason)


def _miss(reason: str, num_missed: int, num_reusable: int) -> dict[str, Any]:
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": num_missed,
        "comparison_reusable_tokens": num_reusable,
    }


class Extras:
    """The extras that one call asked for."""

    def __init__(self, service: Service, caller: Caller, request: Request, body: AnyCall, caching: Caching) -> None:
        self.caching = caching
        self._hints = caller.hints
        self._service = service
        self._tenant = caller.tenant
        in_body = body.foreword is not None and body.foreword.cache
        self._wants_certificate = body.foreword is not None and body.foreword.certificate
        self._wants_cache = in_body or request.headers.get(HEADER, "").lower() in ("1", "true", "yes")

    def of(self, answer: AnswerStream) -> dict[str, Any]:
        """Fields to add to the body of a finished answer; none if the call asked for none.

        `foreword.cache` is one report, or a list of reports if the call had several prompts. `foreword.drafts` is there
        if tokens were drafted; `foreword.certificate` has a digest of logits for each choice; `foreword.kv_hints` has
        the outcomes of hints.
        """
        fields: dict[str, Any] = {}
        records = [job.record for job in answer.jobs]
        if self._wants_cache:
            reports = [self._report(record) for record in records]
            fields["foreword"] = {"cache": reports[0] if len(reports) == 1 else reports, **_of_drafts(answer)}
        if self._wants_certificate:
            fields["foreword"] = fields.get("foreword", {}) | {"certificate": certificate(self._service, answer)}
        if self._hints is not None:
            for record, output in zip(records, answer.outputs, strict=True):
                self._hints.note_request(record.session_id, record.num_prompt_tokens, output.kept)
            fields["foreword"] = fields.get("foreword", {}) | {"kv_hints": self._hints.report()}
        if self.caching.compare_with is not None:
            earlier = self._service.records.of_response(self.caching.compare_with, self._tenant.name)
            block_size = self._service.llm.layout.block_size
            fields["prompt_cache_diagnostics"] = diagnose(records[0], earlier, block_size)
            fields["prompt_cache_options"] = self.caching.options()
        return fields

    def _report(self, record: RequestRecord) -> dict[str, Any]:
        explanation = record.explanation
        similar = None
        if explanation is not None and explanation.reason is not None:
            similar = self._service.insight.similar(record)
        report = cache_report(explanation, record.prompt_token_ids, self._service.llm.tokenizer, similar=similar)
        if record.link is not None:
            report |= {"linked_tokens": record.link.linked_tokens, "computed_tokens": record.num_computed_tokens}
        return report


def certificate(service: Service, answer: AnswerStream) -> dict[str, Any]:
    """What a finished answer was computed from (`LLM.certificate`)."""
    return service.llm.certificate(answer.outputs)


def _of_drafts(answer: AnswerStream) -> dict[str, Any]:
    """What became of drafted tokens, by the source that guessed them; empty if none were drafted."""
    counts = [choice.drafts for output in answer.outputs for choice in output.outputs]
    accepted = sum((Counter(one.accepted) for one in counts), Counter[str]())
    rejected = sum((Counter(one.rejected) for one in counts), Counter[str]())
    return {"drafts": {"accepted": accepted, "rejected": rejected}} if accepted or rejected else {}

"""Extras: fields about the cache that a response gets on demand, beside the API's own.

Knows both ways to ask for `foreword.cache` (body field `foreword: {"cache": true}`, header `X-Foreword-Cache: 1`), and
OpenAI's `prompt_cache_options.comparison_response_id`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import Request

from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import AnswerStream
from foreword.server.dialects.openai.caching import Caching
from foreword.server.dialects.openai.diagnostics import diagnose
from foreword.server.dialects.openai.fields import AnyCall
from foreword.server.observe.explanations import cache_report
from foreword.server.records import RequestRecord
from foreword.server.service import Service

HEADER = "x-foreword-cache"


class Extras:
    """The extras that one call asked for."""

    def __init__(self, service: Service, tenant: Tenant, request: Request, body: AnyCall, caching: Caching) -> None:
        self.caching = caching
        self._service = service
        self._tenant = tenant
        in_body = body.foreword is not None and body.foreword.cache
        self._wants_cache = in_body or request.headers.get(HEADER, "").lower() in ("1", "true", "yes")

    def of(self, answer: AnswerStream) -> dict[str, Any]:
        """Fields to add to the body of a finished answer; none if the call asked for none.

        `foreword.cache` is one report, or a list of reports if the call had several prompts. `foreword.drafts` is there
        if tokens were drafted.
        """
        fields: dict[str, Any] = {}
        records = [job.record for job in answer.jobs]
        if self._wants_cache:
            reports = [self._report(record) for record in records]
            fields["foreword"] = {"cache": reports[0] if len(reports) == 1 else reports, **_of_drafts(answer)}
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


def _of_drafts(answer: AnswerStream) -> dict[str, Any]:
    """What became of drafted tokens, by the source that guessed them; empty if none were drafted."""
    counts = [choice.drafts for output in answer.outputs for choice in output.outputs]
    accepted = sum((Counter(one.accepted) for one in counts), Counter[str]())
    rejected = sum((Counter(one.rejected) for one in counts), Counter[str]())
    return {"drafts": {"accepted": accepted, "rejected": rejected}} if accepted or rejected else {}

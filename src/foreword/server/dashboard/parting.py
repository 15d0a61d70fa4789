"""Why prompts part early: the linter over the recent requests of a tenant, when a viewer asks for it.

Knows records and the linter. The work runs in a thread, on a bounded number of tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from html import escape

from nicegui import ui

from foreword.lint.check import Finding, LintReport, lint_prompts
from foreword.lint.prompts import LintPrompt
from foreword.server.dashboard import drawings as draw
from foreword.server.records import RequestRecord
from foreword.server.service import Service
from foreword.text import Tokenizer

MAX_REQUESTS = 300
MAX_TOKENS = 400_000
"""Most tokens of all prompts that are compared; the oldest requests beyond it are left out."""


class Parting:
    """The card with its button. Belongs to one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        with ui.element("div").classes("card span12"):
            ui.html('<div class="title">Why prompts part early</div>', sanitize=False)
            with ui.element("div").classes("pins"):
                self._tenant = ui.select([], with_input=False).props(
                    'outlined dense aria-label="tenant" data-testid="parting-tenant"'
                )
                self._button = (
                    ui.button("Compare recent prompts", on_click=self._compare)
                    .props('flat data-testid="parting-button"')
                    .classes("plain")
                )
            self._result = ui.html("", sanitize=False).props('data-testid="parting"')
        self.refresh()

    def refresh(self) -> None:
        """Offer the tenants that have sent requests, if there are several."""
        names = sorted(self._service.records.tenants())
        self._tenant.set_visibility(len(names) > 1)
        if names and names != self._tenant.options:
            self._tenant.set_options(names, value=self._tenant.value or names[0])

    async def _compare(self) -> None:
        tokenizer = self._service.llm.tokenizer
        if tokenizer is None:
            self._result.content = '<div class="empty">The model has no tokenizer that could spell its prompts.</div>'
            return
        records = compared(self._service.records.recent(MAX_REQUESTS, self._tenant.value))
        self._button.disable()
        try:
            self._result.content = await asyncio.to_thread(parting, records, tokenizer)
        finally:
            self._button.enable()


def compared(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Of records, the latest first, those to compare, in order of arrival: those of one namespace that ran."""
    ran = [record for record in records if record.first_scheduled_time is not None]
    salts = Counter(record.salt for record in ran).most_common(1)
    kept, num_tokens = [], 0
    for record in ran:
        num_tokens += record.num_prompt_tokens
        if num_tokens > MAX_TOKENS:
            break
        if record.salt == salts[0][0]:
            kept.append(record)
    return kept[::-1]


def parting(records: Sequence[RequestRecord], tokenizer: Tokenizer) -> str:
    """The findings as HTML."""
    prompts = [LintPrompt(record.prompt_token_ids, 1000 * record.created) for record in records]
    report = lint_prompts(prompts, tokenizer.spell)
    if not report.findings:
        return f'<div class="note">No prompts part early among {draw.requests(report.num_requests)}.</div>'
    found = "".join(_finding(finding, report) for finding in report.findings)
    return (
        f'{found}<div class="note">Of {draw.requests(report.num_requests)} a cache without limits finds '
        f"{report.hit_rate:.1%}; with all of this mended, {report.hit_rate_after:.1%}.</div>"
    )


def _finding(finding: Finding, report: LintReport) -> str:
    causes = " and ".join(finding.causes)
    a_day = report.a_day(finding.wasted_tokens)
    rate = "" if a_day is None else f", at this rate {draw.count(round(a_day))} a day"
    texts = "\n".join(f"{finding.before}\u25b8{text}".replace("\n", "\u21b5") for text in finding.examples)
    return (
        f"<div><b>{escape(causes[0].upper() + causes[1:])}</b> at token {draw.count(finding.position)}, in "
        f"{draw.requests(finding.num_prompts)}: {draw.tokens(finding.wasted_tokens)} computed again{rate}. "
        f"{escape(finding.remedy)} Hit rate then: {finding.hit_rate_after:.1%}."
        f'<div class="whole" style="margin:6px 0 12px">{escape(texts)}</div></div>'
    )

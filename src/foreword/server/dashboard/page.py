"""The dashboard's page: its cards, and how they are refreshed. All viewers share the engine's snapshots."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import median

import numpy as np
from nicegui import events, ui

from foreword.cache import BlockState
from foreword.engine import Snapshot
from foreword.errors import ForewordError
from foreword.lint.check import Finding, LintReport, lint_prompts
from foreword.lint.prompts import LintPrompt
from foreword.request import SamplingParams
from foreword.server.access.tenants import ANYBODY, DASHBOARD, Tenant
from foreword.server.api_errors import APIError
from foreword.server.dashboard import drawings as draw
from foreword.server.dashboard.parts import Head, Html, card, confirmed, figure, told, window_choice
from foreword.server.dashboard.prefixes import Prefixes
from foreword.server.observe.metrics import mostly_found
from foreword.server.records import RequestRecord
from foreword.server.service import Caller, Service, new_id
from foreword.text import Tokenizer

MAX_REQUESTS = 300
MAX_PARTING_TOKENS = 400_000
"""Limit of the tokens of all compared prompts. Beyond this limit, the oldest requests are left out."""
MAX_TOKENS = 512
DEMO_SYSTEM = (
    "The code of the amber falcon is 4821.\n"
    "The home of the quiet lantern is Lisbon.\n"
    "The colour of the old compass is blue.\n"
)
DEMO_QUESTION = "What is the code of the amber falcon?"
REFRESH_S = 1.0
NUM_ROWS = 40
NUM_RECENT = 1000
RATE_S = 10.0
"""Tokens per second are averaged over this many seconds."""
_FIGURES = (
    ("Hit rate", "hit-rate"),
    ("First token", "first-token"),
    ("Tokens per second", "rate"),
    ("Prefill saved", "saved"),
    ("Pool", "usage"),
)


class Parting:
    """The card that compares prompts, with its button. Belongs to one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        with card("Why prompts part early", "span12"):
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
        """If several tenants have sent requests, let the viewer choose one of these tenants."""
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
    """Return the records to compare, the oldest first: requests that ran in the most common namespace.

    `records` must have the opposite order: the latest first.
    """
    ran = [record for record in records if record.first_scheduled_time is not None]
    salts = Counter(record.salt for record in ran).most_common(1)
    chosen, num_tokens = [], 0
    for record in ran:
        num_tokens += record.num_prompt_tokens
        if num_tokens > MAX_PARTING_TOKENS:
            break
        if record.salt == salts[0][0]:
            chosen.append(record)
    return chosen[::-1]


def parting(records: Sequence[RequestRecord], tokenizer: Tokenizer) -> str:
    """Compare the prompts, and return the findings as HTML."""
    prompts = [LintPrompt(record.prompt_token_ids, 1000 * record.created) for record in records]
    report = lint_prompts(prompts, tokenizer.spell)
    if not report.findings:
        return f'<div class="note">No prompts part early among {draw.requests(report.num_requests)}.</div>'
    findings = "".join(_finding(finding, report) for finding in report.findings)
    return (
        f'{findings}<div class="note">Of {draw.requests(report.num_requests)} a cache without limits finds '
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


class Chat:
    """The tab with the chat. Belongs to one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages: list[dict[str, str]] = []
        self._busy = False
        is_demo = service.model_name == "foreword-demo"
        with card("Chat", "chat", ("from the cache", "computed")):
            self._system = (
                ui.textarea("System message", value=DEMO_SYSTEM if is_demo else "")
                .props("outlined dense autogrow")
                .style("width:100%")
            )
            self._talk = ui.element("div").classes("talk").props('data-testid="talk"')
            with ui.element("div").classes("ask"):
                self._input = ui.input(placeholder="Say something", value=DEMO_QUESTION if is_demo else "").props(
                    'outlined dense data-testid="say"'
                )
                self._input.on("keydown.enter", self._send)
                ui.button("Send", on_click=self._send).props('unelevated data-testid="send"').classes("go")
                ui.button("New", on_click=self._begin_anew).props("flat").classes("plain")

    def _begin_anew(self) -> None:
        self._messages.clear()
        self._talk.clear()

    async def _send(self) -> None:
        message = self._input.value.strip()
        if not message or self._busy:
            return
        self._busy = True
        self._input.value = ""
        self._messages.append({"role": "user", "content": message})
        with self._talk:
            _say("user", message)
            answer = _say("assistant", "\u2026")
            turn = ui.html("", sanitize=False).classes("turn")
        try:
            text, record = await self._answer(answer)
            self._messages.append({"role": "assistant", "content": text})
            turn.content = draw.reuse(record, self._service.llm.tokenizer)
        except ForewordError as error:
            self._messages.pop()
            answer.content = escape(str(error))
        finally:
            self._busy = False

    async def _answer(self, element: ui.html) -> tuple[str, RequestRecord]:
        """Answer the conversation, and show the answer as it grows. Returns the text and the request's record."""
        service = self._service
        head = [{"role": "system", "content": self._system.value}] if self._system.value.strip() else []
        prompt = await service.conversation([*head, *self._messages])
        tenant = Tenant(DASHBOARD if service.tenants.asks_for_keys else ANYBODY)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        stream = await service.start(Caller(tenant, "dashboard"), new_id("dash-"), [prompt], params, stream=True)
        text = ""
        try:
            async for deltas in stream.deltas():
                text += "".join(delta.text for delta in deltas)
                element.content = escape(text) or "\u2026"
        finally:
            stream.close()
        return text, stream.jobs[0].record


def _say(role: str, text: str) -> ui.html:
    return ui.html(escape(text), sanitize=False).classes(f"said {role}")


class View:
    """The page of one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._head = Head(service.model_name)
        with ui.tabs().classes("tabs").props("align=left no-caps mobile-arrows") as tabs:
            names = [ui.tab(name) for name in ("Overview", "Prefixes", "Requests", "Chat")]
        with ui.tab_panels(tabs, value="Overview", animated=False).classes("panels") as self._panels:
            with ui.tab_panel(names[0]):
                self._overview()
            with ui.tab_panel(names[1]):
                self._prefixes = Prefixes(service)
            with ui.tab_panel(names[2]), ui.element("div").classes("grid"):
                self._parting = Parting(service)
                with card("Recent requests", "span12"):
                    self._rows = Html(test_id="requests")
            with ui.tab_panel(names[3]):
                Chat(service)
        ui.timer(REFRESH_S, self._refresh)

    # ------------------------------------------------------------------- parts

    def _overview(self) -> None:
        with ui.element("div").classes("grid"):
            with card("Model", "span12"):
                self._model = Html("model-facts", "model")
            self._traffic: list[ui.element] = []
            """The parts of the page that are hidden until the first request."""
            with card("Waiting for the first request", "span12 waiting") as self._waiting:
                ui.html(_first_request(), sanitize=False).props('data-testid="waiting"')
            with ui.element("div").classes("span12 tools") as tools:
                self._window = window_choice()
                self._covered = Html("hint")
            with ui.element("div").classes("span12 figures") as figures:
                self._figures = [figure(name, test_id) for name, test_id in _FIGURES]
            self._traffic += [tools, figures]
            self._bars = self._chart("Prompt tokens", "span7", keys=("found", "computed"))
            self._dots = self._chart("Time to first token", "span5", keys=("mostly found", "mostly computed"))
            with card("KV pool", "span7"):
                self._pool = Html(test_id="pool")
                ui.button("Reset the cache", on_click=self._reset, color=None).props(
                    'flat data-testid="reset"'
                ).classes("danger")
            self._reasons = self._chart("Computed prompt tokens, and why", "span5", test_id="reasons")
            with card("Drafted tokens", "span12", ("right", "wrong")) as self._drafts_card:
                self._drafts = Html(test_id="drafts")
            self._tiers = None
            if self._service.llm.engine.tier_names:
                with card("Below the pool", "span12"):
                    self._tiers = Html(test_id="tiers")
            with card("Kept prefixes", "span12") as self._entries_card:
                self._entries = Html(test_id="entries")
            with card("Sessions", "span12") as self._sessions_card:
                self._sessions = Html(test_id="sessions")
            self._more = self._chart("What would more memory bring", "span12", test_id="more-memory")
            self._latest = self._chart("Latest requests", "span12", test_id="latest")
            for change in self._service.template_changes:
                with card("The chat template spoils reuse", "span12"):
                    ui.html(f'<div class="note">{escape(str(change))}</div>', sanitize=False)

    def _chart(self, title: str, span: str, keys: tuple[str, str] | None = None, test_id: str = "") -> Html:
        """Make a card that is shown once there is traffic."""
        with card(title, span, keys) as element:
            self._traffic.append(element)
            return Html(test_id=test_id)

    async def _reset(self, _: events.ClickEventArguments) -> None:
        question = "Forget all cached prefixes? The next requests compute their prompts again. Pins end, too."
        if not await confirmed(question, "Reset"):
            return
        with told():
            await self._service.insight.reset()
            ui.notify("The cache is empty.")

    # ----------------------------------------------------------------- refresh

    async def _refresh(self) -> None:
        service = self._service
        try:
            look = await service.insight.look(REFRESH_S / 2)
        except APIError as error:
            self._head.show_state(str(error), is_bad=True)
            return
        failure = service.thread.failure
        busy = f"{look.num_running} running, {look.num_waiting} waiting"
        self._head.show_state(failure or busy, is_bad=bool(failure))
        records = service.records.recent(NUM_RECENT)
        if self._panels.value == "Overview":
            self._show_overview(look, records)
        elif self._panels.value == "Requests":
            self._rows.show(self._request_rows(records, NUM_ROWS))
            self._parting.refresh()
        elif self._panels.value == "Prefixes":
            await self._prefixes.refresh()

    def _request_rows(self, records: Sequence[RequestRecord], number: int) -> str:
        newest = [*reversed(self._service.records.running()), *records][:number]
        with_tenants = self._service.tenants.asks_for_keys
        return draw.request_rows(newest, self._service.llm.tokenizer, with_tenants=with_tenants)

    def _show_overview(self, look: Snapshot, records: Sequence[RequestRecord]) -> None:
        now = time.monotonic()
        window_s = float(self._window.value)
        service = self._service
        running = service.records.running()
        has_traffic = bool(records or running)
        self._waiting.set_visibility(not has_traffic)
        for part in self._traffic:
            part.set_visibility(has_traffic)
        self._model.show(draw.model_card(service, look.num_blocks))
        self._pool.show(draw.pool_map(look.block_states))
        if self._tiers is not None:
            self._tiers.show(draw.tier_rows(look.tiers))
        drafted = draw.draft_rows(look.drafts)
        self._drafts_card.set_visibility(bool(drafted))
        self._drafts.show(drafted)
        self._entries_card.set_visibility(bool(look.entries))
        self._entries.show(draw.entry_rows(look, with_tenants=service.tenants.asks_for_keys))
        sessions = draw.session_rows(service)
        self._sessions_card.set_visibility(bool(sessions))
        self._sessions.show(sessions)
        if not has_traffic:
            return
        lately = [record for record in records if now - (record.finished_time or now) < window_s]
        is_cut = len(records) == NUM_RECENT and len(lately) == len(records)
        self._covered.show(f"the last {NUM_RECENT:,} requests" if is_cut else draw.requests(len(lately)))
        for tile, text in zip(self._figures, self._figure_texts(look, lately, [*running, *records], now), strict=True):
            tile.show(text)
        ran = [record for record in records if record.first_scheduled_time is not None]
        prompts = [(each.finished_time or now, each.num_cached_tokens, each.num_computed_tokens) for each in ran]
        self._bars.show(draw.token_bars(prompts, now, window_s))
        self._dots.show(draw.ttft_dots(records, now, window_s))
        stats = look.stats
        missed, misses = ({str(reason): n for reason, n in of.items()} for of in (stats.missed_tokens, stats.misses))
        self._reasons.show(draw.miss_reasons(missed, misses))
        seconds_per_token = service.thread.prefill.seconds_per_token
        self._more.show(draw.memory_curve(look, service.insight.curve, service.llm.kv_block_bytes, seconds_per_token))
        self._latest.show(self._request_rows(records, 5))

    def _figure_texts(
        self, look: Snapshot, lately: Sequence[RequestRecord], recent: Sequence[RequestRecord], now: float
    ) -> tuple[str, str, str, str, str]:
        """Return a text for each of `_FIGURES`. `lately`: requests of the window; `recent`: all known requests."""
        cached = look.num_in_state(BlockState.CACHED)
        generated, prompts = tokens_per_second(recent, now)
        saved = draw.seconds(self._service.insight.num_saved_seconds)
        return (
            f"{look.recent_hit_rate:.0%} <small>lately, {look.stats.hit_rate:.0%} in all</small>",
            _first_token(lately),
            f"{draw.count(generated)} <small>generated, {draw.count(prompts)} of prompts</small>",
            f"{draw.count(look.totals.hits)} <small>tokens, {saved}</small>",
            f"{look.usage:.0%} <small>in use, {cached / look.num_blocks:.0%} cached</small>",
        )


def tokens_per_second(records: Sequence[RequestRecord], now: float) -> tuple[float, float]:
    """Return tokens per second over the last `RATE_S` seconds: of answers, and of prompts that got a first token."""
    generated = prompts = 0.0
    for record in records:
        times = list(record.token_times)  # a copy, because the engine's thread appends to it
        num_lately = sum(now - moment < RATE_S for moment in times)
        if num_lately:
            generated += record.num_output_tokens * num_lately / len(times)
            prompts += record.num_prompt_tokens * (now - times[0] < RATE_S)
    return generated / RATE_S, prompts / RATE_S


def _first_token(records: Sequence[RequestRecord]) -> str:
    """Write median and 95th percentile of the time to first token, and the medians of hits and of misses."""
    waits = [(wait, mostly_found(record)) for record in records if (wait := record.time_to_first_token) is not None]
    if not waits:
        return "- <small>no requests in this window</small>"
    p50, p95 = np.percentile([wait for wait, _ in waits], (50, 95)).tolist()
    kinds = [[wait for wait, hit in waits if hit is kind] for kind in (True, False)]
    hits, misses = (draw.seconds(median(kind)) if kind else "-" for kind in kinds)
    return (
        f"{draw.seconds(p50)} <small>p50, {draw.seconds(p95)} p95</small>"
        f'<div class="note"><span class="found">{hits}</span> mostly found, '
        f'<span class="computed">{misses}</span> mostly computed</div>'
    )


def _first_request() -> str:
    """Write how to send the first request to this server."""
    request = ui.context.client.request
    address = escape(str(request.base_url).rstrip("/").removesuffix("/dashboard"))
    command = (
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        """    -d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
    )
    return (
        '<div class="note">The server is ready. Charts appear with the first request: send one, or use the chat.</div>'
        f'<div class="whole" style="margin-top:10px">{escape(command, quote=False)}</div>'
    )

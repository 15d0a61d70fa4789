"""The page: its parts, and when they are drawn anew.

Knows the service and NiceGUI; what is drawn comes from drawings.py. One look at the engine a second serves all
viewers, and nothing is looked at while nobody views.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from statistics import median

from nicegui import ui

from foreword.cache import BlockState
from foreword.server.api_errors import APIError
from foreword.server.dashboard import drawings as draw
from foreword.server.dashboard.chat import Chat
from foreword.server.dashboard.memory_curve import memory_curve
from foreword.server.dashboard.mount import ICON, STYLE
from foreword.server.dashboard.prefixes import Prefixes
from foreword.server.insight import Look
from foreword.server.metrics import is_hit
from foreword.server.records import RequestRecord
from foreword.server.service import Service

REFRESH_S = 1.0
NUM_ROWS = 40
NUM_RECENT = 1000


class Dashboard:
    """Builds one page for each viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def build(self) -> None:
        """The whole page, for the viewer who asks."""
        _View(self._service)


class _Html:
    """A piece of the page that is sent again only if it has changed."""

    def __init__(self, classes: str = "", test_id: str = "") -> None:
        self._element = ui.html("", sanitize=False).classes(classes)  # drawings.py escapes
        if test_id:
            self._element.props(f'data-testid="{test_id}"')

    def show(self, content: str) -> None:
        if self._element.content != content:
            self._element.content = content


class _View:
    """What one viewer sees."""

    def __init__(self, service: Service) -> None:
        self._service = service
        ui.add_css(STYLE)
        ui.colors(primary="#119a72")
        self._dark = ui.dark_mode(None)
        self._head()
        with ui.tabs().classes("tabs").props("align=left no-caps mobile-arrows") as tabs:
            names = [ui.tab(name) for name in ("Overview", "Prefixes", "Requests", "Chat")]
        with ui.tab_panels(tabs, value="Overview", animated=False).classes("panels") as self._panels:
            with ui.tab_panel(names[0]):
                self._overview()
            with ui.tab_panel(names[1]):
                self._prefixes = Prefixes(service)
            with ui.tab_panel(names[2]), ui.element("div").classes("card span12"):
                ui.html('<div class="title">Recent requests</div>', sanitize=False)
                self._rows = _Html(test_id="requests")
            with ui.tab_panel(names[3]):
                Chat(service)
        ui.timer(REFRESH_S, self._refresh)

    # ------------------------------------------------------------------- parts

    def _head(self) -> None:
        with ui.header(fixed=True).classes("top"):
            ui.html(f'<div class="brand">{ICON}foreword</div>', sanitize=False)
            ui.html(f'<div class="model">{escape(self._service.model_name)}</div>', sanitize=False).style("min-width:0")
            self._state = _Html(test_id="state")
            self._state._element.style("margin-left:auto")
            ui.button(icon="contrast", on_click=self._switch_colours).props(
                'flat round dense aria-label="light or dark" data-testid="colours"'
            ).classes("plain")

    async def _switch_colours(self) -> None:
        if self._dark.value is None:
            self._dark.value = not await ui.run_javascript("document.body.classList.contains('body--dark')")
        else:
            self._dark.value = not self._dark.value

    def _overview(self) -> None:
        with ui.element("div").classes("grid"):
            self._figures = [_figure(name, test_id) for name, test_id in _FIGURES]
            with _card("Prompt tokens", "span7", keys=("found", "computed")):
                self._bars = _Html()
            with _card("Time to first token", "span5", keys=("hit", "miss")):
                self._dots = _Html()
            with _card("KV pool", "span7"):
                self._pool = _Html(test_id="pool")
            with _card("Why it missed", "span5"):
                self._reasons = _Html(test_id="reasons")
            with _card("What would more memory bring", "span12"):
                self._more = _Html(test_id="more-memory")
            with _card("Latest requests", "span12"):
                self._latest = _Html(test_id="latest")
            for change in self._service.template_changes:
                with _card("The chat template spoils reuse", "span12"):
                    ui.html(f'<div class="note">{escape(str(change))}</div>', sanitize=False)

    # ----------------------------------------------------------------- refresh

    async def _refresh(self) -> None:
        service = self._service
        try:
            look = await service.insight.look(REFRESH_S / 2)
        except APIError as error:
            self._state.show(f'<div class="state bad"><i></i>{escape(str(error))}</div>')
            return
        failure = service.thread.failure
        busy = f"{look.num_running} running, {look.num_waiting} waiting"
        self._state.show(f'<div class="state{" bad" if failure else ""}"><i></i>{escape(failure or busy)}</div>')
        records = service.records.recent(NUM_RECENT)
        if self._panels.value == "Overview":
            self._show_overview(look, records)
        elif self._panels.value == "Requests":
            self._rows.show(self._request_rows(records, NUM_ROWS))
        elif self._panels.value == "Prefixes":
            await self._prefixes.refresh()

    def _request_rows(self, records: Sequence[RequestRecord], number: int) -> str:
        shown = [*reversed(self._service.records.running()), *records][:number]
        with_tenants = self._service.tenants.asks_for_keys
        return draw.request_rows(shown, self._service.llm.tokenizer, with_tenants=with_tenants)

    def _show_overview(self, look: Look, records: Sequence[RequestRecord]) -> None:
        now = time.monotonic()
        for figure, text in zip(self._figures, self._figure_texts(look, records), strict=True):
            figure.show(text)
        self._bars.show(draw.token_bars(records, now))
        self._dots.show(draw.ttft_dots(records, now))
        self._pool.show(draw.pool_map(look.states))
        stats = look.stats
        self._reasons.show(
            draw.miss_reasons(
                {str(reason): tokens for reason, tokens in stats.missed_tokens.items()},
                {str(reason): requests for reason, requests in stats.misses.items()},
            )
        )
        service = self._service
        self._more.show(memory_curve(look, service.llm.kv_block_bytes, service.thread.prefill.seconds_per_token))
        self._latest.show(self._request_rows(records, 5))

    def _figure_texts(self, look: Look, records: Sequence[RequestRecord]) -> tuple[str, str, str, str]:
        stats = look.stats
        times = {
            hit: [r.time_to_first_token for r in records if is_hit(r) is hit and r.token_times] for hit in (True, False)
        }
        hits, misses = (
            draw.seconds(median(value for value in times[hit] if value is not None)) if times[hit] else "-"
            for hit in (True, False)
        )
        first_token = f'<span class="found">{hits}</span> <small>hit, {misses} miss</small>'
        if not any(times.values()):
            first_token = "- <small>no requests yet</small>"
        cached = look.num_in_state(BlockState.CACHED)
        saved = draw.seconds(self._service.insight.num_saved_seconds)
        return (
            f"{look.recent_hit_rate:.0%} <small>lately, {stats.hit_rate:.0%} in all</small>",
            first_token,
            f"{draw.count(look.totals.hits)} <small>tokens, {saved}</small>",
            f"{look.usage:.0%} <small>in use, {cached / look.num_blocks:.0%} cached</small>",
        )


_FIGURES = (("Hit rate", "hit-rate"), ("First token", "first-token"), ("Prefill saved", "saved"), ("Pool", "usage"))


def _figure(name: str, test_id: str) -> _Html:
    with ui.element("div").classes("card span3"):
        ui.html(f'<div class="label">{name}</div>', sanitize=False)
        return _Html("figure", test_id)


def _card(title: str, span: str, keys: tuple[str, str] | None = None) -> ui.element:
    card = ui.element("div").classes(f"card {span}")
    marks = ""
    if keys is not None:
        marks = "".join(
            f'<span class="key"><i class="{kind}"></i>{key}</span>'
            for kind, key in zip(("found", "computed"), keys, strict=True)
        )
    with card:
        ui.html(f'<div class="title">{escape(title)}{marks}</div>', sanitize=False)
    return card

"""The page of a watched engine: what its cache holds, what its requests found, what more memory would bring.

Knows reports and NiceGUI; draws with the parts and drawings of our own dashboard.
"""

from __future__ import annotations

import time
from html import escape
from typing import Protocol

from nicegui import ui

from foreword.server.dashboard import drawings as draw
from foreword.server.dashboard.memory_curve import drawn_curve
from foreword.server.dashboard.parts import Head, Html, card, figure, window_choice
from foreword.server.watch.watcher import Report

REFRESH_S = 1.0
MOST_LETTERS = 60
_FIGURES = (
    ("Hit rate", "hit-rate"),
    ("Held", "held"),
    ("Stored", "stored"),
    ("Removed", "removed"),
    ("Computed again", "again"),
)


class Reports(Protocol):
    """Where the newest report is."""

    latest: Report
    failure: str | None


class WatchView:
    """The page of one viewer."""

    def __init__(self, name: str, reports: Reports) -> None:
        self._reports = reports
        self._head = Head(name)
        with ui.element("div").classes("panels"), ui.element("div").classes("q-tab-panel"):
            self._build()
        self._refresh()
        ui.timer(REFRESH_S, self._refresh)

    def _build(self) -> None:
        with ui.element("div").classes("grid"):
            with ui.element("div").classes("span12 tools"):
                self._window = window_choice()
                self._covered = Html("hint", "covered")
            with ui.element("div").classes("span12 figures"):
                self._figures = [figure(name, test_id) for name, test_id in _FIGURES]
            with card("Prompt tokens", "span12", ("found", "computed")):
                self._bars = Html()
            with card("Why tokens were missed", "span7"):
                self._why = Html(test_id="why")
            with card("Sessions and kinds of prompts", "span5"):
                self._groups = Html(test_id="groups")
            with card("The newest requests", "span12"):
                self._newest = Html(test_id="newest")
            with card("What would more memory bring", "span12"):
                self._more = Html(test_id="more-memory")
            with card("Common prefixes", "span7"):
                self._prefixes = Html(test_id="prefixes")
            with card("The stream", "span5"):
                self._stream = Html(test_id="stream")

    def _refresh(self) -> None:
        report, failure, now = self._reports.latest, self._reports.failure, time.monotonic()
        window_s = float(self._window.value)
        self._head.show_state(failure or report.state, is_bad=failure is not None or report.state != "exact")
        self._covered.show(f"{draw.requests(report.seen.requests)} seen")
        for one, text in zip(self._figures, figure_texts(report), strict=True):
            one.show(text)
        self._bars.show(draw.token_bars(report.recent, now, window_s))
        self._why.show(_why(report))
        self._groups.show(_groups(report))
        self._newest.show(_newest(report))
        self._more.show(more_memory(report))
        self._prefixes.show(_prefixes(report))
        self._stream.show(_stream(report))


def figure_texts(report: Report) -> tuple[str, str, str, str, str]:
    """A text for each of the large numbers."""
    bound = report.bound("\u2265 ", "\u2248 ")
    rate = "-" if report.hit_rate is None else f"{bound}{report.hit_rate:.0%}"
    share = "" if report.pool_blocks is None else f", {report.blocks / report.pool_blocks:.0%} of the pool"
    return (
        f"{rate} <small>of {draw.tokens(report.seen.prompt_tokens)}</small>",
        f"{draw.count(report.tokens)} <small>tokens in {draw.count(report.blocks)} blocks{share}</small>",
        f"{draw.count(report.stored_per_s)} <small>blocks a second</small>",
        f"{draw.count(report.removed_per_s)} <small>blocks a second</small>",
        f"{draw.count(report.again_tokens)} <small>tokens that twice the memory would have kept</small>",
    )


def _why(report: Report) -> str:
    reasons = report.why["reasons"].items()
    note = "" if report.verdict is None else f'<div class="note">{escape(report.verdict)}</div>'
    missed, misses = ({name: sums[of] for name, sums in reasons} for of in ("tokens", "requests"))
    return note + draw.miss_reasons(missed, misses)


def _groups(report: Report) -> str:
    rows = (
        f"<div><span>{escape(one['name'][:MOST_LETTERS])}</span><b>{one['found'] / max(1, one['tokens']):.0%} of "
        f"{draw.tokens(one['tokens'])}</b></div>"
        for one in (*report.why["sessions"], *report.why["kinds"])
    )
    return f'<div class="model-facts">{"".join(rows)}</div>'


def _newest(report: Report) -> str:
    rows = (
        f"<div><span>{draw.count(one['found'])} of {draw.tokens(one['tokens'])}</span><b>{escape(one['why'])}</b></div>"
        for one in reversed(report.why["newest"])
    )
    return f'<div class="model-facts">{"".join(rows)}</div>'


def more_memory(report: Report) -> str:
    """The curve over sizes of the pool, and the tokens that were counted."""
    size = report.block_tokens
    if report.pool_blocks is None or size is None:
        return (
            '<div class="empty">The engine has evicted nothing since the watch began: more memory would have brought '
            "nothing. The first eviction shows the size of its pool.</div>"
        )
    unseen = (
        ""
        if report.is_exact
        else "A request whose prompt was found whole is not seen, so all rates are lower than the real ones; look at "
        "their differences. "
    )
    note = (
        f"Estimated for LRU from the requests that were seen. {unseen}Counted: twice the memory would have "
        f"kept {draw.tokens(report.again_tokens)} from being computed again."
    )
    curve = drawn_curve(report.curve, lambda num_blocks: draw.tokens(num_blocks * size))
    return f'{curve}<div class="note">{note}</div>'


def _prefixes(report: Report) -> str:
    if not report.common_prefixes:
        return '<div class="empty">No two cached sequences part after a common block.</div>'
    most = max(prefix.num_tokens for prefix in report.common_prefixes) or 1
    return "".join(
        f'<div class="reason"><div><span>{draw.tokens(prefix.num_tokens)}</span>'
        f"<b>{draw.count(prefix.num_ends)}</b><small>sequences</small></div>"
        '<div class="bar"><div style="width:100%">'
        f'<i class="found" style="width:{100 * prefix.num_tokens / most:.1f}%"></i></div></div></div>'
        for prefix in report.common_prefixes
    )


def _stream(report: Report) -> str:
    facts = {
        "state": report.state,
        "batches": draw.count(report.batches),
        **{name.replace("_", " "): draw.count(number) for name, number in report.troubles.items()},
        "beginning not known": draw.requests(report.seen.unknown_beginnings),
        "blocks": "-" if report.block_tokens is None else f"of {draw.tokens(report.block_tokens)}",
        "other sizes ignored": draw.count(report.seen.other_sizes),
        "recorded": "-" if report.num_recorded is None else draw.requests(report.num_recorded),
    }
    return (
        '<div class="model-facts">'
        + "".join(f"<div><span>{name}</span><b>{escape(value)}</b></div>" for name, value in facts.items())
        + "</div>"
    )

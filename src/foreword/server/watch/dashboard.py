"""The dashboard of a watched engine: the cache's content, the hits of requests, and the gain of more memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from html import escape

import uvicorn
from fastapi import FastAPI, Request
from nicegui import ui
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, RedirectResponse, Response

from foreword.cache import MissReason
from foreword.errors import TraceError
from foreword.server.access.operators import Operators
from foreword.server.api_errors import APIError
from foreword.server.dashboard import drawings as draw
from foreword.server.dashboard.drawings import drawn_curve
from foreword.server.dashboard.mount import PATH, mount_page
from foreword.server.dashboard.parts import Head, Html, card, figure, window_choice
from foreword.server.observe.metrics import Metric
from foreword.server.run import AnnouncingServer
from foreword.server.watch.watcher import Report, Watcher

REFRESH_S = 1.0
MOST_LETTERS = 60
_FIGURES = (
    ("Hit rate", "hit-rate"),
    ("Held", "held"),
    ("Stored", "stored"),
    ("Removed", "removed"),
    ("Computed again", "again"),
)
POLL_S = 0.2
REPORT_S = 1.0


class WatchView:
    """The page of one viewer."""

    def __init__(self, name: str, reports: WatchThread) -> None:
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
        for tile, text in zip(self._figures, figure_texts(report), strict=True):
            tile.show(text)
        self._bars.show(draw.token_bars(report.recent, now, window_s))
        self._why.show(_why(report))
        self._groups.show(_groups(report))
        self._newest.show(_newest(report))
        self._more.show(more_memory(report))
        self._prefixes.show(_prefixes(report))
        self._stream.show(_stream(report))


def figure_texts(report: Report) -> tuple[str, str, str, str, str]:
    """Return a text for each of `_FIGURES`."""
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
        (sums["name"][:MOST_LETTERS], f"{sums['found'] / max(1, sums['tokens']):.0%} of {draw.tokens(sums['tokens'])}")
        for sums in (*report.why["sessions"], *report.why["kinds"])
    )
    return draw.facts_row(rows)


def _newest(report: Report) -> str:
    prompts = reversed(report.why["newest"])
    rows = ((f"{draw.count(prompt['found'])} of {draw.tokens(prompt['tokens'])}", prompt["why"]) for prompt in prompts)
    return draw.facts_row(rows)


def more_memory(report: Report) -> str:
    """Draw, as HTML, the hit rate at each size of the pool, and the number of tokens that were computed again."""
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
    longest = max(prefix.num_tokens for prefix in report.common_prefixes) or 1
    rows = ((prefix.num_tokens, prefix.num_ends) for prefix in report.common_prefixes)
    return "".join(draw.row(draw.tokens(n), draw.count(ends), "sequences", {"found": n / longest}) for n, ends in rows)


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
    return draw.facts_row(facts.items())


logger = logging.getLogger(__name__)


class WatchThread:
    """A thread that polls a watcher, and makes one report each second for all viewers."""

    def __init__(self, watcher: Watcher) -> None:
        self.latest: Report = watcher.report()
        self.failure: str | None = None
        """Why the thread no longer follows the engine; None while it does."""
        self._watcher = watcher
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="foreword-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Afterwards the caller may use the watcher."""
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        try:
            reported = time.monotonic()
            while not self._ends:
                self._watcher.poll(POLL_S)
                if time.monotonic() - reported >= REPORT_S:
                    reported = time.monotonic()
                    self.latest = self._watcher.report()
        except TraceError as error:
            self.failure = str(error)
            logger.error("%s", error)
        except Exception as error:
            self.failure = f"the watcher has failed: {error}"
            logger.exception("the watcher has failed")


def make_app(watcher: Watcher, name: str, operators: Operators) -> FastAPI:
    """Make the app: the dashboard at /dashboard, /report as JSON and /metrics, all of them for operators."""
    thread = WatchThread(watcher)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        try:
            yield
        finally:
            thread.stop()

    app = FastAPI(title="foreword watch", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def home() -> Response:
        return RedirectResponse(f"{PATH}/")

    @app.exception_handler(APIError)
    async def refused(request: Request, error: APIError) -> Response:
        return _refusal(request, error)

    @app.get("/report")
    async def report(request: Request) -> Response:
        operators.check(request.scope)
        return JSONResponse({**thread.latest.as_dict(), "failure": thread.failure})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        operators.check(request.scope)
        if thread.failure is not None:  # old numbers would look like an engine at rest
            return Response(f"{thread.failure}\n", 503, media_type="text/plain")
        return Response(generate_latest(WatchMetrics(thread.latest)), media_type=CONTENT_TYPE_LATEST)

    mount_page(app, operators, name, lambda: WatchView(name, thread), _refusal)
    return app


class WatchMetrics(Collector):
    """The numbers of one report."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, under names that docs/guides/events.md lists."""
        report, seen = self._report, self._report.seen
        counters = {
            "requests": ("Requests that the stream showed.", seen.requests),
            "prompt_tokens": ("Tokens of their prompts, in whole blocks.", seen.prompt_tokens),
            "found_tokens": ("Those of them that were found.", seen.found_tokens),
            "again_tokens": ("Tokens that twice the memory would have kept.", report.again_tokens),
        }
        for name, (text, number) in counters.items():
            yield CounterMetricFamily(f"foreword_watch_{name}", text, value=number)
        missed = CounterMetricFamily(
            "foreword_watch_missed_tokens", "Computed prompt tokens, by reason.", labels=("reason",)
        )
        for reason in _REASONS:
            missed.add_metric((reason,), report.why["reasons"].get(reason, {"tokens": 0})["tokens"])
        yield missed
        yield GaugeMetricFamily("foreword_watch_blocks", "Blocks that the cache holds.", value=report.blocks)
        yield GaugeMetricFamily(
            "foreword_watch_is_whole",
            "1 if all events came; 0 while some are missing or nobody answers.",
            value=report.state == "exact",
        )
        yield GaugeMetricFamily(
            "foreword_watch_is_exact", "1 if the rate is exact, 0 for a bound.", value=report.is_exact
        )


_REASONS = (
    MissReason.NEVER_SEEN,
    MissReason.EVICTED,
    MissReason.PARTIAL_BLOCK,
    MissReason.SALT_DIFFERS,
    MissReason.ADAPTER_DIFFERS,
    MissReason.MEDIA_DIFFERS,
    MissReason.STATE_NOT_SAVED,
)
"""Reasons that a stream can show. Each label exists from the start, because a new label's first value has no rate."""


def _refusal(_: Request, error: APIError) -> Response:
    return JSONResponse({"error": str(error)}, error.status, error.headers)


def serve(watcher: Watcher, name: str, host: str, port: int, operator_key: str | None) -> None:
    """Serve until a signal comes. Print the address to standard output once the server is ready."""
    options = uvicorn.Config(
        make_app(watcher, name, Operators(operator_key, asks_for_keys=False)),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
        server_header=False,
    )

    def started(address: str) -> None:
        print(f"foreword: watching {name} at {address}{PATH}/", flush=True)

    AnnouncingServer(options, started, lambda: None).run()

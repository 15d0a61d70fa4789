"""Serves the dashboard of a watched engine until a signal stops it.

Knows the app, uvicorn and the thread that polls; page.py knows what is drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, RedirectResponse, Response

from foreword.cache import MissReason
from foreword.errors import TraceError
from foreword.server.access.operators import Operators
from foreword.server.api_errors import APIError
from foreword.server.dashboard.mount import PATH, mount_page
from foreword.server.observe.metrics import Metric
from foreword.server.run import AnnouncingServer
from foreword.server.watch.page import WatchView
from foreword.server.watch.watcher import Report, Watcher

logger = logging.getLogger(__name__)

POLL_S = 0.2
REPORT_S = 1.0


class WatchThread:
    """Polls a watcher, and makes a report each second. The last report is for everybody."""

    def __init__(self, watcher: Watcher) -> None:
        self.latest: Report = watcher.report()
        self.failure: str | None = None
        """Why it follows the engine no longer."""
        self._watcher = watcher
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="foreword-watch", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End; the watcher is free for the caller then."""
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
    """The dashboard at /dashboard, and the report as JSON at /report, both for operators."""
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

    @app.get("/report")
    async def report(request: Request) -> Response:
        try:
            operators.check(request.scope)
        except APIError as error:
            return _refusal(request, error)
        shown: dict[str, Any] = {**thread.latest.as_dict(), "failure": thread.failure}
        return JSONResponse(shown)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        try:
            operators.check(request.scope)
        except APIError as error:
            return _refusal(request, error)
        if thread.failure is not None:  # old numbers would look like an engine at rest
            return Response(f"{thread.failure}\n", 503, media_type="text/plain")
        return Response(exposition(thread.latest), media_type=CONTENT_TYPE_LATEST)

    mount_page(app, operators, name, lambda: WatchView(name, thread), _refusal)
    return app


def exposition(report: Report) -> bytes:
    """A report in Prometheus' text format."""
    return generate_latest(_Metrics(report))


class _Metrics(Collector):
    """The numbers of one report."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The metrics, under names that docs/guides/events.md lists."""
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
"""Those that a stream shows. A label that is there from the start has a rate from the first miss on."""


def _refusal(_: Request, error: APIError) -> Response:
    return JSONResponse({"error": str(error)}, error.status, error.headers)


def serve(watcher: Watcher, name: str, host: str, port: int, operator_key: str | None) -> None:
    """Serve until a signal comes. Prints the address to standard output once it is ready."""
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

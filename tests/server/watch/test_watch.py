"""`foreword watch`: reports, recordings that `foreword replay` reads, and the dashboard, from real streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from events.engine_with_events import EVERYTHING, EngineWithEvents, reachable
from events.raw_publisher import RawPublisher, key
from events.test_sources import answering
from foreword import cli
from foreword.cache import BlockRemoved, BlockStored, KVCacheEvent
from foreword.events.subscriber import Subscriber
from foreword.replay.trace import TraceReader
from foreword.server.watch.dashboard import figure_texts, more_memory
from foreword.server.watch.watcher import Report, Watcher
from live_server import wait_until
from polling import poll_until
from server.dashboard.test_dashboard import BUILD, browser, needs_browser

__all__ = ["browser"]


def stored(parent: int | None, *numbers: int) -> BlockStored:
    before = None if parent is None else key(parent)
    return BlockStored(tuple(map(key, numbers)), before, tuple(range(16 * len(numbers))), 16)


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(tuple(map(key, numbers)))


BATCHES: list[tuple[float, tuple[KVCacheEvent, ...]]] = [
    (0.0, (stored(None, 1, 2, 3, 4),)),
    (30.0, (stored(2, 5, 6),)),
    (60.0, (removed(4, 3), stored(2, 7, 8))),
    (90.0, (removed(6, 5), stored(2, 3, 4))),
    (120.0, (removed(8, 7), stored(2, 5, 6))),
    (150.0, ()),
]
"""Three conversations after one prompt of two blocks take turns in a pool of six blocks."""


def watch_batches(publisher: RawPublisher, watcher: Watcher, subscriber: Subscriber) -> Report:
    assert poll_until(subscriber, lambda _: publisher.has_consumer())
    for time_s, events in BATCHES:
        publisher.send(time_s, *events)
    deadline = time.monotonic() + 30
    while subscriber.follower.counts["batches"] < len(BATCHES) and time.monotonic() < deadline:
        watcher.poll(0.05)
    return watcher.report()


def test_a_report_says_what_was_found_and_what_more_memory_would_bring() -> None:
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.address) as subscriber,
        closing(Watcher(subscriber)) as watcher,
    ):
        empty = watcher.report()
        assert (empty.hit_rate, empty.pool_blocks, empty.curve) == (None, None, ())
        report = watch_batches(publisher, watcher, subscriber)
    assert (report.state, report.blocks, report.pool_blocks, report.block_tokens) == ("exact", 6, 6, 16)
    assert (report.seen.requests, report.seen.prompt_tokens, report.seen.found_tokens) == (5, 5 * 64, 4 * 32)
    assert report.hit_rate == 0.4
    assert report.again_tokens == 64, "3 and 4, then 5 and 6 were stored again"
    rates = {point.num_blocks: round(20 * point.hit_rate) for point in report.curve}
    assert (rates[6], rates[12]) == (8, 12), "of 20 prompt blocks"
    assert "in 6 blocks, 100% of the pool" in figure_texts(report)[1]
    assert "kept 64 tokens from being computed again" in more_memory(report)
    assert "has evicted nothing" in more_memory(empty)
    assert report.why["reasons"] == {
        "never_seen": {"requests": 3, "tokens": 128},
        "evicted": {"requests": 2, "tokens": 64},
    }
    assert [(one["tokens"], one["found"]) for one in report.why["kinds"]] == [(320, 128)]
    assert report.why["newest"][-1]["why"] == "it was evicted 30 s before"
    assert (report.verdict, empty.verdict) == (None, None)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["hit_rate"] == 0.4


def test_a_rate_is_exact_where_the_engine_reports_what_was_found_and_vllm_says_where(capsys) -> None:
    with RawPublisher() as publisher:
        source = {"0": {"publisher": "zmq", "endpoint": publisher.address.replace("127.0.0.1", "*")}}
        told: list[str] = []
        with answering(source) as url:
            thread = threading.Thread(
                target=lambda: told.append(
                    str(cli.main(["watch", url, "--interval", "0.2", "--reports", "10", "--full-reports"]))
                )
            )
            thread.start()
            publisher.wait()
            publisher.send(0.0, stored(None, 1, 2))
            publisher.send(30.0, stored(None, 1, 2))
            publisher.send(60.0, stored(None, 1, 2), stored(2, 3, 4))
            publisher.send(90.0)
            thread.join(60)
    assert told == ["0"]
    assert "; 50.0% of 128 tokens of 3 requests" in capsys.readouterr().out, "at least would stand before a bound"


def test_a_size_that_is_given_is_used() -> None:
    with (
        RawPublisher() as publisher,
        Subscriber(publisher.address) as subscriber,
        closing(Watcher(subscriber, num_blocks=10)) as watcher,
    ):
        report = watch_batches(publisher, watcher, subscriber)
    assert [point.num_blocks for point in report.curve][:4] == [10, 12, 15, 20]
    assert report.pool_blocks == 10


@pytest.mark.parametrize("hashes", ["int", "bytes"])
def test_a_recording_replays_to_what_the_engine_found(tmp_path: Path, hashes: str) -> None:
    """In a pool that never evicts, LRU without limit finds exactly what the engine found."""
    file = tmp_path / "seen.jsonl.gz"
    config = replace(EVERYTHING, kv_events_hashes=hashes)
    with EngineWithEvents(config, seed=2, num_blocks=4000) as engine:
        told = engine.publisher.addresses
        with (
            Subscriber(reachable(told["kv_events"]), snapshot=told["kv_events_snapshot"]) as subscriber,
            closing(Watcher(subscriber, record=file)) as watcher,
        ):
            assert poll_until(subscriber, lambda one: one.is_exact)
            for _ in range(8):
                engine.work(10)
            wanted = len(engine.held())
            deadline = time.monotonic() + 30
            while len(subscriber.mirror.blocks) < wanted and time.monotonic() < deadline:
                watcher.poll(0.05)
        report = watcher.report()
    assert report.num_recorded == report.seen.requests > 10
    held: set[int] = set()
    found = 0
    times: list[float] = []
    for request in TraceReader(file):
        keys = request.keys.tolist()
        found += next((at for at, key in enumerate(keys) if key not in held), len(keys)) * request.block_tokens
        held.update(keys)
        times.append(request.timestamp_ms or 0.0)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert request.block_tokens == 4
    assert 0 < found <= report.seen.found_tokens, "answers were found too, and are no part of a recording"
    assert report.seen.found_tokens - found <= report.seen.output_tokens * report.seen.requests


class WatchProcess:
    """`foreword watch` with a dashboard, in a process of its own."""

    def __init__(self, address: str, *more: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foreword.cli", "watch", address, "--port", "0", *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "watching" in line
        self.url = line.split()[-1].removesuffix("/dashboard/")


@contextmanager
def watching(publisher: RawPublisher, *more: str, **environment: str) -> Iterator[WatchProcess]:
    """A dashboard that has seen all batches."""
    one = WatchProcess(publisher.address, *more, **environment)
    try:
        publisher.wait()
        for time_s, events in BATCHES:
            publisher.send(time_s, *events)
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def test_the_dashboard_shows_another_engine_s_cache_to_this_machine_alone(tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    with RawPublisher() as publisher, watching(publisher, "--record", str(file)) as watch:
        url = watch.url
        wait_until(lambda: httpx.get(f"{url}/report").json()["seen"]["requests"] == 5)
        report = httpx.get(f"{url}/report").json()
        assert (report["state"], report["pool_blocks"], report["recorded"], report["failure"]) == ("exact", 6, 5, None)
        page = httpx.get(f"{url}/", follow_redirects=True)
        assert page.status_code == 200
        assert "What would more memory bring" in page.text
        assert "kept 64 tokens from being computed again" in page.text
        metrics = httpx.get(f"{url}/metrics").text
        assert "foreword_watch_found_tokens_total 128.0" in metrics
        assert 'foreword_watch_missed_tokens_total{reason="evicted"} 64.0' in metrics
        assert "foreword_watch_is_whole 1.0" in metrics
        for path in ("/report", "/metrics", "/dashboard/"):
            refused = httpx.get(url + path, headers={"Host": "elsewhere.example"})
            assert refused.status_code == 403
            assert "open to this machine alone" in refused.json()["error"]
        watch.process.send_signal(signal.SIGTERM)
        assert watch.process.wait(30) == 0
    assert len(file.read_text().splitlines()) == 5


def test_with_a_key_the_dashboard_asks_for_it() -> None:
    with RawPublisher() as publisher, watching(publisher, FOREWORD_OPERATOR_KEY="sesame") as watch:
        assert httpx.get(f"{watch.url}/report").status_code == 401
        form = httpx.get(f"{watch.url}/dashboard/", headers={"accept": "text/html"})
        assert "Operator's key" in form.text.replace("&#x27;", "'")
        assert httpx.get(f"{watch.url}/report", headers={"Authorization": "Bearer sesame"}).status_code == 200


@needs_browser
def test_the_page_in_a_browser(browser) -> None:
    with RawPublisher() as publisher, watching(publisher) as watch:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(f"{watch.url}/dashboard/")
        page.get_by_text("\u2265 40%").wait_for()
        assert "exact" in page.get_by_test_id("state").inner_text()
        assert "64 tokens" in page.get_by_test_id("again").inner_text().replace("\n", " ")
        assert page.get_by_test_id("more-memory").locator("svg").count() == 1
        publisher.send(180.0, stored(2, 20, 21, 22, 23))
        publisher.send(210.0)
        page.get_by_text("6 requests seen").wait_for()
        assert "evicted" in page.get_by_test_id("why").inner_text()
        assert "new from token 32 on" in page.get_by_test_id("newest").inner_text()
        publisher.send(240.0, removed(99))
        page.screenshot(path=str(BUILD / "watch.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "3"], "rank=3 needs vLLM's http:// address"),
        (["--port", "0", "--json"], "--port shows a dashboard and prints no reports"),
        (["--port", "0", "--host", "192.0.2.1"], "cannot listen at host='192.0.2.1', port=0"),
        (["--port", "99999"], "port=99999 is not a port; use 1 to 65535"),
        (["--blocks", "0"], "a pool of 0 blocks holds nothing"),
        (["--record", "/nowhere/seen.jsonl"], "trace '/nowhere/seen.jsonl' cannot be written: No such file"),
        (["--interval", "nan"], "interval=nan is out of range; use 0.05 to 86,400 seconds"),
        (["--interval", "-1"], "interval=-1 is out of range"),
        (["--reports", "0"], "reports=0 shows nothing"),
        (["--port", "x"], "invalid int value: 'x'"),
    ],
)
def test_mistakes_are_named(arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["watch", "tcp://127.0.0.1:1", *arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_with_an_error() -> None:
    with RawPublisher() as publisher:
        command = [sys.executable, "-m", "foreword.cli", "watch", publisher.address, "--record", "/dev/full"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            publisher.wait()
            for time_s, events in BATCHES:
                publisher.send(time_s, *events)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2
    assert "trace '/dev/full' cannot be written: No space left on device; make room for it" in errors
    assert "Traceback" not in errors

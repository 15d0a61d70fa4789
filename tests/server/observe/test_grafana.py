"""The Grafana dashboard's expressions, evaluated by a real Prometheus that scrapes a real server."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from events.raw_publisher import RawPublisher
from free_ports import free_port
from live_server import ServerProcess, post, wait_until
from server.watch.test_watch import stored, watching

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS = shutil.which("prometheus")
OPERATOR = "sk-operator"
NUM_SCRAPES = 6
WINDOW = "30s"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus"),
]


@contextmanager
def prometheus(folder: Path, target: str, watch: str) -> Iterator[str]:
    """Prometheus with our own configuration, except for the targets and how often they are scraped."""
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in config
    assert "scrape_interval: 5s" in config
    config = (
        config.replace("127.0.0.1:8000", target)
        .replace("127.0.0.1:8001", watch)
        .replace("scrape_interval: 5s", "scrape_interval: 1s")
    )
    (folder / "prometheus.yml").write_text(config)
    (folder / "operator.key").write_text(OPERATOR)
    url = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            PROMETHEUS or "",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={url}",
            "--log.level=warn",
        ]
    )
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(url: str, expression: str) -> list[dict[str, Any]]:
    body = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert body["status"] == "success", f"{expression}: {body}"
    result: list[dict[str, Any]] = body["data"]["result"]
    return result


@contextmanager
def prompts_published(publisher: RawPublisher) -> Iterator[None]:
    """Another engine's requests, one each half second, until the block ends."""
    over = threading.Event()

    def publish() -> None:
        for number in itertools.count():
            publisher.send(200.0 + 30 * number, stored(2, 100 + number, 1100 + number))
            if over.wait(0.5):
                break

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        yield
    finally:
        over.set()
        publishing.join()


@contextmanager
def requests_running(url: str) -> Iterator[None]:
    """Requests that hit and requests that miss, until the block ends."""
    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            document = "".join(f"The code of falcon {at} is {number // 2 + at}.\n" for at in range(20))
            post(url, "/v1/completions", {"prompt": document, "max_tokens": 4}).raise_for_status()
            number += 1
            over.wait(0.1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def expressions() -> list[tuple[str, str]]:
    """Panel and expression, as Grafana sends them with its variables filled in."""
    dashboards = [json.loads(file.read_text()) for file in sorted((DEPLOY / "grafana").glob("*.json"))]
    return [
        (panel["title"], target["expr"].replace("$model", ".*").replace("$__rate_interval", WINDOW))
        for dashboard in dashboards
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_every_expression_of_the_dashboard_is_valid_and_has_data(tmp_path):
    asked = expressions()
    assert len(asked) > 20
    assert not [expression for _, expression in asked if "$" in expression], "a variable was not filled in"
    with (
        ServerProcess("--operator-key", OPERATOR) as server,
        RawPublisher() as publisher,
        watching(publisher, FOREWORD_OPERATOR_KEY=OPERATOR) as watch,
        prometheus(tmp_path, *(one.url.removeprefix("http://") for one in (server, watch))) as url,
    ):
        wait_until(lambda: answers(url))
        assert httpx.get(f"{server.url}/metrics").status_code == 401, "the key in the configuration is not needed"
        with requests_running(server.url), prompts_published(publisher):
            wait_until(
                lambda: (up := query(url, "count_over_time(up[5m])")) and float(up[0]["value"][1]) >= NUM_SCRAPES
            )
            without_data = []
            for panel, expression in asked:
                values = [float(series["value"][1]) for series in query(url, expression)]
                if not values or not all(math.isfinite(value) for value in values):
                    without_data.append((panel, expression, values))
            assert without_data == []
        assert [float(series["value"][1]) for series in query(url, "min_over_time(up[5m])")] == [1.0, 1.0]
        models = httpx.get(
            f"{url}/api/v1/label/model_name/values", params={"match[]": "foreword_num_requests_running"}
        ).json()["data"]
        assert models == ["foreword-demo"]

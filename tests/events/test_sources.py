"""Asking a server where it publishes events, over real HTTP."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from foreword.errors import ConfigError
from foreword.events.sources import EventSource, find_source

ONE = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
"""vLLM 0.33's answer for one rank, in part."""


@contextmanager
def answering(body: object, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/kv_event_sources" else 404)
            self.end_headers()
            for part in body if isinstance(body, list) and isinstance(body[0], bytes) else [body]:
                self.wfile.write(part if isinstance(part, bytes) else json.dumps(part).encode())
                time.sleep(0.02 if part is not body else 0)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_wildcards_are_the_server_s_host() -> None:
    more = {**ONE, "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://0.0.0.0:6000", "topic": "kv"}
    with answering({"0": ONE, "1": more}) as url:
        assert find_source(f"{url}/v1/", 0) == EventSource("tcp://127.0.0.1:5557", None, "")
        assert find_source(url, 1) == EventSource("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6000", "kv")
        with pytest.raises(ConfigError, match="for ranks 0, 1, and no rank is given; use --rank"):
            find_source(url)
        with pytest.raises(ConfigError, match="for ranks 0, 1, and rank=2 is none of them"):
            find_source(url, 2)
    with answering({"3": {**ONE, "endpoint": "tcp://10.0.0.7:5557"}}) as url:
        assert find_source(url).events == "tcp://10.0.0.7:5557"


def test_a_loopback_address_of_another_machine_is_not_followed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.bind", lambda *_: None)  # as where ip_nonlocal_bind lets any address be bound
    for name in ("endpoint", "replay_endpoint"):
        answer = json.dumps({"0": {**ONE, name: "tcp://127.0.0.1:5557"}}).encode()
        monkeypatch.setattr("foreword.events.sources._answer", lambda _, answer=answer: answer)
        for host in ("localhost", "0.0.0.0", "127.0.0.5"):  # this machine, whatever its name
            found = find_source(f"http://{host}:8000")
            assert "tcp://127.0.0.1:5557" in (found.events, found.replay)
        with pytest.raises(ConfigError, match=rf'{name}=tcp://127.0.0.1:5557, which only .* "tcp://\*:5557"'):
            find_source("http://192.0.2.7:8000")  # which no machine has


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 200, "publishes no events"),
        ({"0": {**ONE, "publisher": "null"}}, 200, "publishes no events"),
        ({"0": ONE}, 404, "it answers 404"),
        (b"<html>", 200, "Expecting value"),
        ([ONE], 200, "its answer is a list"),
        ({"0": {}}, 200, "a source without an endpoint"),
        ({"zero": ONE}, 200, "invalid literal"),
        ({"0": {"endpoint": "tcp://[::"}}, 200, "Invalid IPv6 URL"),
        (b"[" * 100_000, 200, "does not say where"),
    ],
)
def test_an_answer_that_names_no_source_is_an_error(body: object, status: int, message: str) -> None:
    with answering(body, status) as url, pytest.raises(ConfigError, match=message):
        find_source(url)
    with pytest.raises(ConfigError, match="give the address itself, such as tcp://HOST:5557"):
        find_source("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="does not say where"):
        find_source("http://[::1:8000")


def test_an_answer_has_a_deadline_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.sources.ASK_S", 0.2)
    drops = [b" "] * 50 + [json.dumps({"0": ONE}).encode()]
    with answering(drops) as url, pytest.raises(ConfigError, match="no whole answer came in"):
        find_source(url)

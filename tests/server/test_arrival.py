"""How calls come in: clients that leave, bodies that nobody reads, and what is counted and logged of them."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from foreword.errors import EngineError
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from foreword.server.run import AnnouncingServer
from live_server import ENDLESS, ServerProcess, ServerThread, post, wait_until

MB = 2**20


@pytest.fixture
def served(llm: LLM) -> Iterator[ServerThread]:
    options = ServerConfig(api_key="sk-a", operator_key="sk-o", max_body_bytes=MB, log_requests=True)
    with ServerThread(llm, options) as server:
        yield server


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def head(path: str, length: int, key: str = "sk-a") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("body", ["", "half", "whole", "stream"])
def test_a_client_that_leaves_at_any_time_leaves_one_debug_line(
    served: ServerThread, caplog: pytest.LogCaptureFixture, body: str
) -> None:
    caplog.set_level(logging.DEBUG)
    fields = '"max_tokens": 4000, "ignore_eos": true' + (', "stream": true' if body == "stream" else "")
    content = f'{{"prompt": "x", {fields}}}'.encode()
    with connect(served.url) as client:
        client.sendall(head("/v1/completions", len(content)))
        client.sendall({"": b"", "half": content[:9]}.get(body, content))
        if body == "stream":
            assert client.recv(10)
        elif body == "whole":
            wait_until(lambda: served.service.records.running())
        else:
            wait_until(lambda: served.ask(lambda _: True))
    wait_until(lambda: any(record.message.endswith("has left") for record in caplog.records))
    wait_until(lambda: not served.service.records.running())
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]
    assert [record.levelname for record in caplog.records if record.message.endswith("has left")] == ["DEBUG"]


@pytest.mark.parametrize(
    ("key", "size", "declared", "status"),
    [("sk-a", 3 * MB, True, 413), ("sk-a", 3 * MB, False, 413), ("sk-b", 3 * MB, True, 401), ("sk-b", MB, False, 401)],
)
def test_a_body_that_is_refused_is_answered_and_not_reset(
    served: ServerThread, key: str, size: int, declared: bool, status: int
) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(size // 1024):
            yield b"x" * 1024

    headers = {"x-api-key": key, "Content-Type": "application/json"}
    content = b"x" * size if declared else pieces()
    for _ in range(5):
        answer = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        content = content if declared else pieces()


def test_every_call_is_counted_by_endpoint_and_status_and_a_refused_one_has_a_line(
    served: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key = {"x-api-key": "sk-a"}
    post(served.url, "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=key)
    post(served.url, "/v1/completions", {"prompt": "x", "n": -1}, headers=key)
    post(served.url, "/v1/completions", {"prompt": "x"})
    for number in range(3):
        httpx.get(f"{served.url}/made-up/{number}")
    httpx.delete(f"{served.url}/v1/cache/entries/none", headers=key)
    text = httpx.get(f"{served.url}/metrics", headers={"x-api-key": "sk-o"}).text
    for endpoint, status, count in (
        ("/v1/completions", 200, 1),
        ("/v1/completions", 400, 1),
        ("/v1/completions", 401, 1),
        ("unknown", 404, 3),
        ("/v1/cache/entries/{entry_id}", 404, 1),
    ):
        assert f'endpoint="{endpoint}",model_name="foreword-demo",status="{status}"}} {count:.1f}' in text
    lines = [record.fields for record in caplog.records if getattr(record, "fields", {}).get("event") == "refused"]
    assert [(line["status"], line["code"], line["param"]) for line in lines[:2]] == [
        (400, None, "n"),
        (401, "invalid_api_key", None),
    ]
    for name in ("process_resident_memory_bytes", "foreword_build_info", "foreword_config_info"):
        assert f"\n{name}" in text
    assert 'foreword_request_prompt_tokens_count{cache="miss"' in text


def test_a_tenants_key_is_known_and_not_enough_for_what_is_the_operators(served: ServerThread) -> None:
    for key, status in (("sk-a", 403), ("sk-b", 401), ("", 401), ("sk-o", 200)):
        assert httpx.get(f"{served.url}/metrics", headers={"x-api-key": key}).status_code == status


def test_an_error_repeats_at_most_a_little_of_what_was_sent(served: ServerThread) -> None:
    key, long = {"x-api-key": "sk-a"}, "x" * 200_000
    for path, body in (
        ("/v1/completions", {"prompt": "x", "model": long}),
        ("/v1/completions", {"prompt": "x", long: 1}),
        ("/v1/chat/completions", {"messages": [{"role": long, "content": "x"}]}),
        ("/v1/pml/schemas", {"schema": f"<{long}/>"}),
        ("/v1/pml/schemas", {"schema": f'<schema name="s"><module name="m" scaffold="{long}"/></schema>'}),
        ("/v1/pml/completions", {"schema": long}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": f"({long}"}}),
    ):
        answer = post(served.url, path, body, headers=key)
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 4000


def test_work_of_one_crew_keeps_no_other_kind_waiting(served: ServerThread) -> None:
    go_on = threading.Event()
    key = {"x-api-key": "sk-a"}
    crew = served.service.crews.schemas

    async def fill() -> None:
        await crew.run(lambda: go_on.wait(60))

    served.start(fill())
    wait_until(lambda: crew.num_running == 1)
    try:
        long = {"prompt": "x " * 4000, "max_tokens": 1}
        assert post(served.url, "/v1/completions", long, headers=key).status_code in (200, 400)
        grammar = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}
        assert post(served.url, "/v1/completions", grammar, headers=key).status_code == 200
        content = b'{"schema": "<schema name=\'s\'/>"}'
        with connect(served.url) as client:
            client.sendall(head("/v1/pml/schemas", len(content)) + content)
            wait_until(lambda: crew.num_waiting == 1)
            assert set(crew._waiting) == {"default"}, "callers are tenants"
        wait_until(lambda: crew.num_waiting == 0)  # its client has left
    finally:
        go_on.set()


@pytest.mark.slow
def test_the_process_ends_within_its_time_whatever_clients_have_it_do() -> None:
    module = "<module name='m{}'>" + "q7z " * 1500 + "</module>"
    schema = f"<schema name='s'>{''.join(module.format(number) for number in range(150))}</schema>"
    with ServerProcess("--shutdown-timeout-s", "1", "--shutdown-delay-s", "0") as server:
        leaving = []
        for _ in range(5):
            client = connect(server.url)
            content = json.dumps({"schema": schema}).encode()
            client.sendall(head("/v1/pml/schemas", len(content)) + content)
            leaving.append(client)
        endless = post(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert endless.status_code == 200, "others are answered beside the schemas"
        for client in leaving[:3]:
            client.close()
        server.terminate()
        assert server.wait() == 0


def test_a_process_that_cannot_end_is_ended() -> None:
    code = (
        "import sys, threading, foreword.server.run as run\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "run.end_within(0.1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_what_follows_a_server_runs_whichever_signal_ended_it(name: str) -> None:
    code = (
        "import signal, uvicorn\n"
        "from foreword.server.run import AnnouncingServer\n"
        "async def app(scope, receive, send):\n"
        "    for phase in ('startup', 'shutdown'):\n"
        "        await receive()\n"
        "        await send({'type': f'lifespan.{phase}.complete'})\n"
        "config = uvicorn.Config(app, host='127.0.0.1', port=0, log_config=None, lifespan='on')\n"
        f"AnnouncingServer(config, lambda _: signal.raise_signal(signal.{name}), lambda: None).run()\n"
        "print('it goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it goes on\n", "")


@pytest.mark.parametrize("fails", ["startup", "shutdown", None])
def test_a_server_that_does_not_start_or_stop_in_order_is_an_error(fails: str | None) -> None:
    """uvicorn only logs some of it; the exit code would be 0."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.{'failed' if phase == fails else 'complete'}"})

    def end(_: str = "") -> None:
        server.should_exit = True

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on")
    server = AnnouncingServer(config, end, lambda: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises((EngineError, SystemExit)) if fails else nullcontext() as ended:
            server.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended is None or isinstance(ended.value, EngineError) or ended.value.code != 0


def test_the_server_is_not_ready_from_the_signal_on_and_still_takes_calls(served: ServerThread) -> None:
    assert httpx.get(f"{served.url}/ready").status_code == 200
    served.service.is_stopping = True
    assert httpx.get(f"{served.url}/ready").status_code == 503
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_the_expected_wait_is_told_where_the_queue_is_full(llm: LLM) -> None:
    with ServerThread(llm, ServerConfig(max_queued=0)) as server:
        most = llm.config.scheduler.max_num_seqs
        body = {"prompt": "x", "max_tokens": 4000, "n": most, "stream": True, **ENDLESS}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            assert stream.status_code == 200
            answer = post(server.url, "/v1/completions", {"prompt": "x"})
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["Retry-After"]) <= 600

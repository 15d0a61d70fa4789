"""Between NiceGUI and its clients: those that leave early, and the headers that browsers and proxies need."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from pathlib import Path

import httpx
import pytest

from foreword.server.dashboard.mount import FILES_NEVER_CHANGE, Edge
from live_server import ServerProcess, client

LEAVE_AT_ONCE = struct.pack("ii", 1, 0)


def ask_and_leave(url: str, path: str, method: str = "GET") -> None:
    """Send a request and reset the connection before the answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaving:
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LEAVE_AT_ONCE)
        leaving.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n".encode())


@pytest.mark.slow
def test_clients_that_leave_before_their_answer_leave_nothing_in_the_log(tmp_path: Path):
    with (tmp_path / "log").open("w+") as log, ServerProcess(log=log) as server:
        page = httpx.get(f"{server.url}/dashboard/").text
        file = re.search(r"/dashboard/_nicegui/[\d.]+/static/[^\"' ]+\.js", page)
        assert file is not None
        assert httpx.get(f"{server.url}{file[0]}").headers["Cache-Control"] == FILES_NEVER_CHANGE
        assert httpx.get(f"{server.url}/dashboard/").headers["Cache-Control"] == "no-store"
        polling = "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=polling"
        for _ in range(60):
            for path in (file[0], "/dashboard/", polling, "/v1/models"):
                ask_and_leave(server.url, path)
            ask_and_leave(server.url, polling, "POST")
        assert client(server.url).models.list().data
        server.terminate()
        assert server.wait() == 0
        log.seek(0)
        said = log.read()
        assert "Traceback" not in said
        assert said.index("stopping: ") < said.index("the server has stopped")


def serve_once(app, *, headers: tuple[tuple[bytes, bytes], ...] = (), path: str = "/dashboard/files/x", leaves=False):
    """What an app behind an Edge sends to one request."""
    sent = []
    scope = {"type": "http", "path": path, "root_path": "/dashboard", "headers": list(headers)}

    async def receive():
        return {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(Edge(app, files="/files/")(scope, receive, send))
    return sent


async def failing(scope, receive, send):
    await receive()
    raise RuntimeError("No response returned.")


def test_what_fails_after_the_client_has_left_is_nobodys_error_but_other_failures_are():
    assert serve_once(failing, leaves=True) == []
    with pytest.raises(RuntimeError):
        serve_once(failing)


@pytest.mark.parametrize(
    ("path", "status", "kept"),
    [
        ("/dashboard/files/x", 200, True),
        ("/dashboard/files/x", 404, False),
        ("/dashboard/files/x", 500, False),
        ("/dashboard/files/dynamic_resources/x", 200, False),
        ("/dashboard/", 200, False),
    ],
)
def test_files_are_kept_by_browsers_and_nothing_else(path, status, kept):
    async def answering(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})

    [start] = serve_once(answering, path=path)
    assert ((b"cache-control", FILES_NEVER_CHANGE.encode()) in start["headers"]) is kept


def test_a_redirection_stays_below_a_proxys_prefix():
    async def redirecting(scope, receive, send):
        await send({"type": "http.response.start", "status": 303, "headers": [(b"location", b"/dashboard/")]})

    [start] = serve_once(redirecting, path="/dashboard/x", headers=((b"x-forwarded-prefix", b"/llm"),))
    assert start["headers"] == [(b"location", b"/llm/dashboard/")]

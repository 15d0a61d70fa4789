"""Limits: the queue, bodies, prompts, time; and the end of the server."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from foreword.errors import ConfigError
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerProcess, ServerThread, client, embedded_llm, post, wait_until

LONG = {"model": MODEL, "prompt": "The code of the falcon", "max_tokens": 600, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with embedded_llm(max_num_seqs=2) as llm:
        yield llm


def test_a_full_queue_refuses_with_429_and_says_when_to_come_back(llm):
    with ServerThread(llm, ServerConfig(max_queued=1)) as server, ThreadPoolExecutor(3) as pool:
        with server.held():
            running = [pool.submit(post, server.url, "/v1/completions", {**LONG, "max_tokens": 60}) for _ in range(3)]
            wait_until(lambda: server.service.thread.num_choices == 3)
            refused = post(server.url, "/v1/completions", LONG)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            with pytest.raises(openai.RateLimitError):
                client(server.url).completions.create(model=MODEL, prompt="x", n=2)
        assert [answer.result().status_code for answer in running] == [200, 200, 200]
        assert post(server.url, "/v1/completions", {**LONG, "max_tokens": 1}).status_code == 200


def test_a_body_that_is_too_long_is_refused_whether_or_not_it_says_so(llm):
    with ServerThread(llm, ServerConfig(max_body_bytes=2000)) as server:
        assert post(server.url, "/v1/completions", {"prompt": "x" * 3000}).status_code == 413

        def pieces():
            yield b'{"prompt": "'
            for _ in range(30):
                yield b"x" * 100

        answer = httpx.post(
            f"{server.url}/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert "2000" in answer.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(llm):
    with (
        ServerThread(llm, ServerConfig(body_timeout_s=0.2)) as server,
        socket.create_connection(server.url.removeprefix("http://").split(":")) as slow,
    ):
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        slow.settimeout(30)
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"within 0.2 s (--body-timeout-s); send it faster" in answer


def test_a_prompt_beyond_the_servers_limit_is_refused(llm):
    with ServerThread(llm, ServerConfig(max_prompt_tokens=5)) as server:
        answer = post(server.url, "/v1/completions", {"prompt": "one two three four five six seven"})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert post(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_request_that_takes_too_long_is_ended(llm):
    with ServerThread(llm, ServerConfig(request_timeout_s=0.3)) as server:
        assert post(server.url, "/v1/completions", {**LONG, "max_tokens": 4000}).status_code == 408
        with pytest.raises(openai.APIError, match="longer than"):
            list(
                client(server.url).completions.create(
                    model=MODEL, prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
                )
            )
        wait_until(lambda: not server.service.records.running())
        assert {record.outcome for record in server.service.records.recent(2)} == {"timeout"}
        assert server.ask(lambda engine: engine.manager.get_usage()) == 0.0


def test_a_request_that_waits_too_long_for_a_thread_is_ended(llm):
    """Whatever it waits for: here all threads that tokenize long texts are busy with others'."""
    may_go = threading.Event()
    with ServerThread(llm, ServerConfig(request_timeout_s=0.5)) as server:
        crew = server.service.crews.text

        async def occupy():
            await asyncio.gather(*(crew.run(lambda: may_go.wait(60)) for _ in range(2)))

        busy = server.start(occupy())
        wait_until(lambda: crew.num_running == 2)
        for body in ({"stream": False}, {"stream": True}):
            answer = post(server.url, "/v1/completions", {"prompt": "word " * 2000, "max_tokens": 1, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert crew.num_waiting == 0
        may_go.set()
        busy.result(60)


@pytest.mark.slow
def test_sigterm_loses_no_accepted_answer():
    with ServerProcess() as server, ThreadPoolExecutor(8) as pool:
        accepted = [
            client(server.url).completions.create(
                model=MODEL, prompt=f"{number}", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            for number in range(4)
        ]
        whole = [pool.submit(post, server.url, "/v1/completions", {**LONG, "max_tokens": 100}) for _ in range(4)]
        streams = [pool.submit(lambda stream=stream: list(stream)) for stream in accepted]
        probe = client(server.url)
        # All eight are in: four were answered with a header, four are computing.
        wait_until(lambda: probe.models.list().data)
        for stream in accepted:
            assert stream.response.status_code == 200
        server.terminate()
        for chunks in (stream.result() for stream in streams):
            assert chunks[-1].choices[0].finish_reason == "length"
        finished = [answer.result() for answer in whole if not answer.exception()]
        assert all(answer.json()["usage"]["completion_tokens"] == 100 for answer in finished)
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_body_bytes", 0), ("max_queued", -1), ("max_prompt_tokens", 0), ("port", 70000), ("api_key", "")],
)
def test_an_option_out_of_range_is_named(option, value):
    with pytest.raises(ConfigError, match=option):
        ServerConfig(**{option: value})


@pytest.mark.parametrize("name", ["request_timeout_s", "body_timeout_s", "shutdown_timeout_s"])
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, 0, -1])
def test_a_time_limit_that_no_clock_can_keep_is_refused(name, seconds):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: seconds})

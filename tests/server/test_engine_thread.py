"""The engine behind HTTP when something goes wrong: clients that leave, steps that fail, readers that sleep."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from doors import runner_of
from foreword.engine import Engine, Prompt
from foreword.request import SamplingParams
from foreword.server.answer_stream import AnswerStream, Delta, Finished, Job
from foreword.server.engine_thread import EngineThread
from foreword.server.options import ServerConfig
from foreword.server.records import Listener, Records, RequestRecord
from hash_runner import HashEngine, continuation
from late_runner import VOCAB_SIZE, LateRunner
from live_server import ENDLESS, FALCON, MODEL, ServerThread, client, post, wait_until
from server.dialects.gemini.sdk import ENDLESS as ENDLESS_CONTENT

LONG = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "temperature": 2, "seed": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
SCHEMA = {"type": "array", "items": {"enum": [1]}, "minItems": 3000}
"""Keeps an answer from ending where no field does."""
FORM = {"type": "json_schema", "schema": SCHEMA}
GEMINI = f"/v1beta/models/{MODEL}:streamGenerateContent"
STREAMS = {
    "/v1/completions": {**LONG, "stream": True, "n": 3},
    "/v1/messages": {**CHAT, "max_tokens": 2000, "output_config": {"format": FORM}},
    GEMINI: ENDLESS_CONTENT,
    f"{GEMINI}?alt=sse": ENDLESS_CONTENT,
    "/api/chat": {**CHAT, "format": SCHEMA, "options": {"num_predict": 2000}},
    "/v1/responses": {"model": MODEL, "input": "x", "stream": True, "text": {"format": {**FORM, "name": "ones"}}},
}


@pytest.fixture
def server(llm):
    with ServerThread(llm, ServerConfig()) as server:
        yield server
        assert_all_free(server) if server.service.thread.failure is None else None


def assert_all_free(server: ServerThread) -> None:
    wait_until(lambda: not server.service.records.running())
    server.ask(lambda engine: engine.check_integrity())
    assert server.ask(lambda engine: engine.manager.get_usage()) == 0.0
    assert not server.ask(lambda engine: engine.has_unfinished_requests())
    assert server.service.thread.num_choices == 0


def break_runner(llm, monkeypatch, failing) -> None:
    """Have the runner fail on batches for which `failing(batch)` is true."""
    runner = runner_of(llm.engine)
    execute = runner.execute

    def broken(batch):
        if failing(batch):
            raise RuntimeError("the device is on fire")
        return execute(batch)

    monkeypatch.setattr(runner, "execute", broken)


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_a_stream_frees_its_blocks(server, path):
    with httpx.stream("POST", f"{server.url}{path}", json=STREAMS[path], timeout=60) as answer:
        pieces = answer.iter_bytes()  # closes the stream when it is dropped
        next(pieces)
        assert server.ask(lambda engine: engine.manager.get_usage()) > 0
    assert_all_free(server)
    assert server.service.records.recent(1)[0].outcome == "disconnected"


def test_a_client_that_does_not_wait_for_a_whole_answer_frees_its_blocks(server):
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as client_that_leaves:
        body = json.dumps(LONG).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client_that_leaves.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(server.service.records.running)
    assert_all_free(server)
    assert server.service.records.recent(1)[0].outcome == "disconnected"


@pytest.mark.slow
def test_a_reader_that_sleeps_does_not_hold_up_others(server):
    with socket.socket() as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        sleeper.connect((host, int(port)))
        wish = {**LONG, "max_tokens": 150, "n": 16, "logprobs": 20, "stream": True}  # megabytes
        body = httpx.Request("POST", server.url, json=wish).content
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        sleeper.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        assert sleeper.recv(12) == b"HTTP/1.1 200"
        answer = client(server.url).chat.completions.create(model=MODEL, messages=FALCON, temperature=0)
        assert answer.choices[0].message.content == "4821"
        # Its own answer is computed to the end although nobody reads it.
        wait_until(lambda: server.service.records.recent(1)[0].endpoint == "completions")
        assert server.service.records.recent(1)[0].outcome == "length"
    assert_all_free(server)


def test_a_request_that_breaks_a_step_fails_alone_in_time(server, llm, monkeypatch):
    def poisoned(batch):
        return any(entry.request.params.seed == 666 for entry in batch.entries)

    break_runner(llm, monkeypatch, poisoned)
    ask = client(server.url)
    with pytest.raises(openai.InternalServerError, match="on fire"):
        ask.chat.completions.create(model=MODEL, messages=FALCON, seed=666)
    answer = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0)
    assert answer.choices[0].message.content == "4821"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [record.outcome for record in server.service.records.recent(2)] == ["stop", "failed"]


def test_a_stream_that_breaks_says_so(server, llm, monkeypatch):
    break_runner(llm, monkeypatch, lambda batch: any(e.request.num_output_tokens > 3 for e in batch.entries))
    with pytest.raises(openai.APIError, match="on fire"):
        list(client(server.url).completions.create(model=MODEL, prompt="x", stream=True, extra_body=ENDLESS))


def test_a_broken_engine_turns_health_red_and_refuses_clearly(server, llm, monkeypatch):
    break_runner(llm, monkeypatch, lambda batch: True)
    for _ in range(3):
        assert post(server.url, "/v1/chat/completions", {"messages": FALCON}).status_code == 500
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert "on fire" in health.json()["reason"]
    refused = post(server.url, "/v1/chat/completions", {"messages": FALCON})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_failed"


def test_an_engine_that_dies_fails_what_runs_and_what_comes(server, llm, monkeypatch):
    def die() -> None:
        raise SystemError("the engine is gone")

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(post, server.url, "/v1/completions", LONG) for _ in range(4)]
        wait_until(lambda: len(server.service.records.running()) == 4)
        monkeypatch.setattr(llm.engine, "has_unfinished_requests", die)
        assert {answer.result().status_code for answer in running} == {503}
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert post(server.url, "/v1/completions", LONG).status_code == 503
    monkeypatch.undo()
    llm.engine.check_integrity()


def test_while_the_loop_is_busy_deltas_pile_up_and_nothing_is_lost_or_reordered(server, llm, monkeypatch):
    body = {"model": MODEL, "prompt": "The code of the falcon", "max_tokens": 60, "seed": 3, **ENDLESS}
    whole = post(server.url, "/v1/completions", body).json()["choices"][0]["text"]
    is_busy, runner = threading.Event(), runner_of(llm.engine)
    execute = runner.execute

    def wait_for_the_loop(batch):
        """The engine does not get ahead before the loop is busy."""
        if any(entry.request.num_output_tokens == 2 for entry in batch.entries):
            assert is_busy.wait(60)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", wait_for_the_loop)

    async def keep_busy() -> None:
        """On the event loop, until the engine is far ahead of it."""
        [record] = server.service.records.running()
        is_busy.set()
        wait_until(lambda: record.num_output_tokens >= 40)

    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        busy = server.start(keep_busy())
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        busy.result(60)
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(texts) == whole
    assert len(texts) < 60, "some chunks carry several tokens"


def test_deltas_that_piled_up_are_read_as_one_with_all_of_their_log_probabilities(server):
    body = {"model": MODEL, "messages": FALCON, "max_tokens": 40, "logprobs": True, "stream": True, "n": 2, **ENDLESS}
    body |= {"temperature": 1, "seed": 3}
    whole = post(server.url, "/v1/chat/completions", body | {"stream": False}).json()["choices"]
    chunks = list(
        client(server.url).chat.completions.create(
            extra_body=ENDLESS, **{k: v for k, v in body.items() if k not in ENDLESS}
        )
    )
    for choice in whole:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice["index"]]
        assert "".join(c.delta.content or "" for c in mine) == choice["message"]["content"]
        tokens = [token.token for c in mine if c.logprobs for token in c.logprobs.content]
        assert tokens == [token["token"] for token in choice["logprobs"]["content"]]
        assert mine[-1].finish_reason == choice["finish_reason"]


def test_an_answer_that_ended_while_the_next_launch_failed_is_told_as_it_is():
    """The runner refuses the step that is planned behind the one whose token ends the answer."""
    world = HashEngine.build(vocab_size=VOCAB_SIZE)
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits)
    prompt = np.arange(1, 6, dtype=np.int32)
    tokens = continuation(prompt.tolist(), seed=7, vocab_size=VOCAB_SIZE)
    third = [next(tokens) for _ in range(3)][2]
    launch = runner.launch

    def refusing(batch):
        if any(entry.end == len(prompt) + 3 for entry in batch.entries):
            raise RuntimeError("out of memory")
        return launch(batch)

    runner.launch = refusing
    params = SamplingParams(max_tokens=20, seed=7, stop_token_ids=(third,))
    job = Job(RequestRecord("a", "a", "t", "completions", prompt), Prompt(prompt), params)

    async def ask():
        thread = EngineThread(engine, Records())
        thread.start()
        stream = thread.submit([job], whole=True)
        await stream.accepted()
        async for _ in stream.deltas():
            pass
        await thread.stop()
        return stream.outputs[0].outputs[0]

    answer = asyncio.run(ask())
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", 3)


def test_nothing_that_listens_ends_the_engine_whatever_it_raises(caplog):
    def fail(_: object) -> None:
        raise RuntimeError("no")

    async def ask(number: int, thread: EngineThread) -> str | None:
        record = RequestRecord(str(number), str(number), "t", "completions", np.arange(1, 6, dtype=np.int32))
        stream = thread.submit([Job(record, Prompt(record.prompt_token_ids), SamplingParams(max_tokens=2))], whole=True)
        await stream.accepted()
        async for _ in stream.deltas():
            pass
        return stream.outputs[0].outputs[0].finish_reason

    async def ask_twice():
        world = HashEngine.build(vocab_size=VOCAB_SIZE)
        records = Records()
        records.on_finished(Listener("of records", fail))
        after_step = Listener("after steps", fail)
        thread = EngineThread(world.engine, records, after_step=[after_step])
        thread.start()
        reasons = [await ask(number, thread) for number in range(2)]
        await thread.stop()
        return reasons, [*records.listeners(), after_step.health]

    reasons, listeners = asyncio.run(ask_twice())
    assert reasons == ["length", "length"]
    assert [(health.num_failures, health.failure) for health in listeners] == [(2, "RuntimeError")] * 2
    assert sum("requests are served all the same" in entry.message for entry in caplog.records) == 2, "once for each"


def test_a_look_that_nobody_waits_for_any_more_does_not_end_the_engine():
    async def look():
        thread = EngineThread(HashEngine.build(vocab_size=VOCAB_SIZE).engine, Records())
        busy = threading.Event()
        thread.start()
        waiting = asyncio.ensure_future(thread.call(lambda _: busy.wait(60)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(thread.call(lambda _: 1), 0.05)
        busy.set()
        assert await waiting
        assert await thread.call(lambda _: 2) == 2
        await thread.stop()

    asyncio.run(look())


@pytest.mark.slow
@pytest.mark.alone
def test_a_reader_that_comes_late_takes_time_in_proportion_to_the_tokens():
    """The event loop serves nobody else meanwhile."""

    class Nobody:
        def forget(self, stream: AnswerStream) -> None:
            pass

        def abort(self, stream: AnswerStream, outcome: str) -> None:
            pass

    async def seconds(num_tokens: int) -> float:
        stream = AnswerStream(Nobody(), [], whole=False)
        for token_id in range(num_tokens):
            stream.put([Delta(0, "word", [token_id], None, None)])
        stream.put([Delta(0, ".", [0], None, "stop"), Finished()])
        started = time.thread_time()
        [[delta]] = [deltas async for deltas in stream.deltas()]
        taken = time.thread_time() - started
        assert delta == Delta(0, "word" * num_tokens + ".", [*range(num_tokens), 0], None, "stop")
        return taken

    few, many = (min(asyncio.run(seconds(count)) for _ in range(3)) for count in (1000, 16_000))
    assert many < 64 * few

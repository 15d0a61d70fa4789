"""Many clients at once, and requests that no client would send."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from foreword.server.options import ServerConfig
from live_server import FACTS, MODEL, ServerProcess, ServerThread, embedded_llm, wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS = 200


def test_200_streams_with_random_disconnects_leave_the_pool_free_and_intact():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(max_queued=300)) as server:
        outcomes = asyncio.run(_many_streams(server.url))
        assert len(outcomes) == NUM_STREAMS
        assert outcomes.count("complete") > NUM_STREAMS // 4
        assert outcomes.count("left") > NUM_STREAMS // 4
        wait_until(lambda: not server.service.records.running())
        server.ask(lambda engine: engine.check_integrity())
        assert server.ask(lambda engine: engine.manager.get_usage()) == 0.0
        free = server.ask(lambda engine: engine.manager.get_num_free_blocks())
        assert free == server.ask(lambda engine: engine.manager.num_blocks)
        assert server.service.thread.num_choices == 0
        told = [record.outcome for record in server.service.records.recent(NUM_STREAMS)]
        assert told.count("disconnected") >= outcomes.count("left") // 2  # others left after the last token


async def _many_streams(url: str) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return await asyncio.gather(*(_one_stream(client, url, number) for number in range(NUM_STREAMS)))


async def _one_stream(client: httpx.AsyncClient, url: str, number: int) -> str:
    chance = random.Random(number)
    num_lines = chance.choice([0, 1, 3, 10, 10_000, 10_000])
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": FACTS * chance.randint(1, 8)},
            {"role": "user", "content": f"{number}"},
        ],
        "max_tokens": chance.randint(5, 30),
        "n": chance.choice([1, 1, 2]),
        "stream": True,
        "ignore_eos": True,
        "seed": number,
    }
    await asyncio.sleep(chance.random())
    lines = []
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if len(lines) > num_lines:
                return "left"
    assert "data: [DONE]" in lines
    assert sum('"finish_reason":"length"' in line for line in lines) == body["n"]
    return "complete"


def test_no_request_that_the_openapi_document_allows_makes_the_server_fail():
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error

    with ServerProcess("--max-model-len", "512", "--request-timeout-s", "20") as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        schema.config.base_url = server.url
        paths = []
        for result in schema.get_all_operations():
            operation = result.ok()
            paths.append(operation.path)

            @given(case=operation.as_strategy())
            @settings(
                max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
            )
            def try_out(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=[not_a_server_error], timeout=60)

            try_out()
        assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/v1/messages"} <= set(paths)
        assert any(path.endswith(":generateContent") for path in paths)
        assert httpx.get(f"{server.url}/health").status_code == 200

"""What a server says: at its start, about its traffic, and about each request if it is asked to."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.config import EngineConfig
from foreword.model.cpu.coded_product import HAS_INSTRUCTIONS
from foreword.model.cpu.product import can_multiply
from foreword.server.observe.log import TrafficLog, log_addresses
from foreword.server.options import ServerConfig
from foreword.server.records import Records, RequestRecord, TenantStats
from live_server import ServerProcess, post, wait_until

PROMPT = "A line that no other test sends: the violet badger keeps seven umbrellas."


def lines(log: Path, event: str) -> list[dict[str, Any]]:
    complete = log.read_text().rpartition("\n")[0]
    found = [json.loads(line) for line in complete.splitlines()]
    return [line for line in found if line.get("event") == event]


def test_a_server_says_at_its_start_what_it_serves_and_where(server: ServerProcess, server_log: Path) -> None:
    wait_until(lambda: lines(server_log, "advice"))  # a thread writes them
    [model] = lines(server_log, "model")
    dtype = "float32" if HAS_INSTRUCTIONS and not can_multiply() else "bfloat16"
    assert (model["dtype"], model["device"], model["layers"]) == (dtype, "cpu", {"full attention": 2})
    assert model["max_model_len"] == 8192
    [pool] = lines(server_log, "pool")
    assert pool["tokens"] == pool["blocks"] * pool["block_tokens"] == (32_768 if dtype == "bfloat16" else 16_384)
    assert pool["bytes"] == 64 * 2**20
    assert "64 MiB" in pool["message"]
    [address] = lines(server_log, "listening")
    assert address["url"] == server.url
    assert address["dashboard"] == f"{server.url}/dashboard"
    assert any("--api-key" in line["message"] for line in lines(server_log, "advice"))


def test_a_server_says_how_far_its_model_is_while_it_loads(server: ServerProcess, server_log: Path) -> None:
    wait_until(lambda: lines(server_log, "loaded"))
    stages = [line["stage"] for line in lines(server_log, "loading")]
    assert "reading the tokenizer" in stages
    assert any(stage.startswith("reading the weights") for stage in stages)
    assert len(lines(server_log, "loaded")) == 1


def test_requests_are_logged_with_counts_and_never_with_their_text(server: ServerProcess, server_log: Path) -> None:
    answers = [
        post(server.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}).json()
        for _ in range(2)
    ]

    def logged() -> list[dict[str, Any]]:
        ids = [answer["id"] for answer in answers]
        return [line for line in lines(server_log, "request") if line["request_id"].rpartition("-")[0] in ids]

    wait_until(lambda: len(logged()) == 2)
    first, second = logged()
    assert first["outcome"] == second["outcome"] == "length"
    assert first["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]
    assert second["cached_tokens"] == answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["generated_tokens"] == 3
    assert 0 < first["first_token_ms"] <= first["total_ms"]
    assert "badger" not in server_log.read_text()


def test_traffic_is_logged_while_there_is_any_and_not_after(server: ServerProcess, server_log: Path) -> None:
    before = len(lines(server_log, "traffic"))
    post(server.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True})

    def ended() -> list[dict[str, Any]]:
        return [line for line in lines(server_log, "traffic")[before:] if line["requests_ended"]]

    wait_until(ended)
    line = ended()[-1]
    assert line["generated_tokens_per_s"] > 0
    assert line["requests_waiting"] == 0
    assert 0 <= line["pool_in_use"] <= 1
    assert "requests ended" in line["message"]


def test_a_quiet_server_logs_nothing_and_a_failed_look_does_not_end_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        num_looks = 0

        async def look(self) -> None:
            self.num_looks += 1
            raise RuntimeError("the engine is busy")

    class Busy(Records):
        def totals(self) -> TenantStats:
            return TenantStats(requests=self.num_totals())

        def num_totals(self) -> int:
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls

    async def run(records: Records, num_looks: int) -> Failing:
        insight = Failing()
        log = TrafficLog(insight, records, 0.01)  # type: ignore[arg-type]
        log.start()
        await asyncio.sleep(0.1)
        while insight.num_looks < num_looks:
            await asyncio.sleep(0.01)
        await log.stop()
        await log.stop()
        return insight

    caplog.set_level(logging.INFO)
    assert asyncio.run(run(Records(), 0)).num_looks == 0
    assert not caplog.records
    assert asyncio.run(run(Busy(), 3)).num_looks >= 3
    assert [record.levelname for record in caplog.records] == ["ERROR"], "at most one a minute"


def test_traffic_is_the_difference_of_two_totals() -> None:
    before = TenantStats(5, 100, 40, 30, Counter(stop=5))
    after = TenantStats(9, 300, 190, 70, Counter(stop=7, refused=1, timeout=1))
    new = after.since(before)
    assert (new.outcomes, new.queried_tokens, new.output_tokens) == (Counter(stop=2, refused=1, timeout=1), 200, 40)
    assert new.hit_rate == 150 / 200
    assert after.since(after) == TenantStats()


def test_totals_hold_what_running_requests_have_had_so_far() -> None:
    records = Records()
    for name, runs in (("a", True), ("b", True), ("c", False)):
        record = RequestRecord(name, name, "tenant", "completions", np.arange(10, dtype=np.int32))
        records.open(record)
        if runs:
            record.first_scheduled_time, record.num_cached_tokens, record.num_output_tokens = 1.0, 4, 3
    open_ones = records.totals()
    assert (open_ones.requests, open_ones.queried_tokens, open_ones.hit_tokens) == (2, 20, 8)
    for record in records.running():
        records.close(record, "stop")
    ended = records.totals()
    assert (ended.requests, ended.queried_tokens, ended.output_tokens) == (2, 20, 6)
    assert ended.since(open_ones).output_tokens == 0, "nothing is counted twice"
    assert ended.outcomes == {"stop": 3}


def test_a_server_that_anybody_reaches_without_a_key_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = EngineConfig.from_options("m")
    for host, key, num_warnings in [
        ("127.0.0.1", None, 0),
        ("::1", None, 0),
        ("0.0.0.0", "k", 0),
        ("0.0.0.0", None, 1),
    ]:
        caplog.clear()
        log_addresses("http://x", options, ServerConfig(host=host, api_key=key))
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == num_warnings
        assert "--kv-cache-memory-bytes" in caplog.text


@pytest.mark.parametrize(
    ("tier", "server", "warns"),
    [
        ({"cache_dir": "kv"}, {"api_key": "k"}, True),
        ({"cache_store": "valkey://x"}, {"keys_file": Path("keys")}, True),
        ({"cache_dir": "kv"}, {"api_key": "k", "server_secret": "s"}, False),
        ({"cache_dir": "kv"}, {}, False),
        ({}, {"api_key": "k"}, False),
    ],
)
def test_a_server_with_keys_whose_tier_a_restart_cannot_use_warns(
    caplog: pytest.LogCaptureFixture, tier: dict[str, Any], server: dict[str, Any], warns: bool
) -> None:
    log_addresses("http://x", EngineConfig.from_options("m", **tier), ServerConfig(**server))
    assert ("set FOREWORD_SERVER_SECRET" in caplog.text) is warns

"""What requests leave behind is bounded in bytes, whatever they bring."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from foreword.grammar import KeptGrammars
from foreword.server.access.tenants import Tenant
from foreword.server.kept_responses import KeptResponses
from foreword.server.records import Records, RequestRecord
from live_server import ServerProcess

MB = 2**20


def test_finished_records_are_dropped_by_their_bytes_the_oldest_first():
    records = Records(max_bytes=MB)
    for number in range(100):
        record = RequestRecord(f"r{number}", f"{number}", "t", "", np.zeros(10_000, np.int32))
        records.open(record)
        records.close(record, "stop")
        assert records.num_finished_bytes <= MB
    kept = records.recent(1000)
    assert [record.request_id for record in kept] == [str(number) for number in range(99, 99 - len(kept), -1)]
    assert 20 < len(kept) < 30
    assert records.of_response("r99", "t") is not None
    assert records.of_response("r0", "t") is None


def test_kept_responses_are_dropped_by_their_bytes_the_oldest_first():
    kept, tenant = KeptResponses(max_bytes=MB), Tenant("t")
    for number in range(100):
        told = [{"role": "user", "content": "x" * 10_000}]
        kept.keep(tenant, told, {"id": f"r{number}", "instructions": "y" * 20_000})
        assert kept.num_bytes <= MB
    assert json.loads(kept.get(tenant, "r99")[1])["id"] == "r99"
    kept.delete(tenant, "r99")
    for number in range(50, 99):
        if number > 70:
            kept.delete(tenant, f"r{number}")
    assert 0 <= kept.num_bytes < MB / 4


def test_kept_grammars_are_dropped_by_their_bytes_the_least_used_first():
    kept = KeptGrammars(max_bytes=10 * MB)
    kept.keep("json", "first", 1)
    for number in range(40):
        kept.keep("json", f"{number}" * 5000, number)
        assert kept.get("json", "first") == 1
        assert kept.num_bytes <= 10 * MB
    assert kept.get("json", "0" * 5000) is None
    assert kept.get("json", "39" * 5000) == 39


def test_what_is_kept_is_shown(server):
    text = httpx.get(f"{server.url}/metrics").text
    shown = set(re.findall(r'foreword_kept_bytes{model_name="[^"]+",what="(\w+)"}', text))
    assert shown == {"records", "responses", "cached_contents", "grammars", "adapters", "record_queue", "schemas"}


# --------------------------------------------------------------------- a real server


def schema(chance: random.Random, num_properties: int) -> dict[str, object]:
    names = [f"k{chance.getrandbits(40)}" for _ in range(num_properties)]
    return {"type": "object", "properties": {name: {"type": "string", "maxLength": 9} for name in names}}


def hostile(number: int) -> tuple[str, dict[str, object]]:
    """A request that tries to leave much behind."""
    chance = random.Random(number)
    words = " ".join(str(chance.getrandbits(30)) for _ in range(200))
    match number % 8:
        case 0:  # large distinct schemas, of which few are compiled at once
            form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema(chance, 300)}}
            return "/v1/completions", {"prompt": "x", "max_tokens": 1, "response_format": form}
        case 1:
            text = {"format": {"type": "json_schema", "name": "f", "schema": {"description": words * 50}}}
            return "/v1/responses", {"input": "x", "max_output_tokens": 1, "text": text}
        case 2:
            return "/v1/responses", {"input": words[:400], "instructions": words[:800], "max_output_tokens": 1}
        case 3:
            metadata = {f"{n}{chance.getrandbits(40)}": words[:512] for n in range(16)}
            return "/v1/responses", {"input": "x", "max_output_tokens": 1, "metadata": metadata}
        case 4:
            return "/v1/responses", {"input": "x", "metadata": {"a": words * 1000}}
        case 5:
            return "/v1/chat/completions", {
                "messages": [{"role": "user", "content": words[:400]}],
                "max_tokens": 1,
                "prompt_cache_key": words * 100,
            }
        case 6:
            return "/v1/completions", {"prompt": [chance.choices(range(2000), k=200)], "max_tokens": 1, "logprobs": 20}
        case _:
            return "/v1/completions", {
                "prompt": words[:400],
                "max_tokens": 1,
                "cache_salt": str(number),
                "user": words[:500],
            }


@pytest.mark.slow
def test_three_thousand_hostile_requests_leave_less_than_200_mb_behind():
    with ServerProcess() as server, httpx.Client(base_url=server.url, timeout=300) as client:

        def memory() -> int:
            status = Path(f"/proc/{server.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

        def send(number: int) -> int:
            path, body = hostile(number)
            return client.post(path, json=body).status_code

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send, range(-64, 0)))  # what is imported, compiled and allocated once
            before = memory()
            statuses = list(pool.map(send, range(3_000)))
        assert max(statuses) < 500
        assert statuses.count(200) > 1_500
        assert memory() - before < 200 * MB, f"{(memory() - before) / MB:.0f} MB"
        kept = re.findall(r'foreword_kept_bytes{.*what="(\w+)"} (\S+)', client.get("/metrics").text)
        assert sum(float(num_bytes) for _, num_bytes in kept) < 256 * MB

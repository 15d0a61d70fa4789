"""`foreword serve --record`: a trace in order of arrival that replay reads, and that holds no text."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from foreword.cli import main
from foreword.errors import TraceError
from foreword.replay.caches import LruCache
from foreword.replay.trace import TraceReader
from foreword.server.observe.recorder import Recorder
from foreword.server.options import ServerConfig
from foreword.server.records import RequestRecord
from live_server import ServerProcess, ServerThread, embedded_llm, post, wait_until

DOCUMENT = "".join(f"The code of the amber falcon {number} is 4821.\n" for number in range(20))


def test_what_was_served_is_replayed_with_the_same_reuse(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(record=file)) as server:
        for question in ("one", "two", "three"):
            body = {"prompt": DOCUMENT + question, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            assert post(server.url, "/v1/completions", body).status_code == 200
        assert post(server.url, "/v1/completions", {"prompt": "", "max_tokens": 2}).status_code == 400
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 3, "refused requests are left out"
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    whole = len(DOCUMENT.split()) // 16
    first, second, third = (line["hash_ids"] for line in lines)
    assert first[:whole] == second[:whole] == third[:whole]
    assert first[-1] != second[-1]
    assert "amber" not in file.read_text()
    assert [request.num_output_tokens for request in TraceReader(file)] == [2, 2, 2]


SCHEMA = f"""<schema name="notes"><system>You answer from the notes.</system>
  <module name="falcon">{DOCUMENT}</module><module name="lisbon">{DOCUMENT[::-1]}</module></schema>"""


@pytest.mark.usefixtures("on_cpu")
def test_a_replay_finds_of_linked_prompts_what_the_server_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the first link, and for prompts with gaps nothing that plain prompts have."""
    file, rng = tmp_path / "trace.jsonl", np.random.default_rng(4)
    head, one, two, three = (rng.integers(10, 300, length).tolist() for length in (16, 48, 64, 32))
    options = {"allow_links": True, "block_size": 16, "prefix_index": "hash", "max_model_len": 2048}
    found: list[tuple[int, int]] = []
    with embedded_llm(**options) as llm, ServerThread(llm, ServerConfig(record=file, link_gate=0.0)) as server:
        assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200

        def ask(path: str, **body: object) -> None:
            answer = post(server.url, path, {"max_tokens": 2, "ignore_eos": True, **body})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            linked = usage.get("foreword", {"linked_tokens": 0})["linked_tokens"]
            found.append((usage["prompt_tokens_details"]["cached_tokens"], linked))
            wait_until(lambda: not server.service.records.running())

        def ask_documents(*documents: list[int], **body: object) -> None:
            question = rng.integers(10, 300, 9).tolist()
            ask("/v1/pml/completions", instructions=head, documents=documents, question=question, **body)

        for document in (one, two, three):  # so that the record has the sources
            ask("/v1/completions", prompt=[*head, *document, 5])
        for link in ("first-16", "first-16", "none", None, "deviation-20"):
            ask_documents(one, two, three, **({} if link is None else {"link": link}))
        ask_documents(two, three, one, link="first-16")
        ask_documents(two, three, one)
        for text, more in (("One?", {"link": "all"}), ("Two?", {"link": "all"}), ("Three?", {}), ("Four?", {})):
            ask("/v1/pml/completions", schema="notes", modules={"lisbon": {}}, text=text, **more)
        totals = server.service.records.totals()
    cache, requests = LruCache(10_000), list(TraceReader(file))
    replayed = [request.tokens_of(cache.admit(request)) for request in requests]
    assert replayed == [cached for cached, _ in found]
    assert replayed[3:5] == [64, 80], "the exact beginning, and what the first link comes after"
    assert (replayed[-4], replayed[-2]) == (0, 0), "a gap, or none, and nothing in common"
    assert min(replayed[-3], replayed[-1]) > 300
    assert sum(replayed) == totals.hit_tokens
    assert sum(request.num_prompt_tokens for request in requests) == totals.queried_tokens
    assert main(["replay", str(file), "--capacity", "10000", "--policy", "lru", "--json"]) == 0
    told_by_command = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told_by_command["hit_ratio_tokens"]["lru"]["10000"] == pytest.approx(totals.hit_rate, abs=1e-4)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [line.get("linked") for line in lines]
    assert told[:3] == [None] * 3
    assert told[3] == {"method": "first-16", "prompt_tokens": 16 + 48 + 64 + 32 + 9, "linked_tokens": found[3][1]}
    assert lines[3]["input_length"] == 16 + 48 + 16
    assert [one["linked_tokens"] if one else 0 for one in told] == [linked for _, linked in found]


def record(number: int, arrival_time: float, salt: str | None = None) -> RequestRecord:
    tokens = np.arange(20, dtype=np.int32)
    return RequestRecord(
        "",
        str(number),
        "",
        "",
        tokens,
        salt,
        arrival_time=arrival_time,
        first_scheduled_time=1.0,
        num_output_tokens=number,
    )


def test_requests_are_written_in_order_of_arrival_though_they_end_in_another(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    early, late, last = record(1, 10.0), record(2, 11.0), record(3, 12.0, salt="red")
    running = [early, late, last]
    recorder = Recorder(file, lambda: running)
    for ended in (late, early, last):
        running.remove(ended)
        recorder.record(ended)
    recorder.close()
    recorder.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["output_length"] for line in lines] == [1, 2, 3]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"]
    assert not set(lines[0]["hash_ids"]) & set(lines[2]["hash_ids"]), "other salts share nothing"


def test_a_prompt_that_begins_with_a_link_is_one_token(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    recorder = Recorder(file, list)
    recorder.record(replace(record(1, 10.0), link_method="none", linked_from=0))
    recorder.close()
    [request] = TraceReader(file, strict=True)
    assert (request.num_prompt_tokens, len(request.keys)) == (1, 1)
    assert json.loads(file.read_text())["linked"] == {"method": "none", "prompt_tokens": 20, "linked_tokens": 0}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no-such-folder"):
        Recorder(tmp_path / "no-such-folder" / "trace.jsonl", list)


# ------------------------------------------------------------------- a full disk

ASK = {"prompt": DOCUMENT, "max_tokens": 2, "ignore_eos": True}


@pytest.mark.slow
def test_a_file_that_cannot_grow_stops_nobody_and_is_written_once_it_can_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with ServerProcess("--record", str(file)) as server:

        def num_served(count: int) -> int:
            return sum(post(server.url, "/v1/completions", ASK).status_code == 200 for _ in range(count))

        assert num_served(1) == 1
        wait_until(file.read_text)
        size = file.stat().st_size
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size + 100, hard))  # the next line has room for its head
        assert num_served(3) == 3
        wait_until(lambda: "failing_listeners" in httpx.get(f"{server.url}/health").json())
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 200
        assert answer.json()["failing_listeners"]["record"]["reason"] == "File too large"
        assert 'foreword_listener_failing{listener="record",model_name="foreword-demo"} 1.0' in metrics(server.url)
        assert file.read_text().count("\n") == len(list(TraceReader(file))) == 1, "no part of a line"

        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
        wait_until(lambda: file.read_text().count("\n") == 4)
        assert num_served(1) == 1
        wait_until(lambda: file.read_text().count("\n") == 5)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        assert 'foreword_listener_lost_requests_total{listener="record",model_name="foreword-demo"} 0.0' in metrics(
            server.url
        )
    assert len(list(TraceReader(file))) == 5, "though the process was killed"


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics").text


def test_what_waits_for_the_disk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.server.observe.recorder.MAX_WAITING_BYTES", 5000)
    recorder = Recorder(Path("/dev/full"), list)
    for number in range(100):
        recorder.record(record(number, float(number)))
    wait_until(lambda: recorder.health.failure == "No space left on device")
    assert recorder.num_waiting_bytes < 10_000
    assert recorder.health.num_lost > 90
    recorder.close()

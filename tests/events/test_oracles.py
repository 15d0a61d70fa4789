"""The consumers themselves, where they lie: vLLM's and SGLang's classes from their wheels, and Dynamo's indexer.

    pip download --no-deps vllm sglang -d WHEELS        FOREWORD_WHEELS=WHEELS
    pip install ai-dynamo-runtime                       FOREWORD_DYNAMO=python (of the environment that has it)

Nothing of vLLM or SGLang is run but the definitions of their structs: the rest needs CUDA.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import httpx
import msgspec
import numpy as np
import pytest

from events.engine_with_events import EVERYTHING, EngineWithEvents, as_ints, reachable
from events.test_wire import A, B, as_decoded, variant
from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys
from foreword.engine import Prompt
from foreword.events.wire import decode_batch
from foreword.request import SamplingParams
from free_ports import free_port
from live_server import wait_until

WHEELS = os.environ.get("FOREWORD_WHEELS")
DYNAMO = os.environ.get("FOREWORD_DYNAMO")
STRUCTS = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
needs_wheels = pytest.mark.skipif(
    WHEELS is None, reason="needs FOREWORD_WHEELS, a folder with vLLM's and SGLang's wheels"
)
needs_dynamo = pytest.mark.skipif(DYNAMO is None, reason="needs FOREWORD_DYNAMO, a python with ai-dynamo-runtime")


def structs_of(wheel: str, file: str) -> dict[str, Any]:
    """The struct classes that a file in a wheel defines."""
    (path,) = Path(WHEELS or "").glob(f"{wheel}-*.whl")
    with zipfile.ZipFile(path) as archive:
        tree = ast.parse(archive.read(file))
    wanted = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in STRUCTS]
    names: dict[str, Any] = {
        "msgspec": msgspec,
        "Any": Any,
        "Optional": Optional,
        "Union": Union,
        "ExternalBlockHash": bytes | int,
    }
    exec(compile(ast.Module(wanted, []), file, "exec", dont_inherit=True), names)
    return names


@needs_wheels
@pytest.mark.parametrize("name", ["map int", "map bytes", "map int groups", "map bytes groups"])
def test_vllm_reads_ours_and_writes_what_we_read(name: str) -> None:
    vllm = structs_of("vllm", "vllm/distributed/kv_events.py")
    decoded = msgspec.msgpack.decode(variant(name), type=vllm["KVEventBatch"])
    first, second, removed, cleared = decoded.events
    assert [type(event).__name__ for event in decoded.events] == [
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    whole = "bytes" in name
    assert first.block_hashes == [key if whole else int.from_bytes(key[-8:], "big") for key in (A, B)]
    assert (first.token_ids, first.block_size, first.lora_name, first.medium) == ([5, 70_000, 7, 8], 2, "sql", "GPU")
    assert first.extra_keys == [("red",), None]
    assert second.parent_block_hash == first.block_hashes[1]
    assert (removed.group_idx, cleared) == (0 if "groups" in name else None, vllm["AllBlocksCleared"]())
    assert decode_batch(msgspec.msgpack.encode(decoded), 3) == as_decoded(name)
    fields = vllm["BlockStored"].__struct_fields__
    everything = dict.fromkeys(fields[7:], None) | {"locality": "LOCAL", "session_id": "s", "ownership": "x"}
    event = vllm["BlockStored"]([1], 2, [3, 4], 2, None, "CPU", None, **everything)
    newest = vllm["KVEventBatch"](1.0, [event, vllm["BlockRemoved"]([1], "CPU", locality="REMOTE")])
    assert decode_batch(msgspec.msgpack.encode(newest), 0).events == (
        BlockStored((1,), 2, (3, 4), 2, medium="CPU"),
        BlockRemoved((1,), "CPU"),
    )


@needs_wheels
def test_sglang_writes_what_we_read() -> None:
    sglang = structs_of("sglang", "sglang/srt/disaggregation/kv_events.py")
    stored = sglang["BlockStored"]([-5], None, [1, 2], 2, None, "GPU", cache_salt="red", lora_name="sql")
    batch = sglang["EventBatch"](1.0, [stored, sglang["BlockRemoved"]([-5], "GPU"), sglang["AllBlocksCleared"]()])
    assert decode_batch(msgspec.msgpack.encode(batch), 0).events == (
        BlockStored((-5,), None, (1, 2), 2, "sql", (("red",),)),
        BlockRemoved((-5,)),
        AllBlocksCleared(),
    )


class Indexer:
    """Dynamo's indexer, as a process that follows one engine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def register(self, engine: EngineWithEvents) -> None:
        told = engine.publisher.addresses
        body = {
            "instance_id": 1,
            "endpoint": reachable(told["kv_events"]),
            "replay_endpoint": told["kv_events_replay"],
            "model_name": "m",
            "block_size": 4,
        }
        assert httpx.post(f"{self.url}/register", json=body).status_code == 201

    def held(self) -> set[int]:
        """The hashes that it thinks the engine holds."""
        held: set[int] = set()
        for one in httpx.get(f"{self.url}/dump").json().get("m:default", {}).get("events", ()):
            held |= {block["block_hash"] for block in one["event"]["data"]["stored"]["blocks"]}
        return held

    def overlap(self, tokens: list[int], **more: str) -> int:
        """The tokens of a prompt that it finds."""
        answer = httpx.post(f"{self.url}/query", json={"token_ids": tokens, "model_name": "m", **more}).json()
        return int(answer["scores"].get("1", {}).get("0", 0))


@contextmanager
def dynamo_indexer() -> Iterator[Indexer]:
    port = free_port()
    command = [DYNAMO or "", "-m", "dynamo.indexer", "--port", str(port), "--block-size", "4", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers)
        yield Indexer(url)
    finally:
        process.kill()
        process.wait()


@needs_dynamo
@pytest.mark.parametrize("encoding", ["map", "array"])
def test_dynamo_s_indexer_holds_what_the_pool_holds(encoding: str) -> None:
    """It comes late and asks for a replay; then it follows random traffic with evictions and resets.

    Dynamo 1.6.1 reads neither whole hashes nor a publisher's id, and takes blocks under two salts for one, because it
    names a block by its tokens and its adapter.
    """
    rng = random.Random(encoding)

    def work(num_requests: int) -> None:
        for _ in range(num_requests):
            engine.ask([rng.randint(0, 1) for _ in range(rng.randrange(4, 30))])

    config = replace(EVERYTHING, kv_events_snapshot=None, kv_events_encoding=encoding)
    with EngineWithEvents(config, seed=3) as engine, dynamo_indexer() as indexer:
        work(10)
        indexer.register(engine)
        for number in range(6):
            if number == 3:
                engine.built.engine.reset_prefix_cache()
            work(10)
            wait_until(lambda: indexer.held() == as_ints(engine.held()))
        assert engine.held()
        assert engine.built.manager.ledger.evictions.total() > 100


@needs_dynamo
def test_dynamo_finds_as_much_of_a_prompt_as_the_engine() -> None:
    rng = random.Random(1)
    config = replace(EVERYTHING, kv_events_snapshot=None)
    with EngineWithEvents(config, seed=4) as engine, dynamo_indexer() as indexer:
        indexer.register(engine)
        time.sleep(0.5)
        overlaps = set()
        families = [[rng.randint(0, 1) for _ in range(20)] for _ in range(3)]
        for number in range(60):
            own = [rng.randint(0, 1) for _ in range(rng.randrange(8))]
            tokens = rng.choice(families)[: rng.randrange(4, 21)] + own
            prompt = Prompt(np.array(tokens, np.int32), extra_keys=ExtraKeys())
            wait_until(lambda: indexer.held() == as_ints(engine.held()))
            found = indexer.overlap(tokens)
            engine.built.engine.add_request(f"d{number}", prompt, SamplingParams(max_tokens=1))
            outputs = []
            while engine.built.engine.has_unfinished_requests():
                outputs += engine.built.engine.step()
            # The engine always computes a prompt's last token, Dynamo counts whole blocks.
            assert found in (outputs[-1].num_cached_tokens // 4 * 4, len(tokens) // 4 * 4)
            assert min(found, len(tokens) - 1) // 4 == outputs[-1].num_cached_tokens // 4
            overlaps.add(found)
        assert len(overlaps) >= 5

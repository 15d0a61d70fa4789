"""`--kv-events` of servers and LLMs, and `foreword watch`, with the real model."""

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from doors import counted_keys
from events.engine_with_events import EVERYTHING, EngineWithEvents, as_ints, hashes, reachable
from foreword import LLM, SamplingParams, cli
from foreword.cache import AllBlocksCleared
from foreword.errors import ConfigError
from foreword.events.subscriber import Subscriber
from free_ports import free_port
from live_server import FALCON, MODEL, ServerProcess
from polling import poll_until

ADDRESSES = ("kv_events", "kv_events_replay", "kv_events_snapshot")


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "events.md"


def guide_commands() -> tuple[list[str], list[str]]:
    """The guide's `foreword serve` and `foreword watch` without the word foreword, with free ports for its ports."""
    blocks = GUIDE.read_text(encoding="utf-8").split("```")
    lines = next(block for block in blocks if "foreword serve" in block).splitlines()
    ports: dict[str, str] = {}
    serve, watch = (
        [
            re.sub(r":(\d+)$", lambda port: f":{ports.setdefault(port[1], str(free_port()))}", word)
            for word in next(line for line in lines if line.startswith(f"foreword {name}")).split()[1:]
        ]
        for name in ("serve", "watch")
    )
    return serve, watch


def addresses() -> dict[str, str]:
    """Those of the guide."""
    _, _, *flags = guide_commands()[0]
    return {flag[2:].replace("-", "_"): one for flag, one in zip(flags[::2], flags[1::2], strict=True)}


def follow(given: dict[str, str]) -> Subscriber:
    live, replay, snapshot = (reachable(given[name]) for name in ADDRESSES)
    return Subscriber(live, replay=replay, snapshot=snapshot)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_an_llm_publishes_what_its_cache_holds(chat_model: Path, index: str) -> None:
    """An idle LLM answers snapshots too; `take_cache_events` goes on beside it."""
    given, prompts = addresses(), [{"prompt_token_ids": [5, 6, 7, *range(9, 9 + 5 * n)]} for n in range(8)]
    options = {"prefix_index": index, "block_size": 4, "self_check": False, "cache_events": True}
    with LLM(str(chat_model), kv_cache_memory_bytes="2MB", **options, **given) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=4))
        with follow(given) as subscriber:
            assert poll_until(subscriber, lambda one: one.is_exact)
            held = counted_keys(llm.engine.manager.ledger.groups[0])
            assert hashes(subscriber.mirror) == as_ints(held) != set()
            llm.reset_prefix_cache()
            assert poll_until(subscriber, lambda one: one.is_exact and not one.mirror.blocks)
        assert llm.take_cache_events()[-1].event == AllBlocksCleared()


@pytest.mark.slow
def test_a_server_publishes_and_watch_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    (_, _, *flags), watch = guide_commands()
    with ServerProcess(*flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for _ in range(2):
            client.chat.completions.create(model=MODEL, messages=FALCON, max_tokens=8)
        command = [*watch, "--interval", "2", "--reports", "3"]
        assert cli.main([*command, "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (report["state"], report["gaps"], report["bad"]) == ("exact", 0, 0)
        assert report["tokens"] == 16 * report["blocks"] > 0
        assert cli.main(command) == 0
        assert f"exact: {report['blocks']} blocks, {report['tokens']} tokens" in capsys.readouterr().out


def test_watch_lists_common_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    with EngineWithEvents(replace(EVERYTHING, kv_events_encoding="array"), seed=1) as engine:
        for end in ([0] * 4, [1] * 4, [0, 1, 0, 1]):
            engine.ask([0, 1, 1, 1, 0, 0, 0, 1, *end])
        told = engine.publisher.addresses
        command = ["watch", reachable(told["kv_events"]), "--snapshot", told["kv_events_snapshot"], "--reports", "2"]
        assert cli.main([*command, "--json", "--interval", "2"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["blocks"] == len(engine.held()) == 5
        assert report["common_prefixes"] == [{"tokens": 8, "sequences": 3}]


def test_options_that_do_not_fit_are_refused() -> None:
    for options, message in [
        ({"kv_events_replay": "tcp://*:1"}, "kv_events_replay='tcp://\\*:1' needs kv_events"),
        ({"kv_events": "5557"}, "kv_events='5557' is no ZeroMQ address"),
        ({"kv_events": "tcp://*:0", "kv_events_hashes": "hex"}, "kv_events_hashes"),
        ({"kv_events": "tcp://*:0", "explain_misses": False}, "needs enable_prefix_caching and explain_misses"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM("nowhere", **options)


@pytest.mark.slow
def test_watch_says_that_nobody_answers_and_what_to_start(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A closed port, and one at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in (free_port(), other.getsockname()[1]):
            address = f"tcp://127.0.0.1:{port}"
            caplog.clear()
            assert cli.main(["watch", address, "--interval", "0.7", "--reports", "2", "--json"]) == 0
            reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert {each["state"] for each in reports} == {f"nobody answers at {address}"}
            assert caplog.text.count(f"nobody answers at {address}; start the engine") == 1


WEIGHTS = str(Path(cli.__file__).parent / "demo" / "weights")


@pytest.mark.parametrize(
    "arguments",
    [["watch", "tcp://127.0.0.1:1"], ["generate", WEIGHTS, "--prompt", "x", "--kv-events", "tcp://*:0"]],
)
def test_without_the_packages_an_error_names_the_extra(arguments: list[str]) -> None:
    """In a process in which `zmq` cannot be imported."""
    code = f"import sys; sys.modules['zmq'] = None; from foreword.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "pip install foreword[ops]" in done.stderr

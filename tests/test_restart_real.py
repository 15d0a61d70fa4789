"""The first request after a restart, with real models, real prompts and a pool of real size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import ServerProcess
from real_models import real_model

PARAGRAPH = (
    "Section {0}. The committee met in the {0}th week and heard the report on the harbour, the new tariff of "
    "{0} shillings, and what the engineers had found below the old sluice. It was resolved to ask for more. "
)
NUM_PARAGRAPHS = 32
"""About 1,500 tokens, 70 MB of SmolLM2's KV."""


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Two loops that never wait, as many as the cores of a small machine."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def ask(url: str) -> dict[str, Any]:
    prompt = "".join(PARAGRAPH.format(number) for number in range(NUM_PARAGRAPHS))
    body = {"model": "real", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    return answer


def restart_twice(name: str, *place: str, drop: Path | None = None) -> None:
    """One server computes, and two after it find all whole blocks at their first request."""
    answers = []
    for _ in range(3):
        options = ("--served-model-name", "real", "--no-self-check", *place)
        with ServerProcess(str(real_model(name)), *options, start_timeout_s=600) as server:
            answers.append(ask(server.url))
            server.terminate()
            assert server.wait() == 0
        for path in drop.rglob("*.fwseg") if drop else ():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    num_tokens = answers[0]["usage"]["prompt_tokens"]
    assert num_tokens > 1400
    assert cached[0] == 0
    assert min(cached[1:]) >= num_tokens - 16, f"of {num_tokens} tokens {cached} were found"
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_first_request_after_a_restart_hits(tmp_path: Path, name: str) -> None:
    restart_twice(name, "--cache-dir", str(tmp_path / "cache"), drop=tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_the_first_request_after_a_restart_hits_on_a_busy_machine(tmp_path: Path) -> None:
    restart_twice("smollm2", "--cache-dir", str(tmp_path / "cache"))

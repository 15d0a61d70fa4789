"""Threads for numerical code follow a quota, and rest while they wait, whoever imports torch first."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from foreword.config import let_threads_rest
from foreword.config.processors import Processors
from foreword.kernels.runtime import threads as openmp


def run(script: str, **environment: str) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


POLICY = """
import json, os, sys
from foreword import LLM
assert "torch" not in sys.modules
print(json.dumps([os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")]))
"""


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, ["PASSIVE", None]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", None]),
        ({"GOMP_SPINCOUNT": "5000"}, [None, "5000"]),
    ],
)
def test_the_library_lets_threads_rest_unless_the_caller_has_chosen(own: dict[str, str], found: list[str]) -> None:
    assert run(POLICY, **own) == found


def test_nothing_is_set_after_torch_has_read_it() -> None:
    environment: dict[str, str] = {}
    let_threads_rest(environment)
    assert "torch" in sys.modules
    assert environment == {}


TORCH_FIRST = """
import json, time, torch
from foreword.kernels.runtime.threads import prepare_threads
ones = torch.ones(200_000)

def spent():
    begun = time.process_time()
    for _ in range(30):
        ones + ones
        time.sleep(0.02)
    return time.process_time() - begun

spent()
before = spent()
prepare_threads(2)
print(json.dumps([before, spent()]))
"""


@pytest.mark.skipif(openmp.gnu_openmp() is None, reason="torch has another OpenMP here")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: threads never spin for long")
def test_threads_rest_though_torch_was_imported_first() -> None:
    before, after = run(TORCH_FIRST, OMP_NUM_THREADS="2")
    assert after < before / 2


@pytest.mark.parametrize(
    ("asked", "own", "quota", "threads"),
    [
        (None, {}, 1.0, 1),
        (None, {}, 1.5, 2),
        (None, {}, None, 3),
        (3, {}, 1.0, 3),
        (None, {"OMP_NUM_THREADS": "3"}, 1.0, 3),
    ],
)
def test_the_number_of_threads_follows_the_quota_and_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int | None,
    own: dict[str, str],
    quota: float | None,
    threads: int,
) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**own, "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(openmp, "read_processors", lambda: Processors(8, 4, quota))
    caplog.set_level(logging.INFO, "foreword")
    torch.set_num_threads(3)
    try:
        openmp.prepare_threads(asked)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert f"{threads} threads compute; this process may use 4 of 8 processors" in caplog.text
    assert ("quota" in caplog.text) == (quota is not None)


TURNS = """
import ctypes, json, os, threading
from foreword.kernels.runtime import threads as openmp

def read(thread=0):
    found = ctypes.create_string_buffer(openmp._ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(openmp._GET_AND_SET[0], thread, found, len(found), 0) == 0
    return openmp._ATTRIBUTES.unpack(found.raw)

os.nice(3)
before = read()
openmp.take_short_turns()
after, later = read(), []
thread = threading.Thread(target=lambda: later.append(read()))
thread.start()
thread.join()
print(json.dumps([before, after, later[0]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(openmp._GET_AND_SET is None, reason="these calls are not known here")
def test_turns_get_short_and_nothing_else_of_a_thread_changes() -> None:
    before, after, later = run(TURNS)
    assert before[:5] == after[:5]
    assert after == later
    assert after[5] in (openmp.TURN_NS, before[5])  # Linux before 6.12 ignores it

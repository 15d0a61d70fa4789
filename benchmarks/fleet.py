"""The time that a front server and Ray add to a request, beside the same server with its engine in a thread.

Both servers run the embedded model in processes of their own. Requests go to them alternately, one at a time, over
HTTP. Prompts are drawn by the seed and cached in both, so the model does little and the added time shows.

    first_token_ms    from sending the request to the first event with text, streamed
    token_ms          between two events of one answer
    added_ms          the difference of the two servers' percentiles, not a percentile of pairs' differences

The limit: a request crosses two more processes in each direction (front, replica), so nothing can be below 0.

    python benchmarks/fleet.py [--requests N] [--replicas N] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx

MAX_TOKENS = 32


@contextmanager
def server(*args: str) -> Iterator[str]:
    """Yields the address of a `foreword serve` that runs in a process of its own."""
    command = [sys.executable, "-m", "foreword.cli", "serve", "--port", "0", "--no-dashboard", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
    try:
        yield lines.get(timeout=180).split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def ask(session: httpx.Client, url: str, prompt: list[int]) -> tuple[float, list[float], str]:
    """Asks once. Returns milliseconds to the first text, milliseconds between later events, and the answer's text."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    sent = time.perf_counter()
    times, text = [], ""
    with session.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["text"]:
                    times.append(1e3 * (time.perf_counter() - sent))
                    text += choices[0]["text"]
    return times[0], [after - before for before, after in pairwise(times)], text


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{rank}": round(ordered[min(len(ordered) - 1, len(ordered) * rank // 100)], 2) for rank in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="requests to each server")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(5, 90) for _ in range(64)] for _ in range(8)]
    first: dict[str, list[float]] = {"direct": [], "fleet": []}
    between: dict[str, list[float]] = {"direct": [], "fleet": []}
    replicas = ("--replicas", str(args.replicas), "--replica-cpus", "0.5")
    with server() as direct, server(*replicas) as fleet, httpx.Client(timeout=60) as session:
        urls = {"direct": direct, "fleet": fleet}
        for number in range(-2 * len(prompts), args.requests):
            prompt, texts = prompts[number % len(prompts)], set[str]()
            for name in random.Random(number).sample(list(urls), 2):
                first_ms, gaps, text = ask(session, urls[name], prompt)
                texts.add(text)
                if number >= 0:
                    first[name].append(first_ms)
                    between[name] += gaps
            assert len(texts) == 1, "the two servers answer differently"
    report: dict[str, Any] = {
        "first_token_ms": {name: percentiles(values) for name, values in first.items()},
        "token_ms": {name: percentiles(values) for name, values in between.items()},
        "requests": args.requests,
        "replicas": args.replicas,
    }
    report["added_ms"] = {
        f"{what}_{rank}": round(report[f"{what}_ms"]["fleet"][rank] - report[f"{what}_ms"]["direct"][rank], 2)
        for what in ("first_token", "token")
        for rank in ("p50", "p99")
    }
    if not args.json:
        for what in ("first_token_ms", "token_ms", "added_ms"):
            print(f"{what:16} {report[what]}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

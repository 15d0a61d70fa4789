"""Minutes of hostile load on a server: memory stays flat, other clients are served, and it ends in time.

    .venv/bin/python benchmarks/soak.py --minutes 5

Clients post schemas whose unions multiply, large grammars and large bodies. They leave in the middle of bodies and of
answers, send bytes that are not HTTP, and flood the server with urgent requests. A client of another tenant asks a
short question every second. Then the server gets SIGTERM while the load goes on. Afterwards no block may be held.
Prints what was seen, then one JSON line. The exit code is 1 if anything broke.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx

NUM_CLIENTS = 6
PAUSE_S = 0.05
SHUTDOWN_S, ENDING_S = 5, 30
KEYS = '[hostile]\nkeys = ["sk-hostile"]\npriorities = [-5, 5]\n\n[good]\nkeys = ["sk-good"]\n'


def unions(members: list[str], count: int) -> str:
    """A schema of unions in succession."""
    one = "".join(f"<module name='m{{0}}_{number}'>{text}</module>" for number, text in enumerate(members))
    return f"<schema name='s'>x{''.join(f'<union>{one}</union>'.format(at) for at in range(count))}y</schema>"


def scaffolds(count: int) -> str:
    """A schema whose modules must all be computed after one long text."""
    written = "".join(f"<module name='m{number}' scaffold='long'>x</module>" for number in range(count))
    return f"<schema name='s'><module name='long'>{'word and ' * 300}</module>{written}</schema>"


class Hostile:
    """The actions of hostile clients."""

    def __init__(self, url: str) -> None:
        self.url = url
        models = httpx.get(f"{url}/v1/models", headers={"x-api-key": "sk-good"}, timeout=60).json()
        self.model = f"models/{models['data'][0]['id']}"
        self.statuses: Counter[str] = Counter()
        self.stop = threading.Event()

    def post(self, path: str, body: object, timeout_s: float = 60.0) -> None:
        """Posts a body. With a short time limit, the client leaves before the answer ends."""
        try:
            headers = {"x-api-key": "sk-hostile"}
            status = str(httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=timeout_s).status_code)
        except httpx.TimeoutException:
            status = "left"
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.statuses[status] += 1

    def raw(self, content: bytes) -> None:
        """Send bytes and leave."""
        parts = urlsplit(self.url)
        with contextlib.suppress(OSError), socket.create_connection((parts.hostname or "", parts.port or 0), 10) as one:
            one.sendall(content)
            self.statuses["raw"] += 1

    def actions(self, draw: random.Random) -> list[Callable[[], None]]:
        """One action of each kind."""
        contents = {"model": self.model, "contents": [{"parts": [{"text": "x " * draw.randint(100, 3000)}]}]}
        endless = {"prompt": "x " * draw.randint(1, 2000), "max_tokens": 2000, "ignore_eos": True, "priority": -5}
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: sk-hostile\r\nContent-Type: application/json\r\n"
        )
        return [
            lambda: self.post("/v1/pml/schemas", {"schema": unions(["", ""], draw.randint(20, 2000))}, 3),
            lambda: self.post("/v1/pml/schemas", {"schema": unions([f"w{n}" for n in range(16)], 250)}, 3),
            lambda: self.post("/v1/pml/schemas", {"schema": scaffolds(draw.randint(10, 4000))}),
            lambda: self.post("/v1/pml/completions", {"schema": "s", "modules": {"long": {}}, "max_tokens": 1}),
            lambda: self.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(a|b){99}" * 99}}),
            lambda: self.post("/v1/completions", endless, draw.uniform(0.01, 2)),
            lambda: self.post("/v1/completions", {**endless, "stream": True}, draw.uniform(0.01, 2)),
            lambda: self.post("/v1/completions", {"prompt": "x" * draw.randint(1, 10**6)}),
            lambda: self.post("/v1/completions", {"prompt": [[1]] * 10_000}),
            lambda: self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 3000}, 5),
            lambda: self.post("/v1beta/cachedContents", contents, 5),
            lambda: self.post("/v1/cache/explain", {"prompt": "x " * 3000}),
            lambda: self.post("/tokenize", {"prompt": "x" * 100_000}),
            lambda: self.raw(head + b"Content-Length: 100000\r\n\r\n{"),
            lambda: self.raw(head + b"Content-Length: 99999999999\r\n\r\n" + b"x" * 10_000),
            lambda: self.raw(draw.randbytes(1000)),
        ]

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.stop.is_set():
            draw.choice(self.actions(draw))()
            time.sleep(PAUSE_S)


def resident_mb(pid: int) -> float:
    """Memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else 0.0


def soak(url: str, process: subprocess.Popen[str], minutes: float) -> dict[str, object]:
    """Runs the load, and stops the server while the load goes on."""
    hostile = Hostile(url)
    threads = [threading.Thread(target=hostile.run, args=(seed,), daemon=True) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    waits: list[float] = []
    memory: list[float] = []
    ends = time.monotonic() + 60 * minutes
    good = {"prompt": "The code of the amber falcon is", "max_tokens": 4}
    while time.monotonic() < ends and process.poll() is None:
        began = time.monotonic()
        try:
            answer = httpx.post(f"{url}/v1/completions", json=good, headers={"x-api-key": "sk-good"}, timeout=120)
            if answer.status_code != 200:
                hostile.statuses[f"good {answer.status_code}"] += 1
        except httpx.TimeoutException:
            hostile.statuses["good waited too long"] += 1
        waits.append(time.monotonic() - began)
        memory.append(resident_mb(process.pid))
        time.sleep(1)
    held = settle(url, hostile, threads)
    again = [threading.Thread(target=hostile.run, args=(seed,), daemon=True) for seed in range(NUM_CLIENTS)]
    hostile.stop.clear()
    for thread in again:
        thread.start()
    time.sleep(5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=SHUTDOWN_S + 2 * ENDING_S)
    ended_s = time.monotonic() - began
    hostile.stop.set()
    third = len(memory) // 3
    return {
        "minutes": minutes,
        "calls": hostile.statuses.total(),
        "statuses": dict(hostile.statuses.most_common()),
        "good_calls": len(waits),
        "good_median_s": round(sorted(waits)[len(waits) // 2], 3),
        "good_worst_s": round(max(waits), 3),
        "memory_mb": [round(memory[0]), round(max(memory[:third])), round(max(memory[-third:]))],
        "held_blocks": held,
        "exit_code": code,
        "ended_s": round(ended_s, 2),
    }


def settle(url: str, hostile: Hostile, threads: list[threading.Thread]) -> int:
    """Stop the load, and count the blocks that are still held when the server has nothing to do."""
    hostile.stop.set()
    for thread in threads:
        thread.join(120)
    held = -1
    for _ in range(120):
        text = httpx.get(f"{url}/metrics", headers={"x-api-key": "sk-operator"}, timeout=60).text
        found = re.search(r'kv_cache_blocks\{.*state="in_use"\} (\S+)', text)
        held = int(float(found[1])) if found else -1
        if not held:
            break
        time.sleep(0.5)
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", help="folder of a model (default: the embedded one)")
    args = parser.parse_args()
    if not 0 < args.minutes <= 60:
        parser.error(f"--minutes {args.minutes} is out of range; use up to 60")
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys.toml", Path(folder) / "log"
        keys.write_text(KEYS)
        model = [args.model] if args.model else []
        options = ["--port", "0", "--keys-file", str(keys), "--operator-key", "sk-operator", "--log-requests"]
        options += ["--shutdown-timeout-s", str(SHUTDOWN_S), "--scheduling-policy", "prefix"]
        command = [sys.executable, "-m", "foreword.cli", "serve", *model, *options]
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            found = soak(url, process, args.minutes)
        finally:
            process.kill()
        lines = log.read_text(errors="replace").splitlines()
        found["tracebacks"] = sum(line.startswith("Traceback") for line in lines)
        for line in itertools.islice((one for one in lines if " ERROR " in one or " CRITICAL " in one), 5):
            print(line[:300])
    first, last = found["memory_mb"][1], found["memory_mb"][2]  # type: ignore[index]
    broke = found["exit_code"] or found["held_blocks"] or found["tracebacks"]
    broke = broke or last > 1.2 * first or found["ended_s"] > 1 + SHUTDOWN_S + ENDING_S  # type: ignore[operator]
    print(json.dumps({**found, "broke": bool(broke)}))
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())

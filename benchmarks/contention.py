"""foreword beside other engines on a machine that others use too: alone, beside busy threads, and under a quota.

Each engine runs in a process of its own (as in benchmarks/engine.py) and answers the same token ids, first alone and
then beside 1, 2 and 4 processes that never rest. Then each engine is started again in a cgroup with a quota of
processor time, if this user may make a cgroup. The last line is JSON: the share of its speed alone that each engine
kept.

    first_token_ms   one token after a prompt of which nothing is cached
    hit_ms           one token after the same prompt with other last tokens, right after it
    decode_tok_s     one request: tokens a second, without its first token

    python benchmarks/contention.py [--peers --vllm-python PATH --llama-python PATH] [--model FOLDER] [--repeats N]

Without --model, a model of 98M random bfloat16 weights is made. llama.cpp needs a Qwen2 checkpoint, or one with a
model.bf16.gguf beside it. foreword chooses its number of threads under a quota; the peers are given --threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from engine import EngineProcess, Prompts
from engine_drivers.protocol import Options
from foreword.model.checkpoint.random_weights import DEMO_SHAPE, save_random_model

BUSY = (0, 1, 2, 4)
QUOTAS = (1.0, 1.5)
FRESH_TOKENS, DECODE_IN = 16, 32
WARM_UP = 1_000_000
ANSWER_FIGURES = ("first_token_ms", "hit_ms", "decode_tok_s")
Figures = dict[str, float]


@contextmanager
def busy_threads(number: int) -> Iterator[None]:
    """Other programs that never rest."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextmanager
def quota_group(processors: float) -> Iterator[bool]:
    """A context whose processes run in a cgroup (v1, else v2) with this quota. Yields False if it cannot make one."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    roots = [Path("/sys/fs/cgroup/cpu" + path) for _, names, path in own if "cpu" in names.split(",")]
    period = 100_000
    for root in (*roots, Path("/sys/fs/cgroup")):
        folder, quota = root / f"foreword-contention-{os.getpid()}", round(processors * period)
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{quota} {period}")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield True
        finally:
            (root / "cgroup.procs").write_text(str(os.getpid()))
            folder.rmdir()
        return
    yield False


def measure(engine: EngineProcess, prompts: Prompts, repeat: int, length: int, num_tokens: int) -> Figures:
    """All figures once."""
    shared, own, other, short = prompts(repeat, length, FRESH_TOKENS, FRESH_TOKENS, DECODE_IN)
    engine.reset()
    miss = engine.generate([shared + own], 1)[0]
    hit = engine.generate([shared + other], 1)[0]
    first = engine.generate([short], 1)[0]
    rest = engine.generate([short], num_tokens)[0]
    return {
        "first_token_ms": 1e3 * miss,
        "hit_ms": 1e3 * hit,
        "decode_tok_s": (num_tokens - 1) / max(rest - min(first, rest / 2), 1e-9),
    }


def median(samples: list[Figures]) -> Figures:
    return {name: round(statistics.median(sample[name] for sample in samples), 3) for name in ANSWER_FIGURES}


def kept(alone: Figures, beside: Figures) -> Figures:
    """The share of its speed alone that an engine keeps under each condition."""
    share = {name: alone[name] / beside[name] for name in ("first_token_ms", "hit_ms")}
    return {
        name: round(value, 3)
        for name, value in {**share, "decode_tok_s": beside["decode_tok_s"] / alone["decode_tok_s"]}.items()
    }


def run(
    args: argparse.Namespace, pythons: dict[str, str], options: Options, logs: Path
) -> dict[str, dict[str, Figures]]:
    """Medians by engine and condition."""
    prompts, found = Prompts(args.vocab_size, args.seed), {name: dict[str, list[Figures]]() for name in pythons}

    def take(engine: EngineProcess, condition: str, repeat: int) -> None:
        figures = measure(engine, prompts, repeat, args.length, args.tokens)
        found[engine.name].setdefault(condition, []).append(figures)
        print(
            f"{engine.name:10} {condition:12}", {name: round(value, 1) for name, value in figures.items()}, flush=True
        )

    with ExitStack() as stack:
        engines = [EngineProcess(name, python, options, logs / f"{name}.log") for name, python in pythons.items()]
        for engine in engines:
            stack.callback(engine.close)
            measure(engine, prompts, WARM_UP, FRESH_TOKENS, 4)
        for repeat in range(args.repeats):
            for number in BUSY:
                for engine in engines if repeat % 2 else engines[::-1]:
                    with busy_threads(number):
                        take(engine, f"busy {number}" if number else "alone", repeat)
    for quota in QUOTAS:
        for name, python in pythons.items():
            with quota_group(quota) as is_limited:
                if not is_limited:
                    print(f"no cgroup can be made here, so a quota of {quota} was not measured", flush=True)
                    break
                own = replace(options, num_threads=0) if name == "foreword" else options
                engine = EngineProcess(name, python, own, logs / f"{name}.log")
                try:
                    measure(engine, prompts, WARM_UP, FRESH_TOKENS, 4)
                    for repeat in range(args.repeats):
                        take(engine, f"quota {quota}", repeat)
                finally:
                    engine.close()
    return {name: {condition: median(samples) for condition, samples in own.items()} for name, own in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peers", action="store_true", help="run vLLM and llama.cpp too")
    parser.add_argument("--vllm-python", default=None, help="interpreter of vLLM's environment")
    parser.add_argument("--llama-python", default=None, help="interpreter of llama.cpp's environment")
    parser.add_argument("--model", default=None, help="folder of a checkpoint (default: random weights)")
    parser.add_argument(
        "--vocab-size", type=int, default=DEMO_SHAPE.vocab_size, help="size of the vocabulary: token ids are below it"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of the prompt (default 256)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer (default 24)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of the peers, and of foreword without a quota"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pythons = {"foreword": sys.executable}
    if args.peers:
        peers = {"vllm": args.vllm_python, "llama.cpp": args.llama_python}
        pythons |= {name: python for name, python in peers.items() if python is not None}
    with TemporaryDirectory(prefix="foreword-contention-") as folder:
        model = Path(args.model or Path(folder) / "model")
        if args.model is None:
            save_random_model(model, DEMO_SHAPE, seed=args.seed)
        longest = args.length + FRESH_TOKENS + args.tokens + DECODE_IN
        figures = run(args, pythons, Options(str(model), args.threads, 2**30, longest, 4, drafts=False), Path(folder))
    shares = {name: {c: kept(own["alone"], own[c]) for c in own if c != "alone"} for name, own in figures.items()}
    print(json.dumps({"model": args.model, "figures": figures, "kept": shares}))


if __name__ == "__main__":
    main()

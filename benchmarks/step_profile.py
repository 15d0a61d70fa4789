"""Where the time of a decoding step goes: what computes, and what only organises it.

A model of Qwen2-0.5B's shape with random weights decodes a batch. With one thread for numerical code, figures are
processor time of the calling thread, which other programs hardly disturb. With more threads they are wall time, which
needs a quiet machine. A part's time excludes that of the parts inside it. The timers cost about a microsecond per call,
which is subtracted. Layers that normally run as one program run operation by operation here, which takes some percent
longer; the first figure is that of an unchanged step. Tokens become text as they arrive, by a byte-level tokenizer that
is trained on Python's own library.

    python benchmarks/step_profile.py [--batch 16] [--steps 40] [--threads 1] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreword import LLM, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.kernels.cpu import attention as cpu_attention
from foreword.kernels.runtime.threads import Program
from foreword.model import runner, storage
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, save_random_model
from foreword.model.cpu import product, rotary, row_functions
from foreword.model.decoder import linear
from foreword.model.decoder.decoder import Decoder
from foreword.model.sampling import readout
from foreword.text import TextStream
from made_tokenizer import save_tokenizer
from workloads import QUICK_SHAPE

PROMPT_TOKENS = 32
AROUND = "embedding, rotary, around the layers"
COMPUTING = ("products", "attention", "norms and gates", "heads turned, KV written")


class Clock:
    """Measures nested parts, in seconds of the clock `now`. A part's time excludes that of the parts inside it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.own: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside = [0.0]
        self._cost = 0.0
        self._cost = self._calibrate()

    def _calibrate(self) -> float:
        nothing = self.timed("nothing", lambda: None)
        started = self._now()
        for _ in range(10_000):
            nothing()
        cost = (self._now() - started) / 10_000
        self.own.clear()
        self.calls.clear()
        self._inside = [0.0]
        return cost

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._inside.append(0.0)
            started = self._now()
            try:
                return function(*args, **options)
            finally:
                spent = self._now() - started
                self.own[part] += spent - self._inside.pop()
                self.calls[part] += 1
                self._inside[-1] += spent + self._cost / 2

        return call

    def watch(self, part: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def watch_parts(clock: Clock, llm: LLM) -> None:
    clock.watch("scheduling and batch building", llm.engine.scheduler, "schedule")
    clock.watch("scheduling and batch building", Scheduler, "commit")
    clock.watch("outputs", llm.engine._outputs, "collect")
    clock.watch("tokens to text", TextStream, "push")
    clock.watch("batch to tensors", storage.KVStorage, "slot_mapping")
    clock.watch("attention", storage.KVStorage, "write")
    clock.watch("sampling", readout.Readout, "take")
    clock.watch("batch to tensors, logits to the sampler", runner.ModelRunner, "execute")
    clock.watch("products", linear.Linear, "__call__")
    clock.watch("products", product.CompactProduct, "__call__")
    clock.watch("norms and gates", row_functions.RowKernels, "rms_norm")
    clock.watch("norms and gates", row_functions.RowKernels, "gate")
    clock.watch("norms and gates", row_functions.RowKernels, "add_norm")
    clock.watch("heads turned, KV written", rotary.RotaryKernel, "__call__")
    clock.watch("attention", cpu_attention.CpuAttention, "attend")
    clock.watch("attention plan", cpu_attention.CpuAttention, "plan")


PARTS = {
    "project": "products",
    "output": "products",
    "gate, up": "products",
    "down": "products",
    "attention": "attention",
    "merge": "attention",
    "heads": "heads turned, KV written",
}
"""The part of each operation of a layer; the others are norms. The head, a product that ends a program, is in no part.
Attention that runs by itself is a program of two operations."""


def watch_programs(clock: Clock, decoder: Decoder) -> None:
    layers = [] if decoder.chain is None else decoder.chain.layers
    part_of = {
        operation: PARTS.get(name, "norms and gates")
        for layer in layers
        for name, operations in layer.operations.items()
        for operation in operations
    }

    def run_one_by_one(program: Program, number: int | None = None) -> None:
        for operation in program.operations[:number]:
            clock.timed(
                part_of.get(operation, "products" if len(program.operations) > 2 else "attention"), operation.run
            )()

    Program.run = run_one_by_one  # type: ignore[method-assign, assignment]


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    shape = QUICK_SHAPE if args.quick else QWEN2_0_5B
    with TemporaryDirectory() as folder:
        save_random_model(Path(folder), shape)
        save_tokenizer(Path(folder), shape.vocab_size)
        llm = LLM(folder, kv_cache_memory_bytes=2**29, self_check=False)
    decoder = llm.engine._runner._model.decoder  # type: ignore[attr-defined]
    now = time.thread_time if args.threads == 1 else time.perf_counter
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=2 * args.steps + 8, ignore_eos=True)
    for number in range(args.batch):
        prompt = llm._prompt({"prompt_token_ids": rng.integers(0, shape.vocab_size, PROMPT_TOKENS).tolist()})
        llm.engine.add_request(str(number), prompt, params)
    for _ in range(4):  # the prefill, and steps to warm up
        llm.engine.step()
    whole = []
    for _ in range(args.steps):
        started = now()
        llm.engine.step()
        whole.append(1e3 * (now() - started))
    clock = Clock(now)
    watch_parts(clock, llm)
    watch_programs(clock, decoder)
    clock.watch(AROUND, Decoder, "__call__")
    step = clock.timed("engine", llm.engine.step)
    step()
    samples: list[dict[str, float]] = []
    for _ in range(args.steps):
        clock.own.clear()
        step()
        samples.append(dict(clock.own))
    parts = {part: 1e3 * statistics.median(sample[part] for sample in samples) for part in samples[0]}
    total = 1e3 * statistics.median(sum(sample.values()) for sample in samples)
    return {"parts_ms": parts, "parts_sum_ms": total, "step_ms": statistics.median(whole), "batch": args.batch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="requests that decode together (default: 16)")
    parser.add_argument("--steps", type=int, default=40, help="steps whose medians are taken (default: 40)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of numerical code (default: 1, which measures processor time)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: only shows that the script runs")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    args = parser.parse_args()
    for name in ("batch", "steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is too few; use at least 1")
    report = run(args)
    table = Table(
        box=SIMPLE_HEAD, title=f"one step of {args.batch} requests: {report['step_ms']:.1f} ms, {args.threads} threads"
    )
    for name in ("part", "ms", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part, own in sorted(report["parts_ms"].items(), key=lambda item: -item[1]):
        table.add_row(part, f"{own:.2f}", f"{own / report['step_ms']:.1%}")
    around = report["parts_ms"].get(AROUND, 0.0)
    organising = sum(own for part, own in report["parts_ms"].items() if part not in COMPUTING) - around
    report |= {"organising_share": organising / report["step_ms"], "modules_share": around / report["step_ms"]}
    console = Console(stderr=args.json)
    console.print(table)
    console.print(
        f"organising: {report['organising_share']:.1%}; around the layers: {report['modules_share']:.1%}",
        highlight=False,
    )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

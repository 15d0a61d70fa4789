"""What prefix caching gains end to end, beside three claims of another engine and the limits of the machine.

mini-infer claims gains for Qwen2.5-7B on an RTX 4090: 1.30x with 257 shared and 64 generated tokens (measured), about
5x with 1024 and 32, and about 10x with 2048 and 16 (never measured). This script runs the same numbers of tokens on a
model of Qwen2-0.5B's shape with random weights in bfloat16.

Every repetition is a pair. The cache is reset, a prompt runs (the miss), and then a prompt with the same
shared tokens and another ending runs (the hit). Over all pairs each prompt is a miss once and a hit once,
and both answers must be the same tokens.

The limit of one forward pass is

    operations / rate of matrix products  +  bytes of weights and KV / rate of reading memory

with both rates measured here, before and after (the better counts), through torch's own F.linear: bfloat16 products of
1024 rows, and one row times more weights than processor caches hold. The limit of a gain is the ratio of the limits:
the gain of an engine whose every pass is as fast as the machine allows. An engine with a slow prefill gains more than
that, which is no merit, so compare the times, too. On processors with AMX, oneDNN is restricted to vectors in this
process (docs/decisions/0017-tiles.md). Our own tiles exceed the rate measured so, and no limit holds.

    python benchmarks/workloads.py [--repeats N] [--quick] [--json] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import linear

import foreword
from foreword import LLM, RequestOutput, SamplingParams
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, RandomModelShape, save_random_model

QUICK_SHAPE = RandomModelShape(2, 128, 2, 1, 256, 1000, 4096)
QWEN2_5_7B = RandomModelShape(28, 3584, 28, 4, 18_944, 152_064, 32_768)
FRESH_TOKENS = 16
BLOCK_TOKENS = 16
RATE_ROWS = 1024
RATE_WEIGHT_BYTES = 256 * 2**20
BYTES_PER_ELEMENT = 2  # bfloat16
KV_BYTES = 2**28
BUSY_LOAD = 0.5


@dataclass(frozen=True)
class Workload:
    name: str
    shared_tokens: int
    generated_tokens: int
    claim: float
    claim_was_measured: bool


WORKLOADS = (
    Workload("shared prompt", 257, 64, 1.3, True),
    Workload("RAG", 1024, 32, 5.0, False),
    Workload("few-shot", 2048, 16, 10.0, False),
)


# -------------------------------------------------------------------------------------------- limit


@dataclass(frozen=True)
class Rates:
    """Rates of a machine: GFLOP/s of matrix products, and GB/s of reading memory."""

    matmul_gflops: float
    read_gbytes_per_s: float


RTX_4090 = Rates(165_200, 1008)
"""From the data sheet: dense bfloat16 products with float32 sums, and memory bandwidth."""


def measure_rates(shape: RandomModelShape) -> Rates:
    """The best of several rounds with matrices like those of the model's MLP."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    count = -(-RATE_WEIGHT_BYTES // (hidden * inner * BYTES_PER_ELEMENT))
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(count * inner, hidden, dtype=torch.bfloat16).normal_(generator=generator)
    rows = torch.empty(RATE_ROWS, hidden, dtype=torch.bfloat16).normal_(generator=generator)
    with torch.inference_mode():
        some = weights[:inner]
        matmul_s = best_of(20, lambda: linear(rows, some))
        read_s = best_of(10, lambda: linear(rows[:1], weights))
    operations = 2.0 * RATE_ROWS * some.numel()
    return Rates(operations / matmul_s / 1e9, weights.numel() * BYTES_PER_ELEMENT / read_s / 1e9)


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds + 1):  # the first one warms up and cannot be the fastest
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def pass_limit_ms(shape: RandomModelShape, rates: Rates, num_tokens: int, num_cached: int) -> float:
    """Least ms of a forward pass over `num_tokens` after `num_cached` cached ones, with the logits of one token."""
    pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) / 2  # a query and a key that it sees
    attention = 4.0 * shape.num_layers * shape.hidden_size * pairs
    head = 2.0 * shape.vocab_size * shape.hidden_size
    operations = 2.0 * shape.num_linear_parameters * num_tokens + head + attention
    kv_elements = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (num_cached + num_tokens)
    num_bytes = BYTES_PER_ELEMENT * (shape.num_parameters + kv_elements)
    return 1e3 * (operations / (rates.matmul_gflops * 1e9) + num_bytes / (rates.read_gbytes_per_s * 1e9))


@dataclass(frozen=True)
class Limit:
    """Least times of one workload, and the gains that follow from them."""

    prefill_miss_ms: float
    prefill_hit_ms: float
    decode_ms: float
    """Milliseconds per generated token."""
    ttft_ratio: float
    e2e_ratio: float

    @classmethod
    def of(cls, shape: RandomModelShape, rates: Rates, workload: Workload, num_cached: int) -> Limit:
        prompt = workload.shared_tokens + FRESH_TOKENS
        miss = pass_limit_ms(shape, rates, prompt, 0)
        hit = pass_limit_ms(shape, rates, prompt - num_cached, num_cached)
        decode = pass_limit_ms(shape, rates, 1, prompt + workload.generated_tokens // 2)
        decoding = decode * (workload.generated_tokens - 1)  # the first token comes out of prefill
        return cls(miss, hit, decode, miss / hit, (miss + decoding) / (hit + decoding))


# ---------------------------------------------------------------------------------------------- run


@dataclass(frozen=True)
class Timing:
    """The times of one request."""

    ttft_ms: float
    e2e_ms: float
    num_cached_tokens: int
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, output: RequestOutput) -> Timing:
        metrics = output.metrics
        assert metrics.time_to_first_token_ms is not None
        assert metrics.finished_time is not None
        e2e_ms = 1e3 * (metrics.finished_time - metrics.arrival_time)
        return cls(metrics.time_to_first_token_ms, e2e_ms, output.num_cached_tokens, tuple(output.outputs[0].token_ids))


@dataclass(frozen=True)
class Pair:
    """A miss, and the hit right after it. Their prompts differ in the last tokens."""

    miss: Timing
    hit: Timing


def make_prompts(workload: Workload, vocab_size: int, num_prompts: int, seed: int) -> list[list[int]]:
    """Prompts that share all but their last tokens. The first token that is not shared differs already."""
    rng = np.random.default_rng((seed, workload.shared_tokens))
    shared = rng.integers(vocab_size, size=workload.shared_tokens).tolist()
    firsts = rng.choice(vocab_size, size=num_prompts, replace=False).tolist()
    return [[*shared, first, *rng.integers(vocab_size, size=FRESH_TOKENS - 1).tolist()] for first in firsts]


def run_pair(llm: LLM, missed: list[int], hit: list[int], num_generated: int) -> Pair:
    params = SamplingParams(temperature=0.0, max_tokens=num_generated, ignore_eos=True)
    llm.reset_prefix_cache()
    first = llm.generate({"prompt_token_ids": missed}, params)[0]
    second = llm.generate({"prompt_token_ids": hit}, params)[0]
    return Pair(Timing.of(first), Timing.of(second))


def answers_identical(pairs: list[Pair]) -> bool:
    """Whether each prompt got the same tokens as a miss and as a hit. In pair i, prompt i + 1 is the hit."""
    misses = [pair.miss.token_ids for pair in pairs]
    return [pair.hit.token_ids for pair in pairs] == misses[1:] + misses[:1]


def summarise(workload: Workload, pairs: list[Pair], shape: RandomModelShape, rates: Rates) -> dict[str, Any]:
    num_cached = pairs[0].hit.num_cached_tokens
    ttft_ratios = [pair.miss.ttft_ms / pair.hit.ttft_ms for pair in pairs]
    e2e_ratios = [pair.miss.e2e_ms / pair.hit.e2e_ms for pair in pairs]
    limit = Limit.of(shape, rates, workload, num_cached)
    return {
        "name": workload.name,
        "shared_tokens": workload.shared_tokens,
        "fresh_tokens": FRESH_TOKENS,
        "generated_tokens": workload.generated_tokens,
        "cached_tokens": num_cached,
        "ttft_miss_ms": median([pair.miss.ttft_ms for pair in pairs]),
        "ttft_hit_ms": median([pair.hit.ttft_ms for pair in pairs]),
        "ttft_ratio": median(ttft_ratios),
        "ttft_ratio_range": [round(min(ttft_ratios), 3), round(max(ttft_ratios), 3)],
        "e2e_miss_ms": median([pair.miss.e2e_ms for pair in pairs]),
        "e2e_hit_ms": median([pair.hit.e2e_ms for pair in pairs]),
        "e2e_ratio": median(e2e_ratios),
        "e2e_ratio_range": [round(min(e2e_ratios), 3), round(max(e2e_ratios), 3)],
        "limit": {name: round(value, 3) for name, value in asdict(limit).items()},
        "claim_e2e_ratio": workload.claim,
        "claim_was_measured": workload.claim_was_measured,
        "limit_e2e_ratio_on_claimed_machine": round(Limit.of(QWEN2_5_7B, RTX_4090, workload, num_cached).e2e_ratio, 3),
        "identical": answers_identical(pairs),
        "cached_as_expected": all(
            pair.miss.num_cached_tokens == 0 and 0 <= workload.shared_tokens - pair.hit.num_cached_tokens < BLOCK_TOKENS
            for pair in pairs
        ),
    }


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def run_benchmark(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    shape = QUICK_SHAPE if args.quick else QWEN2_0_5B
    load_average = os.getloadavg()[0]
    with TemporaryDirectory(prefix="foreword-") as folder:
        save_random_model(Path(folder), shape, seed=args.seed)
        with LLM(folder, kv_cache_memory_bytes=KV_BYTES, block_size=BLOCK_TOKENS) as llm:
            before = measure_rates(shape)
            prompts = [make_prompts(workload, shape.vocab_size, args.repeats, args.seed) for workload in WORKLOADS]
            run_pair(llm, prompts[0][0], prompts[0][1], 2)  # libraries prepare themselves at first use
            pairs: list[list[Pair]] = [[] for _ in WORKLOADS]
            for repeat in track(range(args.repeats), "repetitions", console=console, transient=True):
                for number, workload in enumerate(WORKLOADS):
                    missed, hit = prompts[number][repeat], prompts[number][(repeat + 1) % args.repeats]
                    pairs[number].append(run_pair(llm, missed, hit, workload.generated_tokens))
            after = measure_rates(shape)
    rates = Rates(
        max(before.matmul_gflops, after.matmul_gflops), max(before.read_gbytes_per_s, after.read_gbytes_per_s)
    )
    results = [summarise(workload, own, shape, rates) for workload, own in zip(WORKLOADS, pairs, strict=True)]
    return {
        "benchmark": "workloads",
        "foreword": foreword.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(load_average, 2),
        "model": {**asdict(shape), "dtype": "bfloat16", "weights": "random"},
        "seed": args.seed,
        "repeats": args.repeats,
        "quick": args.quick,
        "matmul_gflops": round(rates.matmul_gflops, 1),
        "read_gbytes_per_s": round(rates.read_gbytes_per_s, 2),
        "workloads": results,
        "identical": all(result["identical"] for result in results),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    model = "a quick stand-in" if report["quick"] else "Qwen2-0.5B's shape, random weights"
    table = Table(
        title=f"Hit against miss on {model}\n"
        f"bfloat16, {report['threads']} threads, medians of {report['repeats']} pairs",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("workload", "until", "miss ms", "hit ms", "gain", "limit", "claim", "4090"):
        table.add_column(heading, justify="left" if heading in ("workload", "until") else "right", no_wrap=True)
    for result in report["workloads"]:
        limit = result["limit"]
        table.add_row(
            result["name"],
            "first token",
            f"{result['ttft_miss_ms']:,.0f}",
            f"{result['ttft_hit_ms']:,.0f}",
            f"{result['ttft_ratio']:.2f}x",
            f"{limit['ttft_ratio']:.2f}x",
        )
        table.add_row(
            f"{result['shared_tokens']} + {result['generated_tokens']}",
            "end",
            f"{result['e2e_miss_ms']:,.0f}",
            f"{result['e2e_hit_ms']:,.0f}",
            f"{result['e2e_ratio']:.2f}x",
            f"{limit['e2e_ratio']:.2f}x",
            f"{result['claim_e2e_ratio']:.4g}x" + ("" if result["claim_was_measured"] else "*"),
            f"{result['limit_e2e_ratio_on_claimed_machine']:.2f}x",
        )
    console.print(table)
    console.print(
        f"workload: shared + generated tokens. limit: the gain at {report['matmul_gflops']:,.0f} GFLOP/s and "
        f"{report['read_gbytes_per_s']:,.1f} GB/s, both measured in this run. claim: mini-infer's, Qwen2.5-7B on an "
        f"RTX 4090 (* never measured). 4090: the limit there, from its data sheet "
        f"({RTX_4090.matmul_gflops / 1e3:,.0f} TFLOP/s, {RTX_4090.read_gbytes_per_s:,.0f} GB/s)."
    )
    if report["load_average_before"] > BUSY_LOAD:
        load = report["load_average_before"]
        console.print(f"The machine was busy in the minute before (load {load}): the times may be noisy.")
    same = "are" if report["identical"] else "ARE NOT"
    console.print(f"The answers of hits and misses {same} the same tokens.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="pairs per workload, at least 2 (default: 5; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 2 if args.quick else 5
    if args.repeats < 2:
        parser.error(f"--repeats {args.repeats} is too few: a prompt is a miss in one pair and a hit in another")
    console = Console(stderr=args.json)
    report = run_benchmark(args, console)
    print_report(report, console)
    print(json.dumps(report))
    return 0 if report["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())

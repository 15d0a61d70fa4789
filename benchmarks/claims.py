"""Four claims that users of other engines read, measured with foreword's cache and without it in the same run.

    prefill saved    3,000 shared tokens and 20 new ones: "99% of the prefill saved"
    batch of four    four prompts with one new prefix arrive at once: other engines gain nothing (1.00x), because the
                     prefix is cached only after the batch
    one document     10,000 requests about one document of 512 tokens
    upkeep           share of the run time that the cache itself takes: "0.3%"

For each claim the script gives a count of computed tokens, which does not depend on the machine, and a ratio of times.
The limit of a figure is that of a cache that finds everything and costs nothing. `upkeep` is the time inside the
cache's manager, including block tables and free blocks. An engine without a prefix cache needs these two as well, so
their time is reported, too. Without the cache, `one document` runs only the first 500 of its requests, because each
request computes the same number of tokens. Models have random weights.

    python benchmarks/claims.py [--quick] [--json] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import foreword
from foreword import LLM, RequestOutput, SamplingParams
from foreword.model.checkpoint.random_weights import DEMO_SHAPE, RandomModelShape, save_random_model

SMALL_SHAPE = RandomModelShape(2, 128, 2, 1, 256, 1000, 4096)
KV_BYTES = 2**28
UPKEEP = (
    "begin_step",
    "get_computed_blocks",
    "explanation_of",
    "admit",
    "grow",
    "allocate_running_slots",
    "has_blocks_for",
    "num_quiet_tokens",
    "group_block_tables",
    "take_copies",
    "cache_known_blocks",
    "free",
)
"""The manager's methods that a request's life passes through; none of them calls another one."""


@dataclass(frozen=True)
class Scale:
    """The number of requests and tokens of a run."""

    shape: RandomModelShape
    small_shape: RandomModelShape
    shared_tokens: int = 3000
    pairs: int = 3
    batch_shared_tokens: int = 1024
    document_tokens: int = 512
    requests: int = 10_000
    requests_uncached: int = 500
    upkeep_requests: int = 64


FULL = Scale(DEMO_SHAPE, SMALL_SHAPE)
QUICK = Scale(SMALL_SHAPE, SMALL_SHAPE, 600, 2, 256, 128, 200, 50, 8)


@dataclass(frozen=True)
class Claim:
    """One claim: tokens that went through the model, and times, with and without the cache."""

    name: str
    computed_tokens: int
    computed_tokens_uncached: int
    saved: float
    """Share of the prompt tokens that were not computed."""
    saved_limit: float
    time_ratio: float | None
    """Time without the cache over time with it."""
    identical: bool
    """Whether all answers are the same tokens with and without the cache."""


# ------------------------------------------------------------------------------------------- claims


def prefill_saved(pair: Pair, scale: Scale, rng: np.random.Generator) -> Claim:
    """Prompts of 20 new tokens after a prefix that another prompt has computed."""
    ratios, same, computed, uncached = [], True, 0, 0
    for _ in range(scale.pairs):
        shared = pair.tokens(rng, scale.shared_tokens)
        first, second = (np.concatenate((shared, pair.tokens(rng, 20))) for _ in range(2))
        pair.cached.run([first])
        hit, miss = pair.cached.run([second]), pair.uncached.run([second])
        ratios.append(miss.seconds / hit.seconds)
        same &= hit.answers == miss.answers
        computed, uncached = hit.prompt_tokens_computed, miss.prompt_tokens_computed
    total = scale.shared_tokens + 20
    return _claim(
        "prefill saved", computed, uncached, scale.shared_tokens / total, sorted(ratios)[len(ratios) // 2], same
    )


def batch_of_four(pair: Pair, scale: Scale, rng: np.random.Generator) -> Claim:
    """Four prompts with one common beginning, all at once, on a cache that has never seen that beginning."""
    ratios, same, computed, uncached = [], True, 0, 0
    for _ in range(scale.pairs):
        shared = pair.tokens(rng, scale.batch_shared_tokens)
        prompts = [np.concatenate((shared, pair.tokens(rng, 16))) for _ in range(4)]
        hit, miss = pair.cached.run(prompts), pair.uncached.run(prompts)
        ratios.append(miss.seconds / hit.seconds)
        same &= hit.answers == miss.answers
        computed, uncached = hit.prompt_tokens_computed, miss.prompt_tokens_computed
    limit = 3 * scale.batch_shared_tokens / (4 * (scale.batch_shared_tokens + 16))
    return _claim("batch of four", computed, uncached, limit, sorted(ratios)[len(ratios) // 2], same)


def one_document(pair: Pair, scale: Scale, rng: np.random.Generator) -> Claim:
    """Many questions of 16 tokens about one document, in waves of 250."""
    document = pair.tokens(rng, scale.document_tokens)
    prompts = [np.concatenate((document, pair.tokens(rng, 16))) for _ in range(scale.requests)]
    hit = pair.cached.run(prompts, wave=250)
    miss = pair.uncached.run(prompts[: scale.requests_uncached], wave=250)
    ratio = (miss.seconds / scale.requests_uncached) / (hit.seconds / scale.requests)
    uncached = miss.prompt_tokens_computed * scale.requests // scale.requests_uncached
    limit = (scale.requests - 1) / scale.requests * scale.document_tokens / (scale.document_tokens + 16)
    same = hit.answers[: scale.requests_uncached] == miss.answers
    return _claim("one document", hit.prompt_tokens_computed, uncached, limit, ratio, same)


def upkeep(pair: Pair, scale: Scale, rng: np.random.Generator) -> dict[str, float]:
    """Time inside the cache's manager, for prompts of a shared document and 64 new tokens, with 32 tokens generated."""
    document = pair.tokens(rng, scale.document_tokens)
    prompts = [np.concatenate((document, pair.tokens(rng, 64))) for _ in range(scale.upkeep_requests)]
    seconds, shares = [], []
    for engine in (pair.cached, pair.uncached):
        engine.run(prompts[:2], max_tokens=2)
        with timed(engine.llm.engine.manager, UPKEEP) as spent:
            run = engine.run(prompts, max_tokens=32)
        seconds.append(sum(spent.values()))
        shares.append(seconds[-1] / run.seconds)
    return {
        "share_of_run_time": shares[0],
        "share_of_run_time_uncached": shares[1],
        "claimed_share": 0.003,
        "limit": 0.0,
        "microseconds_per_request": 1e6 * seconds[0] / len(prompts),
        "microseconds_per_request_uncached": 1e6 * seconds[1] / len(prompts),
        "requests": len(prompts),
    }


def _claim(name: str, computed: int, uncached: int, limit: float, ratio: float, same: bool) -> Claim:
    return Claim(name, computed, uncached, 1 - computed / uncached, limit, ratio, same)


# -------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class Run:
    seconds: float
    prompt_tokens_computed: int
    answers: list[list[int]]


class Measured:
    """An engine that counts what it computes."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def tokens(self, rng: np.random.Generator, number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Random prompt tokens."""
        return rng.integers(self.llm.engine.limits.vocab_size, size=number, dtype=np.int32)

    def run(self, prompts: list[Any], *, max_tokens: int = 1, wave: int = 1000) -> Run:
        """Answer all prompts, at most `wave` of them at a time."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs: list[RequestOutput] = []
        started = time.perf_counter()
        for start in range(0, len(prompts), wave):
            batch = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + wave]]
            outputs += self.llm.generate(batch, params, show_progress=False)
        seconds = time.perf_counter() - started
        computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs)
        return Run(seconds, computed, [list(output.outputs[0].token_ids) for output in outputs])


@dataclass(frozen=True)
class Pair:
    """One model in two engines."""

    cached: Measured
    uncached: Measured

    def tokens(self, rng: np.random.Generator, number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self.cached.tokens(rng, number)


@contextmanager
def opened(shape: RandomModelShape, seed: int) -> Iterator[Pair]:
    """Two engines with a model of this shape: one with the cache, one without."""
    with TemporaryDirectory(prefix="foreword-claims-") as folder:
        save_random_model(Path(folder), shape, seed=seed)
        options: dict[str, Any] = {"kv_cache_memory_bytes": KV_BYTES, "self_check": False}
        with LLM(folder, **options) as cached, LLM(folder, enable_prefix_caching=False, **options) as uncached:
            yield Pair(Measured(cached), Measured(uncached))


@contextmanager
def timed(owner: Any, names: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Seconds inside the named methods of an object while the context lasts, including what the timer costs."""
    spent = dict.fromkeys(names, 0.0)

    def measure(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                spent[name] += time.perf_counter() - started

        return measured

    for name in names:
        setattr(owner, name, measure(name, getattr(owner, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(owner, name)


# -------------------------------------------------------------------------------------------- report


def run_benchmark(scale: Scale, seed: int) -> dict[str, Any]:
    """Measures all claims."""
    rng = np.random.default_rng(seed)
    with opened(scale.shape, seed) as pair:
        claims = [prefill_saved(pair, scale, rng), batch_of_four(pair, scale, rng)]
        share = upkeep(pair, scale, rng)
    with opened(scale.small_shape, seed) as pair:
        claims.append(one_document(pair, scale, rng))
    return {
        "benchmark": "claims",
        "foreword": foreword.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "seed": seed,
        "scale": asdict(scale),
        "claims": [asdict(claim) for claim in claims],
        "upkeep": share,
        "identical": all(claim.identical for claim in claims),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table(title="Prompt tokens computed, with the cache and without it", title_justify="left")
    for heading in ("claim", "with", "without", "saved", "limit", "time without / with", "same answers"):
        table.add_column(heading, justify="left" if heading == "claim" else "right")
    for claim in report["claims"]:
        table.add_row(
            claim["name"],
            f"{claim['computed_tokens']:,}",
            f"{claim['computed_tokens_uncached']:,}",
            f"{claim['saved']:.2%}",
            f"{claim['saved_limit']:.2%}",
            f"{claim['time_ratio']:.1f}x",
            "yes" if claim["identical"] else "NO",
        )
    console.print(table)
    share = report["upkeep"]
    console.print(
        f"upkeep of the cache: {share['share_of_run_time']:.2%} of the run time, "
        f"{share['microseconds_per_request']:.0f} us a request; {share['microseconds_per_request_uncached']:.0f} us of "
        f"that without a prefix cache, too (limit 0; elsewhere {share['claimed_share']:.1%})"
    )
    console.print(f"load average {report['load_average']:.1f} on {os.cpu_count()} processors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests: shows that it runs")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on standard output")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = run_benchmark(QUICK if args.quick else FULL, args.seed)
    print_report(report, Console(stderr=args.json))
    print(json.dumps(report))
    return 0 if report["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""The time of attention on the CPU: the compiled kernel, two-phase attention, and their alternatives.

    PYTHONPATH=src python benchmarks/attention.py            all figures (about 3 minutes)
    ... --quick                                              small sizes, one round each
    ... --json FILE                                          everything measured
    ... --cpu-time                                           for machines with other work: time on the processors

1. Decoding by two-phase attention and by the same kernel without sharing: 32 heads of size 128, 32 requests that share
   their whole contexts (ChunkAttention's Table 3). Two rivals: requests that read the same blocks one by one (what
   prefix caching alone gives), and requests that each have a copy of the blocks (no prefix caching).
2. What the search for shared chunks costs when there are none.
3. The kernel against `reference.py`, and against gathering KV and torch's scaled_dot_product_attention per request,
   at the shape of Qwen2-0.5B: prefill, a hit, decoding.

Rounds alternate between the rivals; medians are reported. --cpu-time counts the process's time on its processors
divided by the number of threads, which other work disturbs less; it cannot see threads that wait for each other.
Limits are measured in the same run: reading memory (bytes of KV that must be read / bandwidth) and arithmetic
(operations / rate of the kernel's own inner loop, data in the first-level cache). The script checks that two-phase and
unshared attention give equal bits.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foreword.batch import NO_ENTRIES, Batch
from foreword.kernels.cpu.attention import CpuAttention, fastest_mode
from foreword.kernels.cpu.layout import TILES
from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.llvm import emit
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import AttentionKernel, ReferenceAttention

BLOCK_SIZE = 16
TARGETS = {1024: 3.2, 2048: 4.8, 4096: 6.8}
Span = tuple[int, int]
Clock = Callable[[], float]


def cpu_time() -> float:
    """Seconds of processor time per thread."""
    return time.process_time() / torch.get_num_threads()


class Stopwatch:
    """Times rivals in alternating rounds."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __call__(self, rivals: dict[str, Callable[[], Any]], repeats: int = 1) -> dict[str, float]:
        """Median milliseconds of each rival; the first round warms up."""
        samples: dict[str, list[float]] = {name: [] for name in rivals}
        for number in range(self.count + 1):
            for name, run in rivals.items():
                start = self.clock()
                for _ in range(repeats):
                    run()
                if number:
                    samples[name].append(1e3 * (self.clock() - start) / repeats)
        return {name: statistics.median(times) for name, times in samples.items()}


class Case:
    """Queries of some requests, and KV in blocks; the first `shared` tokens are in the same blocks for all."""

    def __init__(self, spans: Sequence[Span], heads: tuple[int, int], dim: int, shared: int = 0) -> None:
        self.spans, self.heads, self.dim = spans, heads, dim
        torch.manual_seed(0)
        counts = [math.ceil(end / BLOCK_SIZE) for _, end in spans]
        num_shared = shared // BLOCK_SIZE
        tables = np.zeros((len(spans), max(counts)), np.int32)
        free = num_shared
        for table, count in zip(tables, counts, strict=True):
            own = count - min(count, num_shared)
            table[: count - own] = np.arange(count - own)
            table[count - own : count] = np.arange(free, free + own)
            free += own
        self.num_blocks = free
        shape = (free + 1, BLOCK_SIZE, heads[1], dim)
        part = torch.randn(min(free + 1, 64), *shape[1:]).bfloat16()
        own = (part.repeat(math.ceil(shape[0] / len(part)), 1, 1, 1)[: shape[0]] for _ in range(2))
        self.blocks = KVBlocks.plain(*own)
        num_tokens = sum(end - start for start, end in spans)
        self.query = torch.randn(num_tokens, heads[0], dim).bfloat16()
        self.options = AttentionOptions(dim**-0.5)
        self.batch = Batch(
            entries=NO_ENTRIES,
            token_ids=np.zeros(num_tokens, np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans]),
            query_starts=np.cumsum([0, *(end - start for start, end in spans)], dtype=np.int32),
            group_tables=(tables,),
            write_from=np.zeros(len(spans), np.int32),
            copies=np.empty((0, 2), np.int32),
        )

    def plan(self, kernel: AttentionKernel) -> Any:
        return kernel.plan(self.batch, self.num_blocks, BLOCK_SIZE, self.query.device)

    def attend(self, kernel: AttentionKernel, plan: Any) -> Tensor:
        return kernel.attend(self.query, self.blocks, plan, self.options)

    def gather_and_sdpa(self) -> Tensor:
        """What an engine without a paged kernel does: copies each request's KV into one tensor, and calls torch."""
        results = []
        for row, (start, end) in enumerate(self.spans):
            blocks = torch.from_numpy(self.batch.block_tables[row, : math.ceil(end / BLOCK_SIZE)].astype(np.int64))
            keys, values = (
                kv[blocks].flatten(0, 1)[:end].transpose(0, 1)[None] for kv in (self.blocks.keys, self.blocks.values)
            )
            first = int(self.batch.query_starts[row])
            query = self.query[first : first + end - start].transpose(0, 1)[None]
            mask = None
            if 1 < end - start < end:
                mask = torch.arange(end) <= torch.arange(start, end)[:, None]
            causal = start == 0 and end > 1
            results.append(
                scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)
            )
        return torch.cat([result[0].transpose(0, 1) for result in results])

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        seen = sum((start + 1 + end) * (end - start) // 2 for start, end in self.spans)
        return 4 * self.heads[0] * self.dim * seen

    @property
    def kv_bytes(self) -> int:
        """The bytes of KV that must be read at least once."""
        return self.num_blocks * BLOCK_SIZE * self.heads[1] * self.dim * 4


def measure_limits(watch: Stopwatch, quick: bool) -> dict[str, float]:
    """Bytes per second read from memory, and operations per second of the kernel's own inner loop (data in cache)."""
    memory = torch.ones((16 if quick else 256) << 20, dtype=torch.int32)
    read = watch({"read": lambda: memory.sum(dtype=torch.int32)})["read"]
    rate = inner_loop_rate(quick) * torch.get_num_threads()
    return {"read_gb_s": memory.numel() * 4 / read / 1e6, "gflop_s": rate}


def inner_loop_rate(quick: bool) -> float:
    """GFLOP/s of one thread in the product inside the kernel: some rows by 64 lanes, 32 words deep."""
    from numba import njit

    from foreword.kernels.llvm import simd, tiles

    in_tiles = fastest_mode() == TILES
    num_rows = 2 * tiles.TILE_ROWS if in_tiles else simd.ROWS

    @njit
    def run_tiles(config: int, a: int, b: int, c: int, repeats: int) -> None:
        tiles.lay_out(config, num_rows)
        for _ in range(repeats):
            tiles.tile_product_64(num_rows, a, 128, b, 2, c, 256)
        tiles.release()

    @njit
    def run_vectors(config: int, a: int, b: int, c: int, repeats: int) -> None:
        for _ in range(repeats):
            simd.pair_product_64(num_rows, a, 128, b, 32, c, 256)

    run = run_tiles if in_tiles else run_vectors
    config = torch.zeros(tiles.CONFIG_BYTES, dtype=torch.uint8)
    memory = [torch.randn(num_rows, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.zeros(num_rows, 64)]
    addresses = [one.data_ptr() for one in (config, *memory)]
    repeats = 20_000
    watch = Stopwatch(time.thread_time, 2 if quick else 9)
    took = watch({"loop": lambda: run(*addresses, repeats)})["loop"]
    operations = 2 * num_rows * 64 * 32 * (2 if in_tiles or emit.HAS_BF16_DOT else 1)
    return operations * repeats / took / 1e6


def limit_ms(case: Case, limits: dict[str, float]) -> tuple[float, str]:
    """The fewest milliseconds that a case can take on this machine, and which limit sets them."""
    memory = case.kv_bytes / limits["read_gb_s"] / 1e6
    arithmetic = case.operations / limits["gflop_s"] / 1e6
    return (memory, "memory") if memory > arithmetic else (arithmetic, "arithmetic")


def two_phase(watch: Stopwatch, shared: int, requests: int, limits: dict[str, float]) -> dict[str, Any]:
    """Decoding of requests whose whole context is shared."""
    spans = [(shared - 1, shared)] * requests
    together, own = Case(spans, (32, 32), 128, shared), Case(spans, (32, 32), 128)
    sharing, alone = CpuAttention(), CpuAttention(share=False)
    plans = together.plan(sharing), together.plan(alone), own.plan(alone)
    assert torch.equal(together.attend(sharing, plans[0]), together.attend(alone, plans[1])), "bits differ"
    times = watch(
        {
            "two-phase": lambda: together.attend(sharing, plans[0]),
            "same blocks": lambda: together.attend(alone, plans[1]),
            "own blocks": lambda: own.attend(alone, plans[2]),
        }
    )
    limit, reason = limit_ms(together, limits)
    return {
        "ms": times,
        "limit_ms": limit,
        "limit": reason,
        "own_limit_ms": limit_ms(own, limits)[0],
        "speedup_same_blocks": times["same blocks"] / times["two-phase"],
        "speedup_own_blocks": times["own blocks"] / times["two-phase"],
        "target": TARGETS.get(shared),
    }


def nothing_shared(watch: Stopwatch, tokens: int, requests: int, layers: int) -> dict[str, Any]:
    """Times a step's attention (plan, all layers) for requests that share nothing, with and without the search."""
    case = Case([(tokens - 1, tokens)] * requests, (14, 2), 64)
    kernels = {"looking": CpuAttention(), "not looking": CpuAttention(share=False)}

    def step(kernel: CpuAttention) -> None:
        plan = case.plan(kernel)
        for _ in range(layers):
            case.attend(kernel, plan)

    times = watch({name: lambda kernel=kernel: step(kernel) for name, kernel in kernels.items()})
    planning = watch({name: lambda kernel=kernel: case.plan(kernel) for name, kernel in kernels.items()}, 50)
    extra = planning["looking"] - planning["not looking"]
    return {"step_ms": times, "plan_ms": planning, "cost_percent": 100 * extra / times["not looking"]}


def against_others(watch: Stopwatch, spans: Sequence[Span], limits: dict[str, float]) -> dict[str, Any]:
    """One layer of Qwen2-0.5B: 14 heads of size 64, 2 KV heads."""
    case = Case(spans, (14, 2), 64)
    kernel, reference = CpuAttention(), ReferenceAttention()
    plan, tiles = case.plan(kernel), case.plan(reference)
    times = watch(
        {
            "kernel": lambda: case.attend(kernel, plan),
            "reference": lambda: case.attend(reference, tiles),
            "gather + sdpa": case.gather_and_sdpa,
        }
    )
    error = (case.attend(kernel, plan).float() - case.attend(reference, tiles).float()).abs().max().item()
    limit, reason = limit_ms(case, limits)
    return {"ms": times, "limit_ms": limit, "limit": reason, "max_difference": error}


def run(quick: bool, clock: Clock) -> dict[str, Any]:
    """Measures all figures, and prints each at once."""
    watch = Stopwatch(clock, 1 if quick else 9)
    limits = measure_limits(watch, quick)
    print(
        f"memory {limits['read_gb_s']:.0f} GB/s, inner loop {limits['gflop_s']:.0f} GFLOP/s, "
        f"{torch.get_num_threads()} threads"
    )
    report: dict[str, Any] = {"benchmark": "attention", "quick": quick, "clock": clock.__name__, "limits": limits}

    requests = 4 if quick else 32
    print(f"\ntwo-phase, 32 heads of 128, {requests} requests, ms      two-phase  limit   same blocks   own blocks")
    report["two_phase"] = {}
    for shared in (512,) if quick else TARGETS:
        found = report["two_phase"][shared] = two_phase(watch, shared, requests, limits)
        ms = found["ms"]
        print(
            f"  {shared:5} shared tokens {ms['two-phase']:36.2f} {found['limit_ms']:6.2f} {ms['same blocks']:7.1f} "
            f"({found['speedup_same_blocks']:.1f}x) {ms['own blocks']:7.1f} ({found['speedup_own_blocks']:.1f}x)"
            f"   target {found['target'] or '-'}"
        )

    found = report["nothing_shared"] = nothing_shared(watch, 600 if quick else 4096, 16, 2 if quick else 24)
    print(f"\nnothing shared: looking for it costs {found['cost_percent']:.2f}% of attention's step")

    print("\none layer of Qwen2-0.5B, ms           kernel   limit              reference   gather + sdpa")
    cases: dict[str, list[Span]] = {
        "prefill 1024": [(0, 1024)],
        "prefill 4096": [(0, 4096)],
        "hit 4096 + 16": [(4096, 4112)],
        "decode 1 x 4096": [(4095, 4096)],
        "decode 16 x 4096": [(4095, 4096)] * 16,
    }
    report["layer"] = {}
    for name, spans in list(cases.items())[:1] if quick else cases.items():
        found = report["layer"][name] = against_others(watch, spans, limits)
        ms = found["ms"]
        print(
            f"  {name:30} {ms['kernel']:10.2f} {found['limit_ms']:7.2f} ({found['limit']:10}) {ms['reference']:9.2f} "
            f"{ms['gather + sdpa']:12.2f}"
        )
    return report


def main() -> None:
    """Reads the command line, measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all measurements")
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time, not wall time")
    args = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:  # as `foreword` sets it; threads that spin would count as work
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with torch.inference_mode():
        report = run(args.quick, cpu_time if args.cpu_time else time.perf_counter)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Compares foreword's linear layers with weights of 12 bits and oneDNN's, in time and in equal bits.

For every shape and number of rows, foreword and oneDNN compute the same product alternately in one process. On
processors with AMX tiles, a second process repeats this with oneDNN restricted to vectors, as foreword restricts it.
The script also counts the numbers of rows that change a row's bits: the reference are the first rows of a product of
512. Then come all products of a step of 24 such layers, with weights from memory: oneDNN reads 16 bits of each weight,
foreword 12. On a processor without bfloat16 products the script says so and stops.

    python benchmarks/products.py [--repeats 15] [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from foreword.kernels.llvm import tiles
from foreword.model.cpu.product import CompactProduct, can_multiply

SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""(outputs, inputs) of the matrices of Qwen2-0.5B's layers: query, key and value; output; gate and up; down."""
ROWS = (1, 16, 64, 256, 1024)
NUM_LAYERS, STEP_ROWS = 24, (1, 8, 16, 64, 256)
CHECKED = (*range(1, 70), 80, 96, 100, 112, 128, 160, 192, 224, 256, 320, 384, 448)
INSTRUCTIONS = {"tiles": "AVX10_1_512_AMX", "vectors": "AVX512_CORE_FP16"}


def in_turn(one: Callable[[], Tensor], two: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Median microseconds of both products, run alternately."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for function, times in zip((one, two), spent, strict=True):
            started = time.perf_counter()
            function()
            times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(spent[0][1:]), statistics.median(spent[1][1:])


def deviating(product: Callable[[Tensor], Tensor], rows: Tensor) -> int:
    """The number of row counts in CHECKED that give a row other bits than 512 rows do."""
    reference = product(rows[:512])
    return sum(not torch.equal(product(rows[:count]), reference[:count]) for count in CHECKED)


def onednn_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """oneDNN's product with packed weights."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def product(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return result

    return product


def random_weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs + seed)
    return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16()


def measure(repeats: int, threads: int) -> dict[str, list[dict[str, float]]]:
    """Measures in a process whose environment says which instructions oneDNN may use."""
    torch.set_num_threads(threads)
    found = []
    for outputs, inputs in SHAPES:
        weight = random_weight(outputs, inputs)
        rows = torch.randn(max(ROWS), inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
        theirs, ours = onednn_product(weight), CompactProduct([weight], None)
        bits = {"onednn_deviating": deviating(theirs, rows), "ours_deviating": deviating(ours, rows)}
        for count in ROWS:
            x = rows[:count]
            them, us = in_turn(partial(theirs, x), partial(ours, x), repeats)
            found.append({"outputs": outputs, "inputs": inputs, "rows": count, "onednn_us": them, "ours_us": us} | bits)
    return {"products": found, "steps": measure_steps(repeats)}


def measure_steps(repeats: int) -> list[dict[str, float]]:
    """Times all products of a step. Every weight comes from memory, not from a cache of the processor."""
    theirs, ours = [], []
    for layer in range(NUM_LAYERS):
        for outputs, inputs in SHAPES:
            weight = random_weight(outputs, inputs, layer)
            theirs.append((inputs, onednn_product(weight)))
            ours.append((inputs, CompactProduct([weight], None)))
    num_weights = NUM_LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES)
    found = []
    for count in STEP_ROWS:
        rows = {inputs: torch.ones(count, inputs).bfloat16() for _, inputs in SHAPES}

        def step(products: list[tuple[int, Callable[[Tensor], Tensor]]], rows: dict[int, Tensor] = rows) -> Tensor:
            return [product(rows[inputs]) for inputs, product in products][-1]

        them, us = in_turn(partial(step, theirs), partial(step, ours), repeats)
        found.append({"rows": count, "onednn_us": them, "ours_us": us, "weights": num_weights})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="runs of each product (default: 15)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is too few; use at least 1")
    if args.measure:
        print(json.dumps(measure(args.repeats, args.threads)))
        return 0
    if not can_multiply():
        print("This processor multiplies no bfloat16: nothing to measure.", file=sys.stderr)
        print("{}")
        return 0
    report = {}
    for name, instructions in INSTRUCTIONS.items():
        if name == "tiles" and not tiles.has_tiles():
            continue
        options = ["--measure", "--repeats", str(args.repeats), "--threads", str(args.threads)]
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
        output = subprocess.run(
            [sys.executable, __file__, *options], env=environment, stdout=subprocess.PIPE, check=True
        )
        report[name] = json.loads(output.stdout)
        if args.json:
            continue
        print(f"oneDNN with {name}, {args.threads} threads; of {len(CHECKED)} numbers of rows, those with other bits")
        for one in report[name]["products"]:
            shape = f"{one['outputs']}x{one['inputs']}"
            ratio = one["onednn_us"] / one["ours_us"]
            print(
                f"  {shape:>9} {one['rows']:5} rows   oneDNN {one['onednn_us']:7.0f} us, ours {one['ours_us']:7.0f} us "
                f"({ratio:.2f}x)   other bits: {one['onednn_deviating']} / {one['ours_deviating']}"
            )
        for one in report[name]["steps"]:
            print(
                f"  all products of a step, {one['rows']} rows: oneDNN {one['onednn_us'] / 1e3:.1f} ms, ours "
                f"{one['ours_us'] / 1e3:.1f} ms ({one['onednn_us'] / one['ours_us']:.2f}x); "
                f"{one['weights'] / one['ours_us'] / 500:.1f} GB/s if weights had 16 bits"
            )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

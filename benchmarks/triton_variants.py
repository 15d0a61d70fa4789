"""What the compiler makes of every Triton kernel: registers, spills and shared memory. Needs no GPU.

    python benchmarks/triton_variants.py [--quick] [--capability 90]

The assembler that Triton ships compiles each kernel down to machine code, for each element type, head size and option
of attention that layers use. The last line is JSON: one object per variant, with the layout in which a row's scores are
summed and the multiply-adds that were fused. These are facts about the compiler's output, not speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported, because an interpreted kernel cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.step_plan import FOLD_QUERIES
from foreword.kernels.triton.arguments import LayerArguments, decode_sizes, prefill_sizes, tile_constants
from foreword.kernels.triton.blocks import stage_pages, write_rows
from foreword.kernels.triton.decode import attend_items, merge_chunks
from foreword.kernels.triton.prefill import attend_folds
from foreword.kernels.triton.tile import LAUNCH

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
KV_HEADS, GROUPS, BLOCK_SIZE = 8, 4, 16
COMPILE_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
FLOAT_POINTERS = ("stats", "mixtures", "sinks", "slopes")
TYPED_POINTERS = ("output", "query", "keys", "values", "new_keys", "new_values")


@dataclass(frozen=True)
class Variant:
    """A kernel with values for all its constants."""

    kernel: str
    dtype: torch.dtype
    dim: int
    asks: str = ""

    @property
    def options(self) -> AttentionOptions:
        sinks, slopes = (torch.zeros(KV_HEADS * GROUPS) if name in self.asks else None for name in ("sinks", "slopes"))
        return AttentionOptions(
            self.dim**-0.5,
            sliding_window=1024 if "window" in self.asks else None,
            softcap=50.0 if "cap" in self.asks else None,
            sinks=sinks,
            local_chunk=8192 if "chunk" in self.asks else None,
            slopes=slopes,
        )

    def layer(self) -> LayerArguments:
        blocks = torch.empty(2, BLOCK_SIZE, KV_HEADS, self.dim, dtype=self.dtype, device="meta")
        query = torch.empty(2, KV_HEADS * GROUPS, self.dim, dtype=self.dtype, device="meta")
        return LayerArguments(query, KVBlocks.plain(blocks, blocks), self.options)

    def source(self) -> tuple[Any, dict[str, Any]]:
        """The kernel's function and its constants, including those for the compiler."""
        if self.kernel == "copy":
            return stage_pages, {"NUM_TENSORS": 64, "SEGMENT": 2048, "OUT": int(self.asks == "out")}
        layer, dims = self.layer(), (self.dtype, self.dim, self.dim)
        if self.kernel == "prefill":
            sizes = prefill_sizes(*dims)
            return attend_folds, {
                **layer.constants,
                **tile_constants(sizes),
                "HAS_SINKS": layer.has_sinks,
                "VALUE_PARTS": sizes.value_parts,
                "ROW_TILES": triton.cdiv(FOLD_QUERIES * GROUPS, sizes.rows),
            }
        if self.kernel == "decode":
            return attend_items, {**layer.constants, **tile_constants(decode_sizes(*dims))}
        width = triton.next_power_of_2(self.dim)
        if self.kernel == "merge":
            constants = {**layer.merge_constants, "HAS_SINKS": layer.has_sinks, "HEADS": GROUPS, "VALUE_WIDTH": width}
            return merge_chunks, {**constants, "num_warps": 4, **LAUNCH}
        widths = {"KEY_WIDTH": width * KV_HEADS, "VALUE_WIDTH": width * KV_HEADS, "VALUE_DIM": self.dim}
        return write_rows, {"BLOCK_SIZE": BLOCK_SIZE, "HEADS": KV_HEADS, "KEY_DIM": self.dim, **widths}


def variants(quick: bool) -> Iterator[Variant]:
    """All variants, or a few of each kind."""
    for dtype in TYPES:
        for dim in (128,) if quick else HEAD_SIZES:
            if not quick or dtype == torch.bfloat16:
                yield from (Variant(kernel, dtype, dim) for kernel in ("prefill", "decode", "merge", "write"))
    asks = (
        ("window cap sinks", "slopes") if quick else ("window", "chunk", "cap", "sinks", "slopes", "window cap sinks")
    )
    for ask in asks:
        yield from (Variant(kernel, torch.bfloat16, 64, ask) for kernel in ("prefill", "decode", "merge"))
    if quick:
        yield from (Variant(kernel, torch.float32, 64) for kernel in ("prefill", "decode"))
    yield from (Variant("copy", torch.bfloat16, 0, way) for way in ("in", "out"))


def compile_variant(variant: Variant, capability: int) -> Any:
    """Compiles a variant to machine code. Strides and addresses are multiples of 16, as for a model's tensors."""
    function, constants = variant.source()
    options = {name: constants.pop(name) for name in COMPILE_OPTIONS if name in constants}
    signature, attributes, values = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(place,)] = constants[name]
            continue
        attributes[(place,)] = [["tt.divisibility", 16]]
        if name in FLOAT_POINTERS:
            signature[name] = "*fp32"
        elif name in TYPED_POINTERS:
            signature[name] = "*" + TYPES[variant.dtype]
        elif name in ("staging", "addresses", "page_words", "staging_words", "slots"):
            signature[name] = "*i64"
        elif name in ("metadata", "copies"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("factor", "cap") else "i32"
            if name in ("factor", "cap", "num_copies"):
                del attributes[(place,)]
    source = ASTSource(function, signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def describe(variant: Variant, capability: int) -> dict[str, Any]:
    """One variant's facts."""
    compiled = compile_variant(variant, capability)
    ir, assembly = compiled.asm["ttgir"], compiled.asm["ptx"]
    usage = resource_usage(compiled.asm["cubin"])
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ir, re.MULTILINE))
    summed = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)", ir)
    return {
        "kernel": variant.kernel,
        "dtype": TYPES[variant.dtype],
        "head_size": variant.dim,
        "asks": variant.asks,
        "warps": compiled.metadata.num_warps,
        "registers": usage["REG"],
        "spill_bytes": usage["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "instruction": next((name for name in ("wgmma", "mma.sync") if name in assembly), "fma"),
        "row_layouts": sorted({layouts[name] for name in summed}),
        "fused_by_compiler": bool(re.search(r"\b(mul|add|sub)\.f32", assembly)),
    }


def resource_usage(binary: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack, as NVIDIA's tool reads them from the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only a few variants of each kind")
    parser.add_argument("--capability", type=int, default=90, help="compute capability to compile for; 90 is Hopper")
    arguments = parser.parse_args()
    facts = []
    columns = (
        "kernel",
        "dtype",
        "head_size",
        "asks",
        "warps",
        "registers",
        "spill_bytes",
        "shared_bytes",
        "instruction",
    )
    print("| " + " | ".join(column.replace("_", " ") for column in columns) + " |")
    print("|" + "---|" * len(columns))
    for variant in variants(arguments.quick):
        facts.append(describe(variant, arguments.capability))
        print("| " + " | ".join(str(facts[-1][column]) for column in columns) + " |", flush=True)
    print(json.dumps({"triton": triton.__version__, "capability": arguments.capability, "variants": facts}))


if __name__ == "__main__":
    sys.exit(main())

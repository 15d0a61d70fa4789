"""foreword in both arithmetics and llama.cpp on the same GGUF files: start, memory, first token and decoding.

Engines alternate within each round (A B, then B A), so a ratio compares times of the same minute. Prompts are random
tokens; a hit shares all but its last 16 tokens with the prompt before. The limit of decoding is the time to read what
one token needs: the file's bytes, over the rate at which one thread reads memory (`read_gb_s`).

    python benchmarks/weights.py --file PATH.gguf [--shape 0.5b] [--types Q4_0,Q8_0] [--llama-python PATH] [--prompt N]

`--shape` makes a larger file with the tokenizer of PATH and random weights in BF16. With `--types`, llama.cpp writes
the file again in these types (from quantized values, so the values differ from a converter's). The last line is JSON:
for each type and engine the medians and the best times, and foreword's share of llama.cpp's time by both. On a machine
that other programs use, the best times say more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

from engine import EngineProcess
from engine_drivers.protocol import Options
from foreword.model.checkpoint.gguf.file import open_gguf

OWN, DECODE_IN, DECODE_OUT, MANY = 16, 32, 64, 16
KV_BYTES = 1 << 30
HEADS = {"attention.head_count_kv": 2, "vocab_size": 49_152}
SHAPES = {
    "0.5b": {"block_count": 24, "embedding_length": 896, "feed_forward_length": 4864, "attention.head_count": 14}
    | {"rope.dimension_count": 64, **HEADS},
    "1.5b": {"block_count": 28, "embedding_length": 1536, "feed_forward_length": 8960, "attention.head_count": 12}
    | {"rope.dimension_count": 128, **HEADS},
}
"""Sizes of Qwen2's 0.5B and 1.5B models, with SmolLM2's vocabulary. Keys are names in a GGUF file's metadata."""
ENGINES = {"foreword": ("foreword", "auto"), "foreword int8": ("foreword", "int8"), "llama.cpp": ("llama.cpp", "auto")}
"""By name in the report: the engine, and the arithmetic in which it multiplies weights."""
REQUANTIZE = """
import ctypes, sys
import llama_cpp as api
source, target, kind = sys.argv[1:]
params = api.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
assert api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) == 0
"""


def resident_mb(engine: EngineProcess) -> float:
    """Megabytes of memory that an engine's process holds."""
    status = Path(f"/proc/{engine._process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000


def write_random(source: Path, target: Path, sizes: dict[str, int]) -> None:
    """Writes a Llama of these sizes with random weights. Other metadata comes from `source`, also a Llama."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            value = sizes.get(name.removeprefix("llama."), field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    vocab, hidden, wide = sizes["vocab_size"], sizes["embedding_length"], sizes["feed_forward_length"]
    kv = hidden // sizes["attention.head_count"] * sizes["attention.head_count_kv"]
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        bits = (rng.standard_normal((rows, columns), np.float32) * 0.02).view(np.uint32) >> 16
        raw = bits.astype(np.uint16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd", vocab, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(sizes["block_count"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", wide, hidden),
            ("ffn_up", wide, hidden),
            ("ffn_down", hidden, wide),
        ):
            add(f"blk.{layer}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_rate() -> float:
    """Bytes per second that one thread reads from memory."""
    numbers, best = np.ones(1 << 26, np.float32), 0.0
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - started))
    return best


def measure(path: Path, pythons: dict[str, str], args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The figures of one file."""
    repeats, length = args.repeats, args.prompt
    table = open_gguf(path)[0].tensors["token_embd.weight"]
    vocab = table.shape[0]
    if table.blocks.num_values == 1:  # unquantized weights have only one arithmetic
        pythons = {name: python for name, python in pythons.items() if ENGINES[name][1] != "int8"}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in pythons}
    rng = np.random.default_rng(0)

    def note(name: str, figure: str, value: float) -> None:
        found[name].setdefault(figure, []).append(value)
        print(f"{path.stem[-24:]:24} {name:13} {figure:12} {value:9.1f}", flush=True)

    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name, python in pythons.items():
            driver, weights = ENGINES[name]
            options = Options(
                str(path), args.threads, KV_BYTES, max(length, 1024) + OWN + DECODE_OUT, MANY, False, weights
            )
            started = time.perf_counter()
            engines[name] = EngineProcess(driver, python, options, folder / f"{name}.log")
            note(name, "start_s", time.perf_counter() - started)
            note(name, "rss_mb", resident_mb(engines[name]))
            stack.callback(engines[name].close)
        for repeat in range(repeats + 1):
            shared = rng.integers(3, vocab, length).tolist()
            miss, hit = (shared + rng.integers(3, vocab, OWN).tolist() for _ in range(2))
            prompts = [rng.integers(3, vocab, DECODE_IN).tolist() for _ in range(MANY)]
            for name, engine in list(engines.items())[:: -1 if repeat % 2 else 1]:
                engine.reset()
                times = {"miss_ms": 1000 * engine.generate([miss], 1)[0], "hit_ms": 1000 * engine.generate([hit], 1)[0]}
                for count in (1, MANY):
                    engine.generate(prompts[:count], 1)  # so that both next calls find the prompts cached
                    short = engine.generate(prompts[:count], 1)[0]
                    long = engine.generate(prompts[:count], 1 + DECODE_OUT)[0]
                    times[f"decode{count}_ms"] = 1000 * (long - short) / DECODE_OUT
                for figure, value in times.items() if repeat else ():
                    note(name, figure, value)
        for name, engine in engines.items():
            note(name, "rss_end_mb", resident_mb(engine))
    report: dict[str, object] = {"file_mb": round(path.stat().st_size / 1e6, 1)}
    for kind, join in (("median", statistics.median), ("best", min)):
        own = {name: {key: round(join(values), 2) for key, values in of.items()} for name, of in found.items()}
        report[kind] = own
        if (theirs := own.pop("llama.cpp", None)) is not None:
            shares = {name: {key: round(of[key] / theirs[key], 3) for key in of} for name, of in own.items()}
            report[kind] = {**own, "llama.cpp": theirs, "of llama.cpp": shares}
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="foreword in both arithmetics and llama.cpp on the same GGUF files")
    parser.add_argument("--file", required=True, metavar="PATH", help="a GGUF file")
    parser.add_argument("--shape", choices=SHAPES, help="make a file of this shape with random weights")
    parser.add_argument("--types", default="", help="types in which to write the file again, separated by commas")
    parser.add_argument("--llama-python", metavar="PATH", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up (default: 5)")
    parser.add_argument(
        "--prompt", type=int, default=1024, metavar="N", help="tokens that a hit shares (default: 1024)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of every engine (default: all cores)"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} is too few; run at least 1")
    if not Path(args.file).is_file():
        parser.error(f"--file {args.file} is no file; give a GGUF file")
    if args.types and not args.llama_python:
        parser.error(f"--types {args.types} needs --llama-python: llama.cpp writes them")
    pythons = {"foreword": sys.executable, "foreword int8": sys.executable}
    pythons |= {"llama.cpp": args.llama_python} if args.llama_python else {}
    report: dict[str, object] = {"read_gb_s": round(read_rate() / 1e9, 1), "threads": args.threads}
    with TemporaryDirectory(prefix="foreword-weights-") as made:
        folder, source = Path(made), Path(args.file)
        if args.shape:
            source = folder / f"{args.shape}.gguf"
            write_random(Path(args.file), source, SHAPES[args.shape])
        paths = {"as it is": source}
        for kind in filter(None, args.types.split(",")):
            paths[kind] = folder / f"{source.stem}.{kind}.gguf"
            command = [args.llama_python, "-c", REQUANTIZE, str(source), str(paths[kind]), kind]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for kind, path in paths.items():
            report[kind] = measure(path, pythons, args, folder)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

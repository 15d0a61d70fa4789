"""How much stored KV shrinks without loss, and how fast: zstd packs the bytes with exponents and leaves the others.

A real checkpoint computes 1,024 tokens of this repository's pages. Their KV is cut as a tier stores it: 16 tokens of
all layers. In bfloat16 and float32 the highest byte of each number holds the sign and all but one bit of the exponent.
The lower bytes are noise, which no packer shrinks. KV in 8 bits (with a scale for each token and head) is packed whole.
The disk's rate is that of reading a file of 512 MiB past the page cache, where the system allows that.

    python benchmarks/kv_packing.py --model FOLDER [--level N] [--repeats N]        needs: pip install zstandard

The last line is JSON: for each type the share of bytes that is left, and MB/s of KV by one thread, best of some runs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer

BLOCK, TOKENS, READ = 16, 1024, 1 << 29
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")


def fastest(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Seconds of the fastest run, and what it returned."""
    times, result = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - started)
    return min(times), result


def keys_and_values(folder: str) -> list[torch.Tensor]:
    """Keys and values of each layer, [tokens, heads, dim], float32."""
    text = "\n".join((Path(__file__).parents[1] / page).read_text() for page in PAGES)
    token_ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        layers = model(token_ids, use_cache=True).past_key_values.layers
    return [side[0].transpose(0, 1).contiguous() for layer in layers for side in (layer.keys, layer.values)]


def in_bytes(side: torch.Tensor, dtype: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[tokens, heads * dim, bytes of a number], low byte first."""
    if dtype == "int8":
        scales = side.abs().amax(-1, keepdim=True) / 127
        return (side / scales).round().to(torch.int8).view(torch.uint8).numpy().reshape(len(side), -1, 1)
    rounded = side.to(getattr(torch, dtype))
    return rounded.view(torch.uint8).numpy().reshape(len(side), -1, rounded.element_size())


def packing(sides: list[torch.Tensor], dtype: str, level: int, repeats: int) -> dict[str, float]:
    numbers = [in_bytes(side, dtype) for side in sides]
    starts = range(0, len(sides[0]) - BLOCK + 1, BLOCK)
    objects = [np.concatenate([side[at : at + BLOCK].reshape(-1, side.shape[-1]) for side in numbers]) for at in starts]
    size = sum(one.nbytes for one in objects)
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def pack() -> list[tuple[bytes, Any]]:
        return [(packer.compress(one[:, -1].tobytes()), np.ascontiguousarray(one[:, :-1])) for one in objects]

    def unpack() -> list[Any]:
        found = []
        for high, low in packed:
            one = np.empty((len(low), low.shape[1] + 1), np.uint8)
            one[:, -1], one[:, :-1] = np.frombuffer(unpacker.decompress(high), np.uint8), low
            found.append(one)
        return found

    pack_s, packed = fastest(pack, repeats)
    unpack_s, unpacked = fastest(unpack, repeats)
    assert all(np.array_equal(*pair) for pair in zip(objects, unpacked, strict=True))
    left = sum(len(high) + low.nbytes for high, low in packed) / size
    return {
        "left": round(left, 3),
        "pack_mb_s": round(size / pack_s / 1e6),
        "unpack_mb_s": round(size / unpack_s / 1e6),
    }


def disk_rate(repeats: int) -> float | None:
    """MB/s of reading a file of the working folder past the page cache; None if the system does not allow that."""
    with NamedTemporaryFile(dir=".") as file, mmap.mmap(-1, 1 << 23) as buffer:
        for _ in range(READ // len(buffer)):
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
        try:
            direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None

        def read() -> None:
            os.lseek(direct, 0, os.SEEK_SET)
            while os.readv(direct, [buffer]):
                pass

        taken, _ = fastest(read, repeats)
        os.close(direct)
        return round(READ / taken / 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description="how far stored KV packs without loss")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a real checkpoint with its tokenizer")
    parser.add_argument("--level", type=int, default=1, help="level of zstd (default: 1)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sides = keys_and_values(args.model)
    found: dict[str, Any] = {"level": args.level, "disk_read_mb_s": disk_rate(args.repeats)}
    for dtype in ("bfloat16", "float32", "int8"):
        found[dtype] = packing(sides, dtype, args.level, args.repeats)
        print(f"{dtype}: {found[dtype]}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

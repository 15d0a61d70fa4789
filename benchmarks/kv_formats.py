"""What KV in codes of eight bits holds, costs and changes, beside KV in the model's own type.

    PYTHONPATH=src python benchmarks/kv_formats.py MODEL             a folder or hub id (about 3 minutes for 135M)
    ... --dtype float32                                              of activations, and so of the plain KV
    ... --context 8192 --prompt 1024 --requests 1,4 --rounds 7       what is timed
    ... --texts FOLDER                                               texts for the quality (default: docs/)

1. Tokens that a gigabyte of KV holds.
2. Seconds of one decoding step after `--context` tokens, and of a prompt of `--prompt` tokens, whole model, the two
   formats in alternating rounds on the same weights. The contexts' KV is random numbers, on which times do not depend.
   Wall time is the median round; processor time is the sum of all rounds, which other programs disturb less.
3. Quality: for ten texts, the mean over all positions of KL(own type || int8) between the next tokens' distributions,
   in nats; the largest of a text; and the share of positions whose likeliest token is the same.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreword.config import Dtype, ModelConfig
from foreword.model.kv_quality import FormatPool, both_formats, quality, tokens_a_gigabyte
from foreword.model.loader import LoadedModel, load_model
from foreword.text import Tokenizer

NUM_TEXTS, TEXT_TOKENS = 10, 256
ROOT = Path(__file__).resolve().parents[1]


def fill(pool: FormatPool) -> None:
    """Write random keys and values to all slots."""
    generator, storage = torch.Generator().manual_seed(0), pool.storage
    for blocks in storage.blocks.values():
        for first in range(0, storage.num_blocks * blocks.block_size, 4096):
            slots = torch.arange(first, min(first + 4096, storage.num_blocks * blocks.block_size))
            shape = len(slots), blocks.num_kv_heads
            keys = torch.randn(*shape, blocks.key_dim, generator=generator)
            blocks.write(slots, keys, torch.randn(*shape, blocks.value_dim, generator=generator))


def alternate(runs: dict[str, Callable[[], Any]], rounds: int, *, before: str, after: str) -> dict[str, Any]:
    """Seconds of each in alternating rounds after one that warms up, and how much faster `after` is than `before`."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor = dict.fromkeys(runs, 0.0)
    for number in range(rounds + 1):
        for name, run in runs.items():
            run()  # binds the layers to the pool
            began = time.perf_counter(), time.process_time()
            run()
            if number:
                wall[name].append(time.perf_counter() - began[0])
                processor[name] += time.process_time() - began[1]
    medians = {name: statistics.median(times) for name, times in wall.items()}
    return {
        "wall_s": medians,
        "speedup": medians[before] / medians[after],
        "speedup_of_processor_time": processor[before] / processor[after],
    }


def times(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """Decoding steps and prompts."""
    found, rng = {}, np.random.default_rng(0)
    for count in (int(number) for number in args.requests.split(",")):
        rivals = both_formats(model, count * args.context)
        for rival in rivals.values():
            fill(rival)
        tokens = [[int(rng.integers(model.vocab_size))] for _ in range(count)]
        batches = {name: own.batch([args.context - 1] * count, tokens) for name, own in rivals.items()}
        found[f"decoding {count} at {args.context}"] = alternate(
            {name: functools.partial(own.logits, batches[name], range(count)) for name, own in rivals.items()},
            args.rounds,
            before="own",
            after="int8",
        )
    rivals = both_formats(model, args.prompt)
    prompt = rng.integers(0, model.vocab_size, args.prompt).tolist()
    batches = {name: own.batch([0], [prompt]) for name, own in rivals.items()}
    found[f"prefill of {args.prompt}"] = alternate(
        {name: functools.partial(own.logits, batches[name], [args.prompt - 1]) for name, own in rivals.items()},
        args.rounds,
        before="own",
        after="int8",
    )
    return found


def read_texts(folder: Path, model: str) -> list[list[int]]:
    """The beginnings of the longest texts in a folder, as tokens."""
    tokenizer = Tokenizer.load(model)
    assert tokenizer is not None, "texts need a tokenizer"
    files = sorted(folder.rglob("*.md"), key=lambda path: (-path.stat().st_size, str(path)))[:NUM_TEXTS]
    return [tokenizer.encode(path.read_text()[: 8 * TEXT_TOKENS])[:TEXT_TOKENS].tolist() for path in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    dtype: Dtype = args.dtype
    model = load_model(ModelConfig(args.model, dtype=dtype))
    sizes, found = tokens_a_gigabyte(model), quality(model, read_texts(args.texts, args.model))
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "own": str(model.dtype).removeprefix("torch."),
        "head_size": sorted({layer.key_dim for layer in model.layers.values()}),
        "threads": torch.get_num_threads(),
        "tokens_a_gigabyte": sizes,
        "more_tokens": sizes["int8"] / sizes["own"],
        "quality": asdict(found),
        "times": times(model, args),
    }
    print(f"KV in {result['own']} and in int8, {result['model']}, {result['threads']} threads")
    print(f"  tokens a gigabyte: {sizes['own']:,} and {sizes['int8']:,}, {result['more_tokens']:.2f} times as many")
    print(f"  mean KL {found.mean_divergence:.5f} nats, same likeliest token {found.same_likeliest_token:.2%}")
    for name, own in result["times"].items():
        by_cpu = own["speedup_of_processor_time"]
        print(f"  {name:28} {own['speedup']:12.2f} times as fast ({by_cpu:.2f} by processor time)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

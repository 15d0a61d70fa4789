"""KV in codes of eight bits beside KV in the model's own dtype: tokens held, time, and changes of the output.

    PYTHONPATH=src python benchmarks/kv_formats.py MODEL             a folder or hub id (about 3 minutes for 135M)
    ... --dtype float32                                              dtype of activations and of the plain KV
    ... --context 8192 --prompt 1024 --requests 1,4 --rounds 7       what is timed
    ... --texts FOLDER                                               texts for the quality (default: docs/)

1. Tokens that a gigabyte of KV holds.
2. Seconds of one decoding step after `--context` tokens, and of a prompt of `--prompt` tokens, whole model, the two
   formats in alternating rounds on the same weights. The contexts' KV is random numbers, on which times do not depend.
   Wall time is the median round; processor time is the sum of all rounds, which other programs disturb less.
3. Quality, over ten texts: the mean over all positions of KL(own dtype || int8) between the distributions of the next
token, in nats; the largest mean of a text; and the share of positions whose likeliest token is the same.

    python benchmarks/kv_formats.py --gguf PATH.gguf --llama-python PATH [--context 8192] [--rounds 7] [--threads N]

This compares foreword with llama.cpp (`-ctk q8_0 -ctv q8_0`) on one GGUF file in one run, each engine alternately with
plain KV and with KV in codes: processor time of a token after a prompt of `--context` random tokens, and of that
prompt. Without `--llama-python`, foreword runs alone. The default is a thread for each processor. On a busy machine use
one thread, because several threads spin while they wait for each other.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from engine import EngineProcess
from engine_drivers.protocol import Options
from foreword.config import Dtype, ModelConfig
from foreword.model.checkpoint.gguf.file import open_gguf
from foreword.model.kv_quality import FormatPool, both_formats, quality, tokens_a_gigabyte
from foreword.model.loader import LoadedModel, load_model
from foreword.text import Tokenizer

NUM_TEXTS, TEXT_TOKENS = 10, 256
DECODED = 32
"""Tokens that are decoded after a prompt, when engines are compared."""
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
    """Seconds of each run in alternating rounds, after a warm-up round, and the speedup of the run `after`."""
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
    """Times decoding steps and prompts."""
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


def beside_llama(args: argparse.Namespace) -> dict[str, Any]:
    """Median processor milliseconds of each engine and format, and the ratio of KV in codes to plain KV."""
    rivals = {"foreword": ("foreword", sys.executable, "auto"), "foreword int8": ("foreword", sys.executable, "int8")}
    if args.llama_python:
        rivals |= {"llama.cpp": ("llama.cpp", args.llama_python, "auto")}
        rivals |= {"llama.cpp q8_0": ("llama.cpp", args.llama_python, "q8_0")}
    rng, num_tokens = np.random.default_rng(0), open_gguf(Path(args.gguf))[0].tensors["token_embd.weight"].shape[0]
    found: dict[str, dict[str, list[float]]] = {name: {"prompt_ms": [], "token_ms": []} for name in rivals}
    with TemporaryDirectory(prefix="foreword-kv-") as folder, ExitStack() as closes:
        engines = {}
        for name, (engine, python, kv) in rivals.items():
            most = args.context + DECODED + 1
            options = Options(args.gguf, args.threads, 1 << 30, most, 1, drafts=False, weights="auto", kv=kv)
            engines[name] = EngineProcess(engine, python, options, Path(folder) / f"{name}.log")
            closes.callback(engines[name].close)
            engines[name].generate([rng.integers(3, num_tokens, 64).tolist()], 2)  # pays what only a first call pays
        for number in range(args.rounds):
            prompt = rng.integers(3, num_tokens, args.context).tolist()
            for name, engine in list(engines.items())[:: -1 if number % 2 else 1]:
                engine.reset()
                took = []
                for count in (1, 1, 1 + DECODED):  # cold, a hit, a hit with tokens after it
                    engine.generate([prompt], count)
                    took.append(1000 * engine.processor_s)
                print(f"round {number}: {name} took {', '.join(f'{ms:.0f}' for ms in took)} ms", flush=True)
                found[name]["prompt_ms"].append(took[0])
                found[name]["token_ms"].append((took[2] - took[1]) / DECODED)
    medians = {name: {key: statistics.median(values) for key, values in own.items()} for name, own in found.items()}
    names = list(medians)
    ratios = {
        of: {key: medians[of][key] / medians[by][key] for key in medians[of]}
        for by, of in zip(names[::2], names[1::2], strict=True)
    }
    return {
        "file": Path(args.gguf).name,
        "context": args.context,
        "threads": args.threads,
        "processor_ms": medians,
        "of own": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--gguf", help="a GGUF file: compare whole engines on it")
    parser.add_argument("--llama-python", metavar="PATH", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every engine, with --gguf")
    parser.add_argument("--texts", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    if (args.model is None) == (args.gguf is None):
        parser.error("give a model, or --gguf PATH")
    if args.gguf:
        compared = beside_llama(args)
        for name, own in compared["processor_ms"].items():
            print(
                f"{name:15} {own['token_ms']:7.2f} ms a token after {args.context}, {own['prompt_ms']:8.0f} ms a prompt"
            )
        print(json.dumps(compared))
        return
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

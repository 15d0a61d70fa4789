"""Decoding with sampling beside greedy decoding, on a real checkpoint: the cost of a draw at its vocabulary's size.

Each kind of sampling is interleaved with greedy decoding (A B C, then C B A, ...), so a ratio compares times of the
same minute. Prompts are pieces of this repository's architecture page, different in every round. Drafts are off,
because with drafts the speed would depend on how repetitive the answers are. `engine.py` measures the same kinds of
sampling with random weights and more engines.

    python benchmarks/sampled.py --model FOLDER [--vllm-python PATH] [--dtype float32] [--repeats N]

The last line is JSON: for each engine and each figure the median of tokens per second, and of the ratio to greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from engine import DECODE_IN, DECODE_OUT, KV_BYTES, NUM_REQUESTS, SAMPLED, EngineProcess
from engine_drivers.protocol import Options

TEXT = Path(__file__).parents[1] / "ARCHITECTURE.md"
KINDS = {"greedy": None, **SAMPLED}


def main() -> int:
    parser = argparse.ArgumentParser(description="what sampling costs beside greedy decoding")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a real checkpoint with its tokenizer")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="dtype of every engine")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up (default: 5)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of every engine (default: all cores)"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} is too few; run at least 1")
    token_ids = AutoTokenizer.from_pretrained(args.model)(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    pythons = {"foreword": sys.executable, **({"vllm": args.vllm_python} if args.vllm_python else {})}
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in pythons}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foreword-sampled-")))
        options = Options(args.model, args.threads, KV_BYTES, DECODE_IN + DECODE_OUT, NUM_REQUESTS, False, args.dtype)
        engines = []
        for name, python in pythons.items():
            engines.append(EngineProcess(name, python, options, folder / f"{name}.log"))
            stack.callback(engines[-1].close)
        for repeat in range(args.repeats + 1):
            for count in (1, NUM_REQUESTS):
                starts = [(37 * repeat + 101 * number) % (len(token_ids) - DECODE_IN) for number in range(count)]
                prompts = [token_ids[start : start + DECODE_IN] for start in starts]
                for kind in list(KINDS)[:: -1 if repeat % 2 else 1]:
                    for engine in engines[:: -1 if repeat % 2 else 1]:
                        engine.reset()
                        seconds, _ = engine.generate(prompts, DECODE_OUT, KINDS[kind])
                        rate = count * DECODE_OUT / seconds
                        print(f"{repeat:2} {engine.name:9} {count:2} {kind:7} {rate:8.1f} tokens/s", flush=True)
                        if repeat:
                            rates[engine.name].setdefault(f"{kind}_{count}", []).append(rate)
    report = {
        name: {
            figure: {
                "tok_s": round(statistics.median(own), 1),
                "of_greedy": round(
                    statistics.median(
                        a / b for a, b in zip(own, found[f"greedy_{figure.split('_')[-1]}"], strict=True)
                    ),
                    3,
                ),
            }
            for figure, own in found.items()
        }
        for name, found in rates.items()
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

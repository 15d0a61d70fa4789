"""Scores of many items after one long query, with and without the cache, alternately on one model.

Prints a line for each kind of score. The last line is JSON: processor and wall seconds per item, their ratios, whether
all scores have equal bits, and the limit, which is the ratio of the computed tokens. Only `--computed` items are scored
without the cache, which is enough to know what an item costs there.

    .venv/bin/python benchmarks/scores.py --model FOLDER
    .venv/bin/python benchmarks/scores.py --model FOLDER --items 20 --query 500
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from foreword import LLM, SamplingParams

LABELS = (5, 6)
WANTED = 15
"""The target ratio with the cache, for 100 items of 50 tokens after a query of 2,000."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--item", type=int, default=50, help="tokens of an item")
    parser.add_argument("--query", type=int, default=2000, help="tokens before each item")
    parser.add_argument("--computed", type=int, default=4, help="items that are scored without the cache")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    length = options.query + options.item
    with LLM(options.model, dtype=options.dtype, max_model_len=length + 16, self_check=False) as llm:
        vocab = min(llm.engine.limits.vocab_size, 30_000)
        query = rng.integers(10, vocab, options.query)
        items = [rng.integers(10, vocab, options.item) for _ in range(options.items)]
        prompts = [{"prompt_token_ids": [*query.tolist(), *item.tolist()]} for item in items]
        llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # pays what only a first request pays
        kinds: dict[str, Callable[[bool], SamplingParams]] = {
            "labels": lambda cached: _params(cached, label_token_ids=LABELS),
            "label probabilities": lambda cached: _params(cached, logprob_token_ids=LABELS),
            "continuations": lambda cached: _params(cached, prompt_logprobs=0, score_from=options.query),
        }
        found = {kind: _measure(llm, prompts, make, options) for kind, make in kinds.items()}
    for kind, figures in found.items():
        print(
            f"{kind:<20} {figures['cached_s']:.3f} processor seconds an item, {figures['computed_s']:.3f} without the "
            f"cache: {figures['ratio']:.1f} times, of at most {figures['limit']:.1f}"
        )
    print(json.dumps({**vars(options), "wanted": WANTED, **found}))


def _params(cached: bool, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=not cached, **more)  # type: ignore[arg-type]


def _measure(
    llm: LLM,
    prompts: Sequence[dict[str, list[int]]],
    make: Callable[[bool], SamplingParams],
    options: argparse.Namespace,
) -> dict[str, object]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    wall: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, float] = {}
    scores: list[list[object]] = []
    for _ in range(options.rounds):
        for cached in (True, False):
            llm.reset_prefix_cache()  # the query is computed once, by the first item
            own = prompts if cached else prompts[: options.computed]
            computed = llm.engine.num_computed_tokens
            started, spent = time.monotonic(), time.process_time()
            outputs = llm.generate(own, make(cached), show_progress=False)
            seconds[cached].append((time.process_time() - spent) / len(own))
            wall[cached].append((time.monotonic() - started) / len(own))
            tokens[cached] = (llm.engine.num_computed_tokens - computed) / len(own)
            scores.append([(output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs])
    with_cache, without = (statistics.median(seconds[cached]) for cached in (True, False))
    wall_with, wall_without = (statistics.median(wall[cached]) for cached in (True, False))
    same = all(one == whole for some in scores for one, whole in zip(some, scores[0], strict=False))
    return {
        "cached_s": with_cache,
        "computed_s": without,
        "ratio": without / with_cache,
        "wall_cached_s": wall_with,
        "wall_computed_s": wall_without,
        "wall_ratio": wall_without / wall_with,
        "tokens_cached": tokens[True],
        "tokens_computed": tokens[False],
        "limit": tokens[False] / tokens[True],
        "equal_bits": same,
    }


if __name__ == "__main__":
    main()

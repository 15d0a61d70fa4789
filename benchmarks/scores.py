"""Scores of many items after one long query, with and without the cache, in turn, on one model.

Prints a line for each kind of score, and as its last line JSON: seconds an item, their ratio, and whether all scores
have equal bits. `--computed` items are enough to know what an item costs without the cache.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--item", type=int, default=50, help="tokens of an item")
    parser.add_argument("--query", type=int, default=2000, help="tokens before each item")
    parser.add_argument("--computed", type=int, default=4, help="items that are scored without the cache")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    length = options.query + options.item
    with LLM(options.model, dtype=options.dtype, max_model_len=length + 16, self_check=False) as llm:
        vocab = min(llm.engine.limits.vocab_size, 30_000)
        query = rng.integers(10, vocab, options.query)
        items = [rng.integers(10, vocab, options.item) for _ in range(options.items)]
        prompts = [{"prompt_token_ids": [*query.tolist(), *item.tolist()]} for item in items]
        llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # what a first request alone pays
        kinds: dict[str, Callable[[bool], SamplingParams]] = {
            "labels": lambda cached: _params(cached, logprob_token_ids=LABELS),
            "continuations": lambda cached: _params(cached, prompt_logprobs=0, score_from=options.query),
        }
        found = {kind: _measure(llm, prompts, make, options) for kind, make in kinds.items()}
    for kind, figures in found.items():
        print(f"{kind:<14} {figures['cached_s']:.3f} s an item, {figures['computed_s']:.3f} s without the cache")
    print(json.dumps({**vars(options), **found}))


def _params(cached: bool, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=not cached, **more)  # type: ignore[arg-type]


def _measure(
    llm: LLM,
    prompts: Sequence[dict[str, list[int]]],
    make: Callable[[bool], SamplingParams],
    options: argparse.Namespace,
) -> dict[str, object]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    scores: list[list[object]] = []
    for _ in range(options.rounds):
        for cached in (True, False):
            llm.reset_prefix_cache()  # the query is computed once, by the first item
            started = time.monotonic()
            own = prompts if cached else prompts[: options.computed]
            outputs = llm.generate(own, make(cached), show_progress=False)
            seconds[cached].append((time.monotonic() - started) / len(own))
            scores.append([(output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs])
    with_cache, without = (statistics.median(seconds[cached]) for cached in (True, False))
    same = all(one == whole for some in scores for one, whole in zip(some, scores[0], strict=False))
    return {"cached_s": with_cache, "computed_s": without, "ratio": without / with_cache, "equal_bits": same}


if __name__ == "__main__":
    main()

"""What linking saves, and what it costs in answers.

Quality: a model answers questions about documents in parts, by greedy decoding. An answer is right if it contains the
right one. The same questions go to every method and to `all`, the plain prompt. Blocks hold one token, so that the
method alone decides which tokens are linked.

- `independent`              T1: facts alone; no question needs two parts, so this is a check, not a result
- `cut-16`, `-64`, `-256`    T2: the same text cut every 16 tokens (64, 256), in the middle of facts
- `parameters`               T3: a line "The code of the <argument> is 4821."; text after the argument is computed
- `order`                    T4: a fact is stated again in a later part, and the last statement holds
- `scope`                    T5: "In Lisbon:" in one part, facts of Lisbon in the next
- `hops`                     T6: "The keeper of the amber falcon is Maria." in one part, "The home of Maria is Oslo."
                             in another
- `leak`                     T7: asks for a fact of a part that is cached and not in the prompt

Negative controls show that the tasks can detect errors. `no-rotation` copies keys without rotating them to their new
positions. `shuffled-values` gives each copied token another token's values. `not-behind` (`parameters` only) links
even the text after the argument, though this text depends on the argument. With every method and control, the rate of
right answers to `leak` has to stay at the rate of guessing.

Speed: a model with random weights answers a question of 16 tokens about documents of random tokens with one token, so
the time of the call is the time to the first token, including the choice of the tokens to link. Figures are medians of
rounds in which the arms alternate. Each prompt takes other documents from a shelf, so that their sources are cached and
linked tokens have to be copied:

- `full`       nothing cached                    - `prefix`   the whole prompt cached
- `none`, `first-16`, `deviation-15`             - `all`      sources cached, all but the first computed again

The limit of a time is what the machine's arithmetic and memory rates, measured before and after, allow: each token
computed once, weights and KV read once, copied KV read and written once. The limit of `deviation-15` leaves out the
time to choose its tokens.

    PYTHONPATH=src:benchmarks python benchmarks/linking.py [--quick] [--only quality|speed] [--model FOLDER]
        [--dtype float32] [--pool-tokens 8000] [--controlled first-16] [--tasks order,scope]
        [--sizes 512x4,2048x16] [--methods none,first-16] [--questions 500] [--seed 0]

One task at one size takes minutes, so run a few tasks and sizes at a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from foreword import LLM, SamplingParams
from foreword.batch import Move
from foreword.demo.run import embedded_model
from foreword.linking import Method
from foreword.model.checkpoint.random_weights import DEMO_SHAPE, QWEN2_0_5B, RandomModelShape, save_random_model
from foreword.model.rotation import KeyMover
from foreword.modules.measure import Arm, Tally, tally
from foreword.modules.questions import TASK_NAMES, Questions
from foreword.request import RequestOutput
from workloads import BYTES_PER_ELEMENT, Rates, measure_rates, pass_limit_ms

FIRST, DEVIATIONS = (1, 2, 4, 8, 16, 32), (5, 15, 30)
METHODS = ("none", *(f"first-{k}" for k in FIRST), *(f"deviation-{share}" for share in DEVIATIONS), "all")
SIZES = ((512, 2), (512, 4), (1024, 8), (2048, 16))
"""Tokens of the documents, and the number of parts."""
POOL_TOKENS = 40_000
"""Tokens of the pool. Prompts of about a quarter run together, so that documents are computed once for all methods."""
SHELF = 4
"""The number of documents on the shelf for each document of a timed prompt."""
LINKED = ("none", "first-16", "deviation-15", "all")
TIMED: tuple[tuple[str, str | None], ...] = (("full", None), ("prefix", None), *((name, name) for name in LINKED))
"""Arms of the speed part, and their methods."""
ANSWER = SamplingParams(max_tokens=16, temperature=0.0)
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


# ------------------------------------------------------------------- quality


@dataclass(frozen=True)
class Quality:
    """The questions, and the model that they go to."""

    model: Path | None
    options: dict[str, Any]
    """Keywords for `LLM`."""
    tasks: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    methods: Sequence[str]
    controlled: str
    """The method of the negative controls."""
    num_questions: int
    pool_tokens: int
    seed: int


def quality(asked: Quality) -> dict[str, Any]:
    """Right answers, agreement with `all` and share of computed tokens by task and method, of all sizes and of each."""
    cells: list[dict[str, Any]] = []
    total: dict[str, dict[str, Tally]] = {}
    longest = max(tokens for tokens, _ in asked.sizes)
    with (
        embedded_model() if asked.model is None else nullcontext(asked.model) as folder,
        LLM(
            str(folder),
            allow_links=True,
            block_size=1,
            num_gpu_blocks_override=asked.pool_tokens,
            max_model_len=longest * 5 // 4 + 256,
            **asked.options,
        ) as llm,
    ):
        assert llm.tokenizer is not None
        questions = Questions(llm.tokenizer)
        for task in asked.tasks:
            for tokens, parts in asked.sizes:
                rng = Random(f"{asked.seed} {task} {tokens} {parts}")
                prompts = (questions.draw(rng, task, tokens, parts) for _ in range(asked.num_questions))
                at_once = max(1, asked.pool_tokens // 4 // tokens)
                found = tally(llm, prompts, arms(task, asked.methods, asked.controlled), ANSWER, at_once=at_once)
                cells.append({"task": task, "size": f"{tokens}x{parts}", "methods": shown(found)})
                show(f"{task} {tokens}x{parts}", cells[-1]["methods"])
                known = total.setdefault(task, {})
                total[task] = {name: known.get(name, Tally()) + own for name, own in found.items()}
    tables = {task: shown(found) for task, found in total.items()}
    return {"quality": tables, "curve": curves(tables), "cells": cells}


def arms(task: str, methods: Sequence[str], controlled: str) -> list[Arm]:
    """The methods and the controls. Controls whose KV does not fit its keys have their own cache namespace."""
    controls = [
        Arm("no-rotation", Method.parse(controlled), "no-rotation", unrotated),
        Arm("shuffled-values", Method.parse(controlled), "shuffled-values", shuffled),
    ]
    if task == "parameters":
        controls.append(Arm("not-behind", Method("none", 0, after_arguments=False)))
    return [*map(Arm.of, methods), *controls]


def unrotated(llm: LLM) -> AbstractContextManager[None]:
    """A context in which keys are copied without rotation."""
    return _moving(llm, lambda move, moves: move([one._replace(shift=0) for one in moves]))


def shuffled(llm: LLM) -> AbstractContextManager[None]:
    """A context in which each copied token gets the values of another token of the same copy."""
    storage, generator = mover_of(llm)._storage, torch.Generator().manual_seed(0)

    def moved(move: Callable[[Sequence[Move]], None], moves: Sequence[Move]) -> None:
        move(moves)
        targets = torch.from_numpy(np.concatenate([one.targets for one in moves]))
        order = torch.randperm(len(targets), generator=generator)
        for layer, blocks in storage.blocks.items():
            keys, values = blocks.read(targets)
            storage.write(layer, targets, keys, values[order])

    return _moving(llm, moved)


@contextmanager
def _moving(llm: LLM, moved: Callable[[Callable[[Sequence[Move]], None], Sequence[Move]], None]) -> Iterator[None]:
    mover = mover_of(llm)
    move = mover.move
    mover.move = lambda moves: moved(move, moves)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del mover.move  # the class's method shows again


def mover_of(llm: LLM) -> KeyMover:
    mover: KeyMover = llm.engine._runner._mover  # type: ignore[attr-defined]
    return mover


def shown(found: dict[str, Tally]) -> dict[str, dict[str, Any]]:
    """The figures of each arm for the JSON line. Times are left out, because prompts ran together."""
    told = {name: own.as_json() for name, own in found.items()}
    for own in told.values():
        del own["ttft_ms"]
    return told


def curves(tables: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """By task: the methods with their share of computed tokens and of right answers, in the order of the former."""
    return {
        task: sorted(
            ((name, own["computed_share"], own["right"]) for name, own in table.items()), key=lambda row: row[1:]
        )
        for task, table in tables.items()
    }


def show(title: str, methods: dict[str, Any]) -> None:
    for name, own in methods.items():
        low, high = own["difference_interval"]
        beside = f"beside all {own['difference']:+6.1f} ({low:+.1f}..{high:+.1f}), p {own['p']:.3f}"
        print(
            f"{title:20} {name:16} {own['right']:6.1f}%  {beside}  as all {own['agreement']:6.1f}%  "
            f"computed {own['computed_share']:.3f}",
            flush=True,
        )


# --------------------------------------------------------------------- speed


def speed(shape: RandomModelShape, sizes: Sequence[tuple[int, int]], rounds: int, seed: int) -> dict[str, Any]:
    """Milliseconds to the first token by arm, for documents of (number, tokens)."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), shape, seed=seed)
        with LLM(folder, dtype="bfloat16", allow_links=True, kv_cache_memory_bytes="512MB", self_check=False) as llm:
            rates = [measure_rates(shape)]
            measured = {size: time_arms(llm, shape, *size, rounds, seed) for size in sizes}
            found["link_us_per_token"] = round(time_moves(llm, 1024), 2)
            rates.append(measure_rates(shape))
    best = Rates(max(one.matmul_gflops for one in rates), max(one.read_gbytes_per_s for one in rates))
    for (number, length), (times, outputs) in measured.items():
        limits = {arm: round(limit_ms(shape, best, output), 2) for arm, output in outputs.items()}
        found[f"{number}x{length}"] = {"ms": times, "limit_ms": limits}
        for arm, milliseconds in times.items():
            print(f"{number:2} x {length:4}  {arm:10} {milliseconds:10.1f} ms  limit {limits[arm]:10.1f} ms")
    found["link_limit_us_per_token"] = round(1e6 * copy_s(shape, best, 1), 3)
    print(f"linking takes {found['link_us_per_token']} us a token; limit {found['link_limit_us_per_token']} us")
    found["rates"] = asdict(best)
    return found


def copy_s(shape: RandomModelShape, rates: Rates, num_tokens: int) -> float:
    """Least time to read and write the KV of tokens in all layers."""
    elements = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * num_tokens
    return 2 * BYTES_PER_ELEMENT * elements / (rates.read_gbytes_per_s * 1e9)


def limit_ms(shape: RandomModelShape, rates: Rates, output: RequestOutput) -> float:
    """The least milliseconds of a request: its copies, and a pass over the tokens neither cached nor linked."""
    linked, copied = (output.link.linked_tokens, output.link.copied_tokens) if output.link else (0, 0)
    num_tokens = len(output.prompt_token_ids)
    num_computed = num_tokens - output.num_cached_tokens - linked
    return 1e3 * copy_s(shape, rates, copied) + pass_limit_ms(shape, rates, num_computed, num_tokens - num_computed)


def time_arms(
    llm: LLM, shape: RandomModelShape, number: int, length: int, rounds: int, seed: int
) -> tuple[dict[str, float], dict[str, RequestOutput]]:
    """Median milliseconds to the first token by arm, and each arm's last output."""
    rng = np.random.default_rng((seed, number, length))
    times: dict[str, list[float]] = {}
    outputs: dict[str, RequestOutput] = {}
    documents = [rng.integers(0, shape.vocab_size, length).tolist() for _ in range(SHELF * number)]
    llm.reset_prefix_cache()
    llm.generate([{"prompt_token_ids": document} for document in documents], FIRST_TOKEN, show_progress=False)
    for at in range(0, len(documents), number):  # fills what the choice by deviation keeps for documents
        shelf = {"documents": [[0], *documents[at : at + number]], "question": [0]}
        llm.generate(shelf, FIRST_TOKEN, link="deviation-15")
    for arm, prompt, link in rounds_of(rng, documents, number, shape.vocab_size, rounds):
        if arm == "full":
            prompt = {"prompt_token_ids": rng.integers(0, shape.vocab_size, number * length + 16).tolist()}
        elif arm == "prefix":
            llm.generate(prompt, FIRST_TOKEN)
        started = time.perf_counter()
        [output] = llm.generate(prompt, FIRST_TOKEN, link=link)
        times.setdefault(arm, []).append(1e3 * (time.perf_counter() - started))
        assert link is None or output.link is not None
        outputs[arm] = output
    return {arm: round(statistics.median(own[1:]), 2) for arm, own in times.items()}, outputs


def rounds_of(
    rng: np.random.Generator, documents: Sequence[list[int]], number: int, vocab_size: int, rounds: int
) -> Iterator[tuple[str, Any, str | None]]:
    """Yields the arms of each round, each with some documents in random order. The first round warms up.

    No two prompts begin with the same two documents, so nothing that an arm should compute or copy is cached already.
    """
    firsts = iter(rng.permutation([*permutations(range(len(documents)), 2)]).tolist())
    for _ in range(rounds + 1):
        for arm, link in TIMED:
            two = next(firsts)
            order = two + [at for at in rng.permutation(len(documents)).tolist() if at not in two][: number - 2]
            question = rng.integers(0, vocab_size, 16).tolist()
            yield arm, {"documents": [documents[at] for at in order], "question": question}, link


def time_moves(llm: LLM, num_tokens: int) -> float:
    """Median microseconds per token, of 20 runs, to copy the KV of all layers and rotate its keys."""
    mover = mover_of(llm)
    move = [Move(np.arange(num_tokens), np.arange(num_tokens, 2 * num_tokens), 123)]
    times = []
    with torch.inference_mode():
        for _ in range(20):
            started = time.perf_counter()
            mover.move(move)
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller random model, fewer questions and rounds")
    parser.add_argument("--only", choices=("quality", "speed"))
    parser.add_argument("--model", type=Path, help="folder of the model that answers (default: the embedded one)")
    parser.add_argument("--dtype", help="the model's dtype (default: its checkpoint's)")
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS, help="tokens of the pool (default: 40000)")
    parser.add_argument("--controlled", default="none", help="method of the negative controls (default: none)")
    parser.add_argument("--tasks", type=listed, default=list(TASK_NAMES), help=f"tasks, of {', '.join(TASK_NAMES)}")
    parser.add_argument("--sizes", type=sizes_of, help="tokens x parts (default: 512x2,512x4,1024x8,2048x16)")
    parser.add_argument("--methods", type=listed, default=list(METHODS))
    parser.add_argument("--questions", type=int, default=500, help="questions of each task and size (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASK_NAMES):
        parser.error(f"--tasks: no task is named {', '.join(sorted(unknown))}; choose from {', '.join(TASK_NAMES)}")
    report: dict[str, Any] = {"seed": args.seed, "quick": args.quick, "threads": torch.get_num_threads()}
    if args.only != "speed":
        sizes = args.sizes or (((256, 4),) if args.quick else SIZES)
        report["questions"] = min(args.questions, 10) if args.quick else args.questions
        options = {} if args.dtype is None else {"dtype": args.dtype}
        asked = (args.model, options, args.tasks, sizes, args.methods, args.controlled)
        report |= quality(Quality(*asked, report["questions"], args.pool_tokens, args.seed))
    if args.only != "quality":
        shape, rounds = (DEMO_SHAPE, 1) if args.quick else (QWEN2_0_5B, 7)
        sizes = ((4, 256),) if args.quick else ((2, 512), (4, 256), (16, 64), (16, 256))
        report["shape"] = asdict(shape)
        report["speed"] = found = speed(shape, sizes, rounds, args.seed)
        times = found["4x256"]["ms"]
        report |= {"ttft_full_ms": times["full"], "ttft_prefix_ms": times["prefix"], "ttft_none_ms": times["none"]}
        report |= {"ttft_first16_ms": times["first-16"], "ttft_deviation15_ms": times["deviation-15"]}
        report["link_us_per_token"] = found["link_us_per_token"]
    print(json.dumps(report))


def listed(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def sizes_of(text: str) -> list[tuple[int, int]]:
    return [(int(tokens), int(parts)) for tokens, parts in (size.split("x") for size in text.split(","))]


if __name__ == "__main__":
    main()

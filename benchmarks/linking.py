"""What linking saves, and what it costs in answers.

Quality: the embedded model answers questions about facts, exact match, greedy. The same questions go to every method;
documents are in parts, and blocks hold one token, so that nothing but the method decides what is linked.

- `whole`      parts of 8 whole facts: nothing that a question needs lies in two parts (a check, not a result)
- `cut-64`     the same text cut every 64 tokens, in the middle of facts
- `cut-16`     every 16 tokens
- `argument`   a schema's line "The code of the <argument> is 4821.": the text after the argument is computed in the
               prompt (`behind-arguments`, the default of every method), or linked (`not-behind`)

The embedded model has two layers, its facts stand on one line each, and it hardly uses positions: this table compares
methods on this model. It says nothing about other models or other texts.

Speed: a model with random weights, documents of random tokens, a question of 16 tokens, and one generated token; so the
time of the call is that to the first token, with the choice of what is linked. Medians of rounds in which the arms take
turns, each with other documents of a shelf, so that sources are cached and what is linked has to be copied:

- `full`       nothing cached                    - `prefix`   the whole prompt cached
- `none`, `first-16`, `deviation-15`             - `all`      sources cached, all but the first computed again

    PYTHONPATH=src python benchmarks/linking.py [--quick] [--questions 100] [--seed 0] [--only quality|speed]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreword import LLM, SamplingParams
from foreword.batch import Move
from foreword.demo import recall
from foreword.demo.run import embedded_model
from foreword.linking import Method
from foreword.model.checkpoint.random_weights import DEMO_SHAPE, QWEN2_0_5B, RandomModelShape, save_random_model
from foreword.pml.composition import Composition, Part, Source, Span, concatenated
from foreword.pml.library import SchemaPrompt
from foreword.text.schema_text import schema_text

FIRST, DEVIATIONS = (1, 2, 4, 8, 16), (5, 15, 30)
METHODS = ("none", *(f"first-{k}" for k in FIRST), *(f"deviation-{share}" for share in DEVIATIONS), "all")
FACTS_PER_PART, NUM_FACTS = 8, 40
AT_ONCE = 20
"""Questions that run together, with all methods, so that documents are computed once."""
ANSWER = SamplingParams(max_tokens=12, temperature=0.0)
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
Case = tuple[Composition, str]
"""A prompt, and the right answer."""


# ------------------------------------------------------------------- quality


class Prompts:
    """Questions about documents, as compositions of the embedded model's tokens."""

    def __init__(self, llm: LLM, seed: int) -> None:
        assert llm.tokenizer is not None
        self._tokenizer, self._rng = llm.tokenizer, random.Random(seed)
        self._placeholder = schema_text(llm.tokenizer).placeholder_id

    def draw(self, task: str) -> Case:
        document = recall.make_document(self._rng, NUM_FACTS, heading="Facts:")
        [question] = recall.ask(self._rng, document, 1)
        before, after = self._around(document, question)
        if task == "argument":
            return self._with_argument(document, question, before, after), question.answer
        head = self._ids(before + "Facts:\n")
        lines = [fact.text + "\n" for fact in document.facts]
        if task == "whole":
            groups = ["".join(lines[at : at + FACTS_PER_PART]) for at in range(0, NUM_FACTS, FACTS_PER_PART)]
            parts = [self._ids(group) for group in groups]
        else:
            size, ids = int(task.removeprefix("cut-")), self._ids("".join(lines))
            parts = [ids[at : at + size] for at in range(0, len(ids), size)]
        sources = [Source(head + part, len(head), str(number)) for number, part in enumerate(parts)]
        return concatenated([head, *sources, self._ids(after)]), question.answer

    def _around(self, document: recall.Document, question: recall.Question) -> tuple[str, str]:
        """The texts of the prompt before and after the document."""
        text = self._tokenizer.render_text(recall.opening(document, question), add_generation_prompt=True)
        before, after = text.split(document.text)
        return before, after

    def _with_argument(
        self, document: recall.Document, question: recall.Question, before: str, after: str
    ) -> Composition:
        """One module of all facts; the key words of the fact that is asked for are an argument of two words."""
        attribute, words = question.key.split(" of the ")
        at = next(number for number, fact in enumerate(document.facts) if fact.key == question.key)
        lines = [fact.text + "\n" for fact in document.facts]
        head = self._ids(before + "Facts:\n")
        early = self._ids("".join(lines[:at]) + f"The {attribute} of the")
        argument, late_line = self._ids(f" {words}"), self._ids(f" is {question.answer}.\n")
        late = late_line + self._ids("".join(lines[at + 1 :]))
        source = Source(head + early + (self._placeholder,) * len(argument) + late, len(head), "facts")
        begin = len(head) + len(early)
        parts = [
            Part(head, 0, "text"),
            Part(early, len(head), "module", "facts", Span(source, len(head), begin)),
            Part(argument, begin, "argument", "facts:key"),
        ]
        begin += len(argument)
        parts.append(Part(late, begin, "module", "facts", Span(source, begin, begin + len(late)), len(late_line)))
        parts.append(Part(self._ids(after), begin + len(late), "text"))
        return Composition(tuple(parts))

    def _ids(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode_part(text)


def arms(task: str) -> dict[str, Method]:
    if task != "argument":
        return {name: Method.parse(name) for name in METHODS}
    return {
        "not-behind": Method("none", 0, after_arguments=False),
        "behind-arguments": Method.parse("none"),
        "all": Method.parse("all"),
    }


def quality(num_questions: int, seed: int) -> dict[str, Any]:
    """Exact match by task and method: percent, its 95% interval, and the mean share of tokens that were not linked."""
    tables: dict[str, Any] = {}
    with (
        embedded_model() as folder,
        LLM(str(folder), allow_links=True, block_size=1, num_gpu_blocks_override=40_000, max_model_len=1024) as llm,
    ):
        for task in ("whole", "cut-64", "cut-16", "argument"):
            prompts = Prompts(llm, seed)
            right, share = dict.fromkeys(arms(task), 0), dict.fromkeys(arms(task), 0.0)
            for _ in range(num_questions // AT_ONCE):
                cases = [prompts.draw(task) for _ in range(AT_ONCE)]
                for name, method in arms(task).items():
                    asked = [SchemaPrompt(composition, task, ()) for composition, _ in cases]
                    for (_, answer), output in zip(cases, llm.generate(asked, ANSWER, link=method), strict=True):
                        assert output.link is not None
                        right[name] += output.outputs[0].text.strip() == answer
                        share[name] += 1 - output.link.linked_tokens / len(output.prompt_token_ids)
            asked_of = num_questions // AT_ONCE * AT_ONCE
            tables[task] = {
                name: {
                    "exact_match": round(100 * right[name] / asked_of, 1),
                    "interval": wilson(right[name], asked_of),
                    "computed_share": round(share[name] / asked_of, 3),
                }
                for name in right
            }
            for name, cell in tables[task].items():
                print(f"{task:10} {name:18} {cell['exact_match']:6.1f}%  {cell['interval']}  {cell['computed_share']}")
    return tables


def wilson(right: int, asked: int) -> list[float]:
    """The 95% interval of a share, in percent."""
    z, share = 1.96, right / asked
    middle = share + z * z / (2 * asked)
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return [round(100 * (middle + sign * half) / (1 + z * z / asked), 1) for sign in (-1, 1)]


# --------------------------------------------------------------------- speed


def speed(shape: RandomModelShape, sizes: Sequence[tuple[int, int]], rounds: int, seed: int) -> dict[str, Any]:
    """Milliseconds to the first token by arm, for documents of (number, tokens)."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), shape, seed=seed)
        with LLM(folder, dtype="bfloat16", allow_links=True, kv_cache_memory_bytes="512MB", self_check=False) as llm:
            for number, length in sizes:
                found[f"{number}x{length}"] = cell = time_arms(llm, shape, number, length, rounds, seed)
                print(f"{number} x {length}: {cell}")
            found["link_us_per_token"] = round(time_moves(llm, 1024), 2)
            print(f"linking takes {found['link_us_per_token']} us a token")
    return found


def time_arms(llm: LLM, shape: RandomModelShape, number: int, length: int, rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng((seed, number, length))
    times: dict[str, list[float]] = {}
    documents = [rng.integers(0, shape.vocab_size, length).tolist() for _ in range(3 * number)]
    llm.reset_prefix_cache()
    llm.generate([{"prompt_token_ids": document} for document in documents], FIRST_TOKEN, show_progress=False)
    for at in range(0, len(documents), number):  # what the choice by deviation keeps of documents
        shelf = {"documents": [[0], *documents[at : at + number]], "question": [0]}
        llm.generate(shelf, FIRST_TOKEN, link="deviation-15")
    for arm, prompt, link in rounds_of(rng, documents, number, shape.vocab_size, rounds):
        if arm == "full":
            prompt = {"prompt_token_ids": rng.integers(0, shape.vocab_size, number * length + 16).tolist()}
        elif arm == "prefix":
            llm.generate(prompt, FIRST_TOKEN)
        started = time.perf_counter()
        [output] = llm.generate(prompt, FIRST_TOKEN, link=link)
        times.setdefault(arm, []).append(1000 * (time.perf_counter() - started))
        assert link is None or output.link is not None
    return {arm: round(statistics.median(own[1:]), 2) for arm, own in times.items()}


def rounds_of(
    rng: np.random.Generator, documents: Sequence[list[int]], number: int, vocab_size: int, rounds: int
) -> Iterator[tuple[str, Any, str | None]]:
    """The arms of each round, each with some of the documents in random order; the first round warms up."""
    for _ in range(rounds + 1):
        for arm, link in (
            ("full", None),
            ("prefix", None),
            ("none", "none"),
            ("first-16", "first-16"),
            ("deviation-15", "deviation-15"),
            ("all", "all"),
        ):
            order = rng.permutation(len(documents))[:number].tolist()
            question = rng.integers(0, vocab_size, 16).tolist()
            yield arm, {"documents": [documents[at] for at in order], "question": question}, link


def time_moves(llm: LLM, num_tokens: int) -> float:
    """Microseconds a token to copy and turn KV in all layers, the median of 20 times."""
    mover = llm.engine._runner._mover  # type: ignore[attr-defined]
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
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("quality", "speed"))
    args = parser.parse_args()
    report: dict[str, Any] = {"seed": args.seed, "quick": args.quick, "threads": torch.get_num_threads()}
    if args.only != "speed":
        report["questions"] = 40 if args.quick else args.questions
        report["quality"] = quality(report["questions"], args.seed)
    if args.only != "quality":
        shape, rounds = (DEMO_SHAPE, 3) if args.quick else (QWEN2_0_5B, 7)
        sizes = ((4, 256),) if args.quick else ((2, 512), (4, 256), (16, 64), (16, 256))
        report["model"] = asdict(shape)
        report["speed"] = found = speed(shape, sizes, rounds, args.seed)
        cell = found["4x256"]
        report |= {"ttft_full_ms": cell["full"], "ttft_prefix_ms": cell["prefix"], "ttft_none_ms": cell["none"]}
        report |= {"ttft_first16_ms": cell["first-16"], "ttft_deviation15_ms": cell["deviation-15"]}
        report["link_us_per_token"] = found["link_us_per_token"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()

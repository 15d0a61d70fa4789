"""What drafts gain: tokens per second with and without drafts, alternately, on one engine.

This script makes a checkpoint of Qwen2-0.5B's shape with random weights in bfloat16. Such a model copies nothing from
its prompt, so the script writes the answers and replaces the sampled tokens by them. Model and sampler do the same work
as for a model with these answers. Which drafts are accepted follows from the written answers alone. These are seeded
texts in which each token has a few likely successors, as in language:

    edit       a file of 600 tokens, written again with three changed lines
    quote      an answer to a document of 1,500 tokens: passages of it of 40 to 100 tokens, with 6 to 14 other ones
               between
    agent      six turns: a call of 97 tokens, of which 12 are arguments from the last result and 5 are new
    retry      the same prompt again, at temperature 0.7: the answer keeps the earlier one in pieces of 40 tokens on
               average, with 3 to 8 other ones between
    random     random tokens: nothing can be drafted, so this is what trying costs

Each workload runs with one request, and with 16 different ones at once. Times begin when each request has its first
token. `gain_cpu` compares the process's processor time instead, for machines that other programs use too.

Targets: edit, quote, agent and retry gain at least 2.5x for one request and 1.3x for 16 at once; random is at least
0.97x.

`--model FOLDER` takes a real checkpoint instead. It first answers requests about pieces of this repository's pages
without drafts, and these answers take the place of the written ones.

    summary    what a piece of 400 words says, in a few sentences
    copy       a piece of 80 words, again
    chat       a question without a text

    python benchmarks/drafts.py [--repeats N] [--quick] [--json] [--seed N] [--only NAME ...] [--requests N ...]
    ... --model FOLDER [--requests 1 4 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreword import LLM, SamplingParams
from foreword.batch import Batch, BatchResult
from foreword.engine import Prompt
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, save_random_model
from foreword.request import RequestOutput
from workloads import QUICK_SHAPE

NUM_REQUESTS = 16
KV_BYTES = 2**30
REAL = ("summary", "copy", "chat")
ANSWER_TOKENS = 96
"""Most tokens of a real answer."""
PAGES = ("ARCHITECTURE.md", "README.md", "docs/concepts/cache.md", "docs/guides/gguf.md")
TOPICS = (
    "rain bread bicycles volcanoes chess honey glaciers radio bridges coffee tides paper owls salt clocks maps".split()
)
COPYING = ("edit", "quote", "agent", "retry")
ONE_REQUEST_TARGET, MANY_TARGET, RANDOM_TARGET = 2.5, 1.3, 0.97
SUCCESSORS = 6
"""Likely successors of each token of a text."""


@dataclass(frozen=True)
class Call:
    """A prompt, and the answer that is written for it."""

    prompt: list[int]
    answer: list[int]
    is_measured: bool = True


class Writer:
    """Writes texts of a made language."""

    def __init__(self, seed: int, vocab_size: int, scale: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._successors = self._rng.integers(10, vocab_size, (400, SUCCESSORS))
        self._scale = scale

    def _length(self, num_tokens: int) -> int:
        return max(4, int(num_tokens * self._scale))

    def text(self, num_tokens: int) -> list[int]:
        words = [int(self._rng.integers(10, self._vocab_size))]
        while len(words) < num_tokens:
            likely = self._successors[words[-1] % len(self._successors)]
            words.append(int(likely[min(self._rng.geometric(0.4) - 1, SUCCESSORS - 1)]))
        return words

    def edit(self) -> list[Call]:
        lines = [self.text(12) for _ in range(self._length(50))]
        changed = [line.copy() for line in lines]
        for number in self._rng.choice(len(lines), 3, replace=False):
            changed[number] = self.text(12)
        return [Call(list(chain.from_iterable(lines)) + self.text(30), list(chain.from_iterable(changed)))]

    def quote(self) -> list[Call]:
        document, answer = self.text(self._length(1500)), []
        while len(answer) < self._length(300):
            answer += self.text(int(self._rng.integers(6, 14)))
            start = int(self._rng.integers(len(document) - 10))
            answer += document[start : start + int(self._rng.integers(40, 100))]
        return [Call(document + self.text(30), answer)]

    def agent(self) -> list[Call]:
        calls, frame = [], self.text(self._length(80))
        history = self.text(self._length(400))
        for _ in range(6):
            result = self.text(self._length(80))
            history = [*history, *result, *self.text(10)]
            argument = result[5:17]
            answer = [*frame[:30], *argument, *frame[30:], *self.text(5)]
            calls.append(Call(history, answer))
            history = [*history, *answer]
        return calls

    def retry(self) -> list[Call]:
        prompt, first = self.text(self._length(400)), self.text(self._length(300))
        second: list[int] = []
        at = 0
        while at < len(first):
            kept = int(self._rng.geometric(1 / 40))
            second += first[at : at + kept]
            other = int(self._rng.integers(3, 9))
            second += self.text(other)
            at += kept + other
        return [Call(prompt, first, is_measured=False), Call(prompt, second)]

    def random(self) -> list[Call]:
        def tokens(count: int) -> list[int]:
            return self._rng.integers(10, self._vocab_size, self._length(count)).tolist()  # type: ignore[no-any-return]

        return [Call(tokens(300), tokens(200))]


def ask(llm: LLM, name: str, count: int, seed: int) -> list[list[Call]]:
    """Requests to a real model, each with the model's answer without drafts."""
    root, rng = Path(__file__).parents[1], np.random.default_rng(seed)
    words = " ".join((root / page).read_text() for page in PAGES).split()
    texts = []
    for number in range(count):
        start, topic = int(rng.integers(len(words) - 400)), TOPICS[(seed + number) % len(TOPICS)]
        texts.append(
            {
                "summary": f"Summarize this text in a few sentences:\n\n{' '.join(words[start : start + 400])}",
                "copy": f"Repeat this text word for word:\n\n{' '.join(words[start : start + 80])}",
                "chat": f"Explain to a child what is special about {topic}.",
            }[name]
        )
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params, show_progress=False)
    return [[Call(list(output.prompt_token_ids), list(output.outputs[0].token_ids))] for output in outputs]


class Script:
    """Puts written answers in the place of sampled tokens."""

    def __init__(self, llm: LLM) -> None:
        self._runner = llm.engine._runner
        self._execute = self._runner.execute
        self._runner.execute = self.execute  # type: ignore[method-assign]
        self.answers: dict[str, list[int]] = {}
        self.num_request_steps = 0

    def execute(self, batch: Batch) -> BatchResult:
        result = self._execute(batch)
        entries, rows, starts = batch.entries, batch.entries.result_rows(), batch.entries.num_generated()
        for number in entries.samples.nonzero()[0].tolist():
            answer = self.answers.get(entries.requests[number].request_id, [])
            self.num_request_steps += 1
            for ahead in range(1 + len(entries.drafts.get(number, ()))):
                at = int(starts[number]) + ahead
                if at < len(answer):
                    result.token_ids[rows[number] + ahead] = answer[at]
        return result


@dataclass
class Run:
    """Times and counts of one workload."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_tokens: int = 0
    num_accepted: int = 0
    num_request_steps: int = 0


class Bench:
    """One engine, with and without drafts."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._script = llm, Script(llm)
        self._drafting = llm.engine.scheduler.drafting
        self._num_calls = 0

    def run(self, requests: Sequence[Sequence[Call]], *, drafts: bool) -> Run:
        """Runs all requests at once, from an empty cache. The calls of one request follow one another."""
        self._llm.engine.scheduler.drafting = self._drafting if drafts else None
        self._llm.reset_prefix_cache()
        total = Run()
        for calls in zip(*requests, strict=True):
            steps = self._script.num_request_steps
            outputs = [self._add(call) for call in calls]
            while not all(output.outputs[0].token_ids for output in outputs):
                self._llm.engine.step()
            num_early = sum(len(output.outputs[0].token_ids) for output in outputs)
            started, cpu_started = time.perf_counter(), time.process_time()
            while self._llm.engine.has_unfinished_requests():
                self._llm.engine.step()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            for call, output in zip(calls, outputs, strict=True):
                assert output.outputs[0].token_ids == call.answer, "a draft changed an answer"
            if calls[0].is_measured:
                total.seconds += seconds
                total.cpu_seconds += cpu_seconds
                total.num_tokens += sum(len(call.answer) for call in calls) - num_early
                total.num_accepted += sum(output.outputs[0].drafts.num_accepted for output in outputs)
                total.num_request_steps += self._script.num_request_steps - steps
        return total

    def ask(self, name: str, count: int, seed: int) -> list[list[Call]]:
        """The tokens that a real model answers without drafts."""
        self._llm.engine.scheduler.drafting = None
        return ask(self._llm, name, count, seed)

    def _add(self, call: Call) -> RequestOutput:
        name = f"call-{self._num_calls}"
        self._num_calls += 1
        self._script.answers[name] = call.answer
        params = SamplingParams(max_tokens=len(call.answer), temperature=0.7, seed=0, ignore_eos=True)
        return self._llm.engine.add_request(name, Prompt(np.array(call.prompt, np.int32)), params)


def measure(bench: Bench, name: str, count: int, args: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    """Medians of one workload with `count` requests at once, over pairs of runs with and without drafts."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for repeat in range(args.repeats):
        scale = 0.1 if args.quick else 1.0
        seeds = [args.seed + 1000 * repeat + number for number in range(count)]
        if args.model:
            requests = bench.ask(name, count, seeds[0])
        else:
            requests = [getattr(Writer(seed, vocab_size, scale), name)() for seed in seeds]
        for drafts in (False, True) if repeat % 2 else (True, False):
            runs[drafts].append(bench.run(requests, drafts=drafts))
    rates = {drafts: statistics.median(run.num_tokens / run.seconds for run in own) for drafts, own in runs.items()}
    steps = sum(run.num_request_steps for run in runs[True])
    pairs = list(zip(runs[False], runs[True], strict=True))
    return {
        "tok_s_plain": round(rates[False], 2),
        "tok_s_drafts": round(rates[True], 2),
        "gain": round(statistics.median(one.seconds / other.seconds for one, other in pairs), 3),
        "gain_cpu": round(statistics.median(one.cpu_seconds / other.cpu_seconds for one, other in pairs), 3),
        "accepted_per_step": round(sum(run.num_accepted for run in runs[True]) / max(1, steps), 2),
    }


def target(name: str, count: int) -> float:
    """The least gain that a workload should have."""
    if name in REAL:
        return 1.0
    if name == "random":
        return RANDOM_TARGET
    return ONE_REQUEST_TARGET if count == 1 else MANY_TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs of each workload (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a small model and short texts, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", metavar="FOLDER", help="a real checkpoint that answers by itself")
    parser.add_argument(
        "--only", nargs="+", choices=(*COPYING, "random", *REAL), help="workloads to run (default: all of the model)"
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=(1, NUM_REQUESTS), help="requests at once (default: 1 16)"
    )
    args = parser.parse_args()
    known = REAL if args.model else (*COPYING, "random")
    args.only = args.only or known
    if unknown := set(args.only) - set(known):
        parser.error(f"--only {' '.join(sorted(unknown))} {'needs' if not args.model else 'goes without'} --model")
    shape = QUICK_SHAPE if args.quick else QWEN2_0_5B
    console = Console(quiet=args.json, width=110)
    figures: dict[str, Any] = {}
    table = Table(
        "workload", "tok/s plain", "with drafts", "gain", "gain (CPU)", "target", "accepted a step", box=SIMPLE_HEAD
    )
    with TemporaryDirectory(prefix="foreword-") as folder:
        if not args.model:
            save_random_model(Path(folder), shape, seed=args.seed)
        with LLM(args.model or folder, kv_cache_memory_bytes=KV_BYTES, max_num_seqs=NUM_REQUESTS) as llm:
            bench = Bench(llm)
            warm = bench.ask("chat", 1, 99) if args.model else [Writer(args.seed + 99, shape.vocab_size, 0.1).random()]
            bench.run(warm, drafts=True)  # libraries get ready
            for count in args.requests:
                for name in args.only:
                    key = name if count == 1 else f"{name}_{count}"
                    own = figures[key] = measure(bench, name, count, args, shape.vocab_size)
                    names = ("tok_s_plain", "tok_s_drafts", "gain", "gain_cpu")
                    cells = (*(own[name_of] for name_of in names), target(name, count))
                    table.add_row(key, *map(str, cells), str(own["accepted_per_step"]))
                    console.print(f"{key}: {own}", style="dim")
    console.print(table)
    console.print(f"load average {os.getloadavg()[0]:.1f}", style="dim")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

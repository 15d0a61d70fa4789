"""`foreword lint FILE --model M`: reads the arguments, and prints the findings as text or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from foreword.errors import ConfigError
from foreword.lint.check import BLOCK_TOKENS, Finding, LintReport, lint_prompts
from foreword.lint.prompts import RecordedPrompts, read_prompts
from foreword.text import Tokenizer

MAX_SHOWN = 72
"""Limit of a text that is printed, in characters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword lint`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="recorded requests: JSONL, gzipped or not")
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="folder or hub id of the tokenizer and chat template"
    )
    parser.add_argument("--max-requests", type=int, metavar="N", help="only the first N requests (default: all)")
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help=f"tokens per block (default: {BLOCK_TOKENS})",
    )
    parser.add_argument(
        "--cache-tokens", type=int, metavar="N", help="replay with a cache of this size under LRU (default: unlimited)"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line; all else goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments."""
    console = Console(stderr=args.json, highlight=False, markup=False, soft_wrap=True)
    if args.max_requests is not None and args.max_requests < 1:
        raise ConfigError(f"max_requests={args.max_requests} is too small; use at least 1")
    tokenizer = Tokenizer.load(args.model)
    if tokenizer is None:
        raise ConfigError(
            f"--model {args.model!r} comes without a tokenizer; name the folder or hub id of one that has it"
        )
    with console.status("reading requests"):
        recorded = read_prompts(args.file, tokenizer, args.max_requests)
    with console.status("comparing prompts"):
        report = lint_prompts(
            recorded.prompts, tokenizer.spell, block_tokens=args.block_tokens, cache_tokens=args.cache_tokens
        )
    print_report(report, recorded, console, args.file.name)
    if "strftime_now" in (tokenizer.chat_template or "") and not any(
        "chat template" in finding.causes[0] for finding in report.findings
    ):
        console.print("\nThe chat template writes the date into prompts: each midnight, all of them are computed anew.")
    if args.json:
        print(json.dumps({**as_json(report), "malformed_lines": recorded.num_malformed}), flush=True)
    return 0


def print_report(report: LintReport, recorded: RecordedPrompts, console: Console, title: str) -> None:
    """Print the findings, and the tokens that their remedies would save."""
    if recorded.num_malformed:
        console.print(f"{recorded.num_malformed:,} lines were passed over:", style="yellow")
        for line in recorded.malformed:
            console.print(f"    {line}", style="yellow")
    headline = f"{report.num_requests:,} requests, {report.num_tokens:,} prompt tokens"
    console.print(f"{title}: {headline}, {report.hit_rate:.1%} of them found by a cache")
    for number, finding in enumerate(report.findings, 1):
        _print_finding(number, finding, report, console)
    if report.apart_tokens:
        names = f"{len(report.models)} models ({', '.join(report.models)[:MAX_SHOWN]})"
        console.print(
            f"\nThe requests name {names}, which find nothing of each other's: {_rate(report, report.apart_tokens)} "
            "are computed again for that alone. If they are LoRA adapters of one model, aLoRA ones would share what "
            "comes before their invocation.",
        )
    if report.findings:
        console.print(
            f"\nAll mended, a cache finds {report.hit_rate_after:.1%} instead of {report.hit_rate:.1%} and computes "
            f"{_rate(report, report.wasted_tokens)} fewer.",
            style="bold",
        )
    else:
        console.print("\nNo prompts of one kind part early: what is computed is new text.", style="bold")


def _print_finding(number: int, finding: Finding, report: LintReport, console: Console) -> None:
    causes = " and ".join(finding.causes)
    where = f"at token {finding.position:,} of request {finding.first_request + 1:,}"
    console.print(f"\n{number}. {causes[0].upper()}{causes[1:]}, {where}", style="bold")
    before = finding.before[-MAX_SHOWN // 2 :]
    for lead, example in zip([repr(before)[1:-1], *[""] * len(finding.examples)], finding.examples, strict=False):
        text = repr(example[: MAX_SHOWN // 2].rstrip())[1:-1]
        console.print(f"     {lead:>{len(repr(before)) - 2}} | {text}")
    wasted = _rate(report, finding.wasted_tokens)
    console.print(f"   {finding.num_prompts:,} requests have it. Computed again after it: {wasted}.")
    console.print(f"   {finding.remedy} Hit rate then: {finding.hit_rate_after:.1%}.")


def _rate(report: LintReport, num_tokens: int) -> str:
    """Write a number of tokens, with the rate a day, or in 1,000 requests if times are unknown."""
    a_day = report.a_day(num_tokens)
    per = (
        f"{a_day:,.0f} a day"
        if a_day is not None
        else f"{1000 * num_tokens / report.num_requests:,.0f} in 1,000 requests"
    )
    return f"{num_tokens:,} tokens ({per})"


def as_json(report: LintReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    findings = [
        {
            **asdict(finding),
            "hit_rate_after": round(finding.hit_rate_after, 6),
            "wasted_tokens_a_day": report.a_day(finding.wasted_tokens),
        }
        for finding in report.findings
    ]
    return {
        "requests": report.num_requests,
        "prompt_tokens": report.num_tokens,
        "hit_rate": round(report.hit_rate, 6),
        "hit_rate_after": round(report.hit_rate_after, 6),
        "wasted_tokens": report.wasted_tokens,
        "wasted_tokens_a_day": report.a_day(report.wasted_tokens),
        "wasted_tokens_per_1000_requests": 1000 * report.wasted_tokens / report.num_requests,
        "models": list(report.models),
        "apart_tokens": report.apart_tokens,
        "findings": findings,
    }

"""`foreword watch ADDRESS`: what the cache of a running engine holds, from its events: foreword's, vLLM's or SGLang's.

Knows the terminal; the subscriber knows the engine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from foreword.events.subscriber import Subscriber

MAX_PREFIXES = 5
"""Common prefixes to show."""
TROUBLES = ("gaps", "resyncs", "restarts", "silences", "bad", "incomplete_replays")
"""What went wrong in the stream, and was made good."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword watch`."""
    parser.add_argument("events", metavar="ADDRESS", help="where the engine publishes events, such as tcp://HOST:5557")
    parser.add_argument("--replay", metavar="ADDRESS", help="where it repeats events, such as tcp://HOST:5558")
    parser.add_argument(
        "--snapshot", metavar="ADDRESS", help="where it tells all that it holds, such as tcp://HOST:5559"
    )
    parser.add_argument("--topic", default="", help="beginning of the topics to follow (default: all)")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=1.0, help="between two reports (default: 1)"
    )
    parser.add_argument("--reports", metavar="N", type=int, help="end after this many reports (default: never)")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each report instead of a table")


def run(args: argparse.Namespace) -> int:
    """Follow an engine until interrupted; returns the exit code."""
    console = Console()
    with Subscriber(args.events, replay=args.replay, snapshot=args.snapshot, topic=args.topic) as subscriber:
        reports = _reports(subscriber, max(0.05, args.interval), args.reports)
        if args.json:
            for report in reports:
                print(json.dumps(report), flush=True)
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for report in reports:
                    live.update(_table(args.events, report), refresh=True)
        else:
            for report in reports:
                console.print(_line(report), soft_wrap=True)
    return 0


def _reports(subscriber: Subscriber, interval_s: float, most: int | None) -> Iterator[dict[str, Any]]:
    """What is known after each interval."""
    mirror, follower = subscriber.mirror, subscriber.follower
    stored, removed, began = 0, 0, time.monotonic()
    num_reports = 0
    while most is None or num_reports < most:
        num_reports += 1
        end = began + interval_s
        while (left := end - time.monotonic()) > 0:
            subscriber.poll(left)
        seconds, began = time.monotonic() - began, time.monotonic()
        counts = mirror.counts
        yield {
            "state": follower.state,
            "blocks": len(mirror.blocks),
            "tokens": mirror.num_tokens,
            "stored_per_s": round((counts["stored"] - stored) / seconds, 1),
            "removed_per_s": round((counts["removed"] - removed) / seconds, 1),
            "batches": follower.counts["batches"],
            **{name: follower.counts[name] for name in TROUBLES},
            "common_prefixes": [
                {"tokens": prefix.num_tokens, "sequences": prefix.num_ends}
                for prefix in mirror.common_prefixes(MAX_PREFIXES)
            ],
        }
        stored, removed = counts["stored"], counts["removed"]


def _line(report: dict[str, Any]) -> str:
    rates = f"+{report['stored_per_s']:g}/s -{report['removed_per_s']:g}/s"
    return f"{report['state']}: {report['blocks']:,} blocks, {report['tokens']:,} tokens, {rates}; {_troubles(report)}"


def _troubles(report: dict[str, Any]) -> str:
    return ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in TROUBLES if report[name]) or "nothing lost"


def _table(address: str, report: dict[str, Any]) -> Table:
    table = Table(title=f"{address}: {report['state']}", box=SIMPLE_HEAD, show_header=False)
    table.add_row("held", f"{report['blocks']:,} blocks, {report['tokens']:,} tokens")
    table.add_row("stored, removed", f"{report['stored_per_s']:g}, {report['removed_per_s']:g} blocks/s")
    table.add_row("stream", f"{report['batches']:,} batches; {_troubles(report)}")
    for prefix in report["common_prefixes"]:
        table.add_row("common prefix", f"{prefix['tokens']:,} tokens, {prefix['sequences']:,} sequences go on from it")
    return table

"""`foreword watch ADDRESS`: shows the content and the hits of a running engine's cache, from its events."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from foreword.cache import MissReason
from foreword.config import Environment
from foreword.errors import ConfigError, extra_for
from foreword.events.sources import find_source
from foreword.events.subscriber import Subscriber
from foreword.server.observe.explanations import IN_WORDS
from foreword.server.watch.watcher import Decode, Report, Watcher

LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.05, 86_400
NUM_SHOWN = 3
"""The table shows at most this number of sessions, this number of kinds of prompts, and this number of requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword watch`."""
    parser.add_argument(
        "events",
        metavar="ADDRESS",
        help="where the engine publishes events, such as tcp://HOST:5557, or vLLM's server, such as http://HOST:8000",
    )
    parser.add_argument("--rank", metavar="N", type=int, help="data-parallel rank to follow, with an http:// address")
    parser.add_argument("--replay", metavar="ADDRESS", help="where the engine repeats events, such as tcp://HOST:5558")
    parser.add_argument(
        "--snapshot", metavar="ADDRESS", help="where the engine sends all that it holds, such as tcp://HOST:5559"
    )
    parser.add_argument("--topic", default="", help="beginning of the topics to follow (default: all)")
    parser.add_argument(
        "--blocks", metavar="N", type=int, help="size of the engine's pool (default: the most it held when it evicted)"
    )
    parser.add_argument(
        "--full-reports",
        action="store_true",
        help="give exact rates: all requests ask vLLM to report what they find (kv_cache_report_mode: full)",
    )
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="write the seen requests to a trace for `foreword replay`"
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or hub id whose tokenizer shows the text where prompts part"
    )
    parser.add_argument("--port", type=int, help="show a dashboard at this port instead of reports; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address of the dashboard (default: 127.0.0.1)")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=1.0, help="seconds between two reports (default: 1)"
    )
    parser.add_argument("--reports", metavar="N", type=int, help="end after this many reports (default: never)")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each report instead of a table")


def run(args: argparse.Namespace) -> int:
    """Follow an engine until interrupted. Returns the exit code."""
    if not LEAST_INTERVAL_S <= args.interval <= MOST_INTERVAL_S:
        raise ConfigError(
            f"interval={args.interval:g} is out of range; use {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:,} seconds"
        )
    if args.reports is not None and args.reports < 1:
        raise ConfigError(f"reports={args.reports} shows nothing; use at least 1, or leave it out")
    serve = None if args.port is None else _server(args)
    if args.events.startswith(("http://", "https://")):
        source = find_source(args.events, args.rank)
        args.events, args.replay, args.topic = source.events, args.replay or source.replay, args.topic or source.topic
    elif args.rank is not None:
        raise ConfigError(
            f"rank={args.rank} needs vLLM's http:// address; {args.events!r} is the address of one rank. Leave --rank "
            "out, and give that rank's own address: tcp://HOST:PORT, with PORT 5557 plus its number"
        )
    options = {"num_blocks": args.blocks, "all_report": args.full_reports}
    decode = None if args.tokenizer is None else _decoder(args.tokenizer)
    with (
        Subscriber(args.events, replay=args.replay, snapshot=args.snapshot, topic=args.topic) as subscriber,
        closing(Watcher(subscriber, record=args.record, decode=decode, **options)) as watcher,
    ):
        if serve is not None:
            serve(watcher)
            return 0
        console = Console()
        reports = _reports(watcher, args.interval, args.reports)
        if args.json:
            for report in reports:
                print(json.dumps(report.as_dict()), flush=True)
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for report in reports:
                    live.update(_table(args.events, report), refresh=True)
        else:
            for report in reports:
                console.print(_line(report), soft_wrap=True)
    return 0


def _decoder(model: str) -> Decode:
    from foreword.text import Tokenizer

    tokenizer = Tokenizer.load(model)
    if tokenizer is None:
        raise ConfigError(
            f"--tokenizer {model!r} comes without a tokenizer; name the folder or hub id of one that has it"
        )
    return tokenizer.decode


def _server(args: argparse.Namespace) -> Callable[[Watcher], None]:
    """Return a function that serves the dashboard. Raises ConfigError if the dashboard cannot be served."""
    if args.json or args.reports is not None:
        raise ConfigError("--port shows a dashboard and prints no reports; leave out --json and --reports")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"port={args.port} is not a port; use 1 to 65535, or 0 for any free one")
    with extra_for("a dashboard", "serve"):
        from foreword.server.run import check_address
        from foreword.server.watch.dashboard import serve
    check_address(args.host, args.port)
    key = Environment.read().operator_key
    return lambda watcher: serve(watcher, args.events, args.host, args.port, key)


def _reports(watcher: Watcher, interval_s: float, max_reports: int | None) -> Iterator[Report]:
    num_reports = 0
    while max_reports is None or num_reports < max_reports:
        num_reports += 1
        end = time.monotonic() + interval_s
        while (remaining_s := end - time.monotonic()) > 0:
            watcher.poll(remaining_s)
        yield watcher.report()


def _line(report: Report) -> str:
    return f"{report.state}: {_held(report)}, {_rates(report)}; {_found(report)}; {_again(report)}; {_troubles(report)}"


def _table(address: str, report: Report) -> Table:
    table = Table(title=f"{address}: {report.state}", box=SIMPLE_HEAD, show_header=False)
    table.add_row("held", _held(report))
    table.add_row("blocks", _rates(report))
    table.add_row("found", _found(report))
    if report.verdict is not None:
        table.add_row("nothing found", report.verdict)
    for name, missed in report.why["reasons"].items():
        words = IN_WORDS[MissReason(name)]
        table.add_row("missed", f"{missed['tokens']:,} tokens of {missed['requests']:,} requests: {words}")
    for title in ("sessions", "kinds"):
        for group in report.why[title][:NUM_SHOWN]:
            share = group["found"] / max(1, group["tokens"])
            table.add_row(title[:-1], f"{share:.1%} of {group['tokens']:,} tokens: {escape(group['name'])}")
    for group in report.why["newest"][-NUM_SHOWN:]:
        table.add_row("request", f"found {group['found']:,} of {group['tokens']:,} tokens; {escape(group['why'])}")
    table.add_row("memory", _again(report))
    for point in report.curve[1:]:
        factor = point.num_blocks / report.curve[0].num_blocks
        table.add_row(f"  {factor:.3g} times", f"{point.hit_rate:.1%} instead of {report.curve[0].hit_rate:.1%}")
    for prefix in report.common_prefixes:
        table.add_row("common prefix", f"{prefix.num_tokens:,} tokens, {prefix.num_ends:,} sequences go on from it")
    table.add_row("stream", f"{report.batches:,} batches; {_troubles(report)}")
    if report.num_recorded is not None:
        table.add_row("recorded", f"{report.num_recorded:,} requests")
    return table


def _held(report: Report) -> str:
    return f"{report.blocks:,} blocks, {report.tokens:,} tokens"


def _rates(report: Report) -> str:
    return f"+{report.stored_per_s:g}/s -{report.removed_per_s:g}/s"


def _found(report: Report) -> str:
    if report.hit_rate is None:
        return "no request seen"
    seen = report.seen
    bound = report.bound("at least ", "about ")
    return f"{bound}{report.hit_rate:.1%} of {seen.prompt_tokens:,} tokens of {seen.requests:,} requests"


def _again(report: Report) -> str:
    if report.pool_blocks is None:
        return "nothing evicted"
    return f"twice the memory would have kept {report.again_tokens:,} tokens"


def _troubles(report: Report) -> str:
    troubles = [f"{count} {name.replace('_', ' ')}" for name, count in report.troubles.items() if count]
    if report.seen.unknown_beginnings:
        troubles.append(f"{report.seen.unknown_beginnings} requests without a known beginning")
    if report.seen.other_sizes:
        troubles.append(f"{report.seen.other_sizes} reports of blocks of another size ignored")
    return ", ".join(troubles) or "nothing lost"

"""`foreword replay TRACE`: arguments in, tables, pictures and JSON out.

Knows the terminal; what is computed is in the other modules of this room.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreword.errors import ConfigError
from foreword.replay.capacity import Capacity, kv_bytes_per_token, parse_bytes, parse_capacity, read_model_config
from foreword.replay.picture import check_format, write_picture
from foreword.replay.report import as_json, print_report
from foreword.replay.simulator import OPTIMUM, ReplayResult, Simulation
from foreword.replay.timing import Routing, StepCost, TimingOptions, simulate_time
from foreword.replay.trace import PromptEncoder, TraceReader

DEFAULT_POLICIES = "lru,value,optimum"
DEFAULT_CAPACITIES = "1000,3000,10000,30000,100000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword replay`."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="recorded requests: JSONL, gzipped or not")
    parser.add_argument(
        "--policy", default=DEFAULT_POLICIES, metavar="NAMES", help=f"such as {DEFAULT_POLICIES} (default)"
    )
    parser.add_argument(
        "--capacity",
        default=DEFAULT_CAPACITIES,
        metavar="SIZES",
        help=f"blocks of the trace, or bytes of a model's KV such as 4GB (default: {DEFAULT_CAPACITIES})",
    )
    parser.add_argument("--model", metavar="FOLDER", help="model whose KV is meant by bytes: its folder or config.json")
    parser.add_argument("--kv-bytes-per-token", type=int, metavar="BYTES", help="instead of --model")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for traces of text (default: that of --model)")
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens per block (default: what the format says)"
    )
    parser.add_argument("--max-requests", type=int, metavar="N", help="only so many from the beginning")
    parser.add_argument(
        "--sample", type=float, default=1.0, metavar="RATE", help="follow this share of the blocks (lru)"
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    parser.add_argument("--picture", type=Path, action="append", default=[], metavar="FILE", help="write .svg or .html")
    time = parser.add_argument_group("simulated time", "given --flops, requests are served as they arrive")
    time.add_argument(
        "--flops", type=float, metavar="FLOP/s", help="what a replica reaches, such as 4e14; needs --model"
    )
    time.add_argument("--bandwidth", default="1TB", metavar="BYTES/s", help="of its memory, such as 2TB (default: 1TB)")
    time.add_argument("--replicas", type=int, default=1, metavar="N", help="each with the capacities given")
    time.add_argument("--routing", choices=get_args(Routing), default="prefix_aware")
    parser.add_argument("--json", action="store_true", help="end with one JSON line; all else goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments."""
    console = Console(stderr=args.json)
    for file in args.picture:
        check_format(file)
    bytes_per_token = _kv_bytes_per_token(args)
    result, reader = _replay(args, bytes_per_token, console)
    if reader.num_malformed:
        console.print(f"{reader.num_malformed:,} malformed lines were passed over:", style="yellow")
        for line in reader.malformed:
            console.print(f"    {line}", style="yellow", markup=False)
    print_report(result, console, args.trace.name, bytes_per_token)
    timing = _simulate_time(args, result, bytes_per_token, console)
    for file in args.picture:
        write_picture(result, file, args.trace.name, bytes_per_token)
        console.print(f"wrote {file}", markup=False)
    if args.json:
        report = as_json(result, bytes_per_token)
        print(json.dumps({**report, "timing": timing, "malformed_lines": reader.num_malformed}))
    return 0


def _simulate_time(
    args: argparse.Namespace, result: ReplayResult, bytes_per_token: int | None, console: Console
) -> dict[str, dict[str, Any]]:
    """Reports by policy, by capacity's name; empty without --flops."""
    if args.flops is None:
        return {}
    if args.model is None:
        raise ConfigError("--flops needs the model that is served; give its folder or config.json with --model")
    cost = StepCost.of_model(
        read_model_config(args.model), flops_per_s=args.flops, bytes_per_s=float(parse_bytes(args.bandwidth))
    )
    table = Table(title=f"Served in time by {args.replicas} replicas, {args.routing}", title_justify="left")
    for heading in ("policy", "capacity", "TTFT p50", "p90", "p99", "queue p90", "hits", "tokens/s", "busy"):
        table.add_column(heading, justify="right")
    found: dict[str, dict[str, Any]] = {}
    for policy in (policy for policy in result.hits if policy != OPTIMUM):
        found[policy] = {}
        for capacity in result.capacities:
            options = TimingOptions(capacity.num_blocks, cost, args.replicas, args.routing, policy)
            reader = TraceReader(
                args.trace, block_tokens=args.block_tokens, tokenizer=_tokenizer(args), max_requests=args.max_requests
            )
            report = simulate_time(reader, options)
            found[policy][capacity.name] = asdict(report)
            waits = [f"{report.ttft_ms[key]:,.0f} ms" for key in report.ttft_ms]
            shares = f"{report.hit_ratio:.4f}", f"{report.generated_tokens_per_s:,.0f}", f"{report.busy_share:.0%}"
            table.add_row(policy, capacity.name, *waits, f"{report.queue_ms.get('p90', 0):,.0f} ms", *shares)
    console.print(table)
    return found


def _kv_bytes_per_token(args: argparse.Namespace) -> int | None:
    if args.kv_bytes_per_token is not None:
        if args.kv_bytes_per_token < 1:
            raise ConfigError(f"kv_bytes_per_token={args.kv_bytes_per_token} is too small; use at least 1")
        given: int = args.kv_bytes_per_token
        return given
    return kv_bytes_per_token(read_model_config(args.model)) if args.model is not None else None


def _replay(
    args: argparse.Namespace, bytes_per_token: int | None, console: Console
) -> tuple[ReplayResult, TraceReader]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        size = args.trace.stat().st_size if args.trace.is_file() else None
        task = progress.add_task("replaying", total=size)
        reader = TraceReader(
            args.trace,
            block_tokens=args.block_tokens,
            tokenizer=_tokenizer(args),
            strict=args.strict,
            max_requests=args.max_requests,
            on_progress=lambda num_bytes: progress.advance(task, num_bytes),
        )
        simulation: Simulation | None = None
        for request in reader:
            if simulation is None:
                capacities = _capacities(args.capacity, request.block_tokens, bytes_per_token)
                simulation = Simulation(_names(args.policy), capacities, sampling_rate=args.sample)
            simulation.admit(request)
        assert simulation is not None, "a reader without requests raises"
        return simulation.result(), reader


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--policy {text!r} names no policy; give some, such as {DEFAULT_POLICIES}")
    return names


def _capacities(text: str, block_tokens: int, bytes_per_token: int | None) -> list[Capacity]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--capacity {text!r} names no capacity; give some, such as 1000,4GB")
    return [parse_capacity(name, block_tokens, bytes_per_token) for name in names]


def _tokenizer(args: argparse.Namespace) -> PromptEncoder | None:
    folder = args.tokenizer or args.model
    if folder is None or not Path(folder).expanduser().is_dir():
        if args.tokenizer is not None:
            raise ConfigError(f"--tokenizer {args.tokenizer!r} is no folder; give that of the model's tokenizer")
        return None
    from foreword.text import Tokenizer

    return Tokenizer.load(folder)

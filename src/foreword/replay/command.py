"""`foreword replay TRACE`: reads arguments, writes tables, pictures and JSON. Other modules of the package compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from foreword.config import KVCacheDtype, SchedulerConfig, user_path
from foreword.errors import ConfigError
from foreword.replay.capacity import Capacity, kv_bytes_per_token, parse_capacity, parse_with_unit, read_model_config
from foreword.replay.lines import PromptEncoder
from foreword.replay.linking import LinkMethod, LinkReplay, chunk_file, read_chunks, replay_linking
from foreword.replay.picture import check_format, write_picture
from foreword.replay.report import as_json, capacity_name, gigabytes, print_report, table_of
from foreword.replay.rules import COST, RULES
from foreword.replay.serving import (
    FleetChange,
    Scheduling,
    ServingOptions,
    ServingReport,
    ServingSimulation,
    at_load,
    simulate_scheduling,
)
from foreword.replay.simulator import OPTIMUM, ReplayResult, Simulation
from foreword.replay.tiers import TierOption, replay_tiers
from foreword.replay.timing import PromptRates, StepCost
from foreword.replay.trace import TraceReader
from foreword.tiers.admission import ADMISSIONS

DEFAULT_POLICIES = "lru,value,optimum"
SATURATED = 0.95
"""A replica that is busy for more than this share of the time has no room for bursts."""
DEFAULT_CAPACITIES = "1000,3000,10000,30000,100000"
DEFAULT_METHODS = "none,first-16,deviation-0.15"
DEFAULT_TOKENS = "50000,200000,1000000"
NOT_FOR_CHUNKS = "tier flops sample picture policy block_tokens tokenizer kv_cache_dtype prefill_rate".split()
"""Options of `foreword replay` that need blocks, so a trace of chunks refuses them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword replay`."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="recorded requests: JSONL, gzipped or not")
    parser.add_argument(
        "--policy", default=DEFAULT_POLICIES, metavar="NAMES", help=f"eviction policies (default: {DEFAULT_POLICIES})"
    )
    parser.add_argument(
        "--capacity",
        default=DEFAULT_CAPACITIES,
        metavar="SIZES",
        help=f"blocks of the trace, or bytes of a model's KV such as 4GB (default: {DEFAULT_CAPACITIES})",
    )
    parser.add_argument("--model", metavar="FOLDER", help="folder or config.json of the model whose KV is counted")
    parser.add_argument("--kv-bytes-per-token", type=int, metavar="BYTES", help="KV of one token, instead of --model")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="how --model's KV is stored, as `foreword serve` takes it (default: in the type of its config)",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer for traces of text (default: that of --model)")
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens per block (default: what the format says)"
    )
    parser.add_argument("--max-requests", type=int, metavar="N", help="only the first N requests (default: all)")
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="RATE",
        help="follow only this share of the blocks, such as 0.01, under lru alone (default: 1, all)",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    parser.add_argument(
        "--picture", type=Path, action="append", default=[], metavar="FILE", help="draw a .svg, .png or .html"
    )
    parser.add_argument(
        "--tier",
        metavar="NAME=SIZE,RATE",
        help="show what a tier below the memory would find, for each rule of storing, such as disk=50GB,1.6GB/s",
    )
    time = parser.add_argument_group("simulated time", "given --flops, requests are served as they arrive")
    time.add_argument(
        "--flops",
        type=float,
        metavar="FLOP/s",
        help="operations per second that a replica reaches, such as 4e14; needs --model",
    )
    time.add_argument(
        "--bandwidth", default="1TB", metavar="BYTES/s", help="speed of a replica's memory, such as 2TB (default: 1TB)"
    )
    add_scheduling_arguments(time)
    add_fleet_arguments(parser)
    add_linking_arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON line; all else goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments. Most arguments are checked before the trace is read."""
    if (chunks := chunk_file(args.trace)) is not None:
        return run_linking(args, chunks, args.parser.parse_args([str(args.trace)]))
    console = Console(stderr=args.json)
    for file in args.picture:
        check_format(file)
    bytes_per_token = _kv_bytes_per_token(args)
    simulation = Simulation(_names(args.policy, "policy", DEFAULT_POLICIES), (), sampling_rate=args.sample)
    _capacities(args.capacity, 1, bytes_per_token)
    served = serving_options(args)
    schedulings = schedulings_of(args)
    tier = None if args.tier is None else TierOption.parse(args.tier)
    if tier is not None:
        tier.capacity(1, bytes_per_token)
    reader = TraceReader(
        args.trace,
        block_tokens=args.block_tokens,
        tokenizer=_tokenizer(args),
        strict=args.strict,
        max_requests=args.max_requests,
    )
    result = _replay(args, reader, simulation, bytes_per_token, console)
    _tell_malformed(reader, console)
    print_report(result, console, args.trace.name, bytes_per_token)
    tiers = [] if tier is None else _replay_tier(tier, reader, result, bytes_per_token, console)
    reports = {} if served is None else _serve(args.load, served, reader, result, console)
    schedules = {} if served is None else _compare(args.load, served, schedulings, reader, result, console)
    for file in args.picture:
        write_picture(result, file, args.trace.name, bytes_per_token)
        console.print(f"wrote {file}", markup=False)
    if args.json:
        report = as_json(result, bytes_per_token)
        report = {
            **report,
            "tiers": tiers,
            "timing": reports if args.flops is not None else {},
            "scheduling": schedules,
            "cluster": reports if args.flops is None else {},
            "malformed_lines": reader.num_malformed,
        }
        print(json.dumps(report), flush=True)
    return 0


def _tell_malformed(reader: TraceReader, console: Console) -> None:
    if reader.num_malformed:
        console.print(f"{reader.num_malformed:,} malformed lines were passed over:", style="yellow")
        for line in reader.malformed:
            console.print(f"    {line}", style="yellow", markup=False)


def _replay_tier(
    tier: TierOption, reader: TraceReader, result: ReplayResult, bytes_per_token: int | None, console: Console
) -> list[dict[str, Any]]:
    """Print the blocks found in memory and in the tier below, and those written to the tier, for each capacity.

    Returns the table's rows as JSON values.
    """
    with _progress(reader, tier.name, console):
        below = tier.capacity(result.block_tokens, bytes_per_token)
        replays = replay_tiers(reader, list(result.capacities), below, result.block_tokens)
    block_bytes = result.block_tokens * bytes_per_token if bytes_per_token is not None else None
    console.print(f"\nWith {tier.name} of {capacity_name(tier.size)} below the memory (LRU)", style="bold")
    sizes = [] if block_bytes is None else ["written GB", "loaded GB"]
    seconds = [] if block_bytes is None or tier.bytes_per_s is None else ["loading s"]
    table = table_of("capacity", "stored", "in memory", f"from {tier.name}", "written", *sizes, *seconds)
    rows: list[dict[str, Any]] = []
    for number, replayed in enumerate(replays):
        name = result.capacities[number // len(ADMISSIONS)].name
        counts = (replayed.memory_hits, replayed.tier_hits, replayed.num_written)
        shares = [f"{replayed.share(count):.4f}" for count in counts]
        row: dict[str, Any] = {**asdict(replayed), "capacity": name, "tier": tier.name}
        cells = [name if number % len(ADMISSIONS) == 0 else "", replayed.admission, *shares]
        if block_bytes is not None:
            row["written_bytes"] = replayed.num_written * block_bytes
            row["loaded_bytes"] = replayed.tier_hits * block_bytes
            cells += [gigabytes(row["written_bytes"]), gigabytes(row["loaded_bytes"])]
            if tier.bytes_per_s is not None:
                row["load_s"] = row["loaded_bytes"] / tier.bytes_per_s
                cells.append(f"{row['load_s']:,.1f}")
        table.add_row(*cells)
        rows.append(row)
    console.print(table)
    return rows


@contextmanager
def _progress(reader: TraceReader, what: str, console: Console) -> Iterator[None]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    size = reader.file.stat().st_size if reader.file.is_file() else None
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=size)
        reader.on_progress = lambda num_bytes: progress.advance(task, num_bytes)
        yield


def _kv_bytes_per_token(args: argparse.Namespace) -> int | None:
    if args.kv_cache_dtype != "auto" and (args.model is None or args.kv_bytes_per_token is not None):
        raise ConfigError(
            f"kv_cache_dtype={args.kv_cache_dtype!r} says how the KV of --model is stored; give --model, and no "
            "--kv-bytes-per-token"
        )
    if args.kv_bytes_per_token is not None:
        if args.kv_bytes_per_token < 1:
            raise ConfigError(f"kv_bytes_per_token={args.kv_bytes_per_token} is too small; use at least 1")
        num_bytes: int = args.kv_bytes_per_token
        return num_bytes
    if args.model is None:
        return None
    return kv_bytes_per_token(read_model_config(args.model), args.kv_cache_dtype)


def _replay(
    args: argparse.Namespace, reader: TraceReader, simulation: Simulation, bytes_per_token: int | None, console: Console
) -> ReplayResult:
    with _progress(reader, "replaying", console):
        for request in reader:
            if not simulation.num_requests:
                simulation.add_caches(_capacities(args.capacity, request.block_tokens, bytes_per_token))
            simulation.admit(request)
        return simulation.result()


def _names(text: str, option: str, example: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--{option} {text!r} names no {option}; give some, such as {example}")
    return names


def _capacities(text: str, block_tokens: int, bytes_per_token: int | None) -> list[Capacity]:
    return [parse_capacity(name, block_tokens, bytes_per_token) for name in _names(text, "capacity", "1000,4GB")]


def _tokenizer(args: argparse.Namespace) -> PromptEncoder | None:
    folder = args.tokenizer or args.model
    if folder is None or not user_path(folder).is_dir():
        if args.tokenizer is not None:
            raise ConfigError(f"--tokenizer {args.tokenizer!r} is no folder; give that of the model's tokenizer")
        return None
    from foreword.text import Tokenizer

    return Tokenizer.load(folder)


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for several replicas and routers."""
    group = parser.add_argument_group(
        "replicas and routers", "given --flops or --prefill-rate, foreword's router sends the requests to --replicas"
    )
    group.add_argument(
        "--prefill-rate",
        metavar="TOKENS/s",
        help="instead of --flops: each replica computes one prompt after the other, at this number of prompt tokens "
        "per second; if there are several rates, such as 6000,3000, each replica takes the next one",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of replicas, each with the given capacities (default: 1)",
    )
    group.add_argument(
        "--routing",
        choices=RULES,
        default=COST,
        metavar="RULE",
        help="rule that chooses a request's replica: foreword's own, cost, or another router's, with exact knowledge: "
        f"{', '.join(RULES[1:])} (default: cost)",
    )
    group.add_argument("--routers", type=int, default=1, metavar="N", help="number of routers (default: 1)")
    group.add_argument(
        "--event-delay",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds by which events of caches are late (default: 0)",
    )
    group.add_argument(
        "--fleet",
        metavar="CHANGES",
        help="replicas that die (-) or join (+), by second: 600:-replica-3,900:+replica-3,1200:+replica-8",
    )


def serving_options(args: argparse.Namespace) -> ServingOptions | None:
    """Returns the options of serving; the capacity is set later. None without --flops and --prefill-rate."""
    cost: StepCost | PromptRates
    if args.flops is None and args.prefill_rate is None:
        return None
    if args.flops is None:
        rates = (_number(rate, "prefill-rate", args.prefill_rate) for rate in args.prefill_rate.split(","))
        cost = PromptRates(tuple(rates))
    elif args.prefill_rate is not None:
        raise ConfigError("--prefill-rate and --flops are two models of time; give one of them")
    elif args.model is None:
        raise ConfigError("--flops needs the model that is served; give its folder or config.json with --model")
    else:
        bytes_per_s = float(parse_with_unit(args.bandwidth))
        cost = StepCost.of_model(
            read_model_config(args.model),
            flops_per_s=args.flops,
            bytes_per_s=bytes_per_s,
            kv_cache_dtype=args.kv_cache_dtype,
        )
    return ServingOptions(
        1,
        cost,
        args.replicas,
        args.routing,
        num_routers=args.routers,
        event_delay_s=args.event_delay,
        changes=_changes(args.fleet or ""),
    )


def _at(options: ServingOptions, policy: str, capacity: Capacity) -> ServingOptions:
    return replace(options, num_blocks=capacity.num_blocks, eviction_policy=policy)


def _serve(
    load: float, options: ServingOptions, reader: TraceReader, result: ReplayResult, console: Console
) -> dict[str, dict[str, dict[str, Any]]]:
    """Serve the recording once for each policy and capacity. Returns the reports by policy and name of the capacity."""
    routers = f", {options.num_routers} routers" if options.num_routers > 1 else ""
    replicas = f"{options.num_replicas} replicas, {options.routing}" if options.num_replicas > 1 else "one replica"
    at = f" at {load:g} times the recorded load" if load != 1 else ""
    console.print(f"\nServed in time by {replicas}{routers}{at}; seconds to the first token", style="bold")
    has_steps = isinstance(options.cost, StepCost)
    more = ("step p90", "tokens/s", "busy") if has_steps else ("work max/mean",)
    table = table_of("policy", "capacity", "mean", "p50", "p90", "p99", "hits", *more)
    reports: dict[str, dict[str, dict[str, Any]]] = {}
    refused: dict[str, int] = {}
    stranded: list[str] = []
    busy: list[float] = []
    for policy, capacity in result.served():
        with _progress(reader, f"{policy}, {capacity.name}", console):
            report = ServingSimulation(_at(options, policy, capacity)).serve(at_load(reader, load))
        reports.setdefault(policy, {})[capacity.name] = asdict(report)
        busy.append(report.busy_share)
        speed = (_seconds(report.queue_ms)[1], *_speed(report)) if has_steps else (f"{report.work_max_over_mean:.3f}",)
        waits = (f"{report.mean_ttft_s:,.2f}", *_seconds(report.ttft_ms), f"{report.hit_ratio:.4f}")
        table.add_row(policy, capacity.name, *waits, *speed)
        if report.requests_refused:
            refused[capacity.name] = report.requests_refused
        if report.requests_stranded:
            stranded.append(f"{report.requests_stranded:,} requests ({policy}, {capacity_name(capacity.name)})")
    console.print(table)
    for name, num_requests in refused.items():
        console.print(f"Too large for {capacity_name(name)}, and left out: {num_requests:,} requests.")
    if stranded:
        console.print(f"No replica was left for {', '.join(stranded)}.")
    if has_steps and min(busy, default=0.0) >= SATURATED:
        console.print(
            f"The replicas are busy at least {min(busy):.0%} of the time: requests wait for computation, and more "
            "replicas shorten the wait more than memory does.",
            style="bold",
            highlight=False,
        )
    return reports


def _seconds(waits_ms: dict[str, float]) -> list[str]:
    return [f"{wait_ms / 1000:,.2f}" for wait_ms in waits_ms.values()] or ["-"] * 3


def _speed(report: ServingReport) -> tuple[str, str]:
    return f"{report.generated_tokens_per_s:,.0f}", f"{report.busy_share:.0%}"


def _changes(text: str) -> tuple[FleetChange, ...]:
    changes = []
    for part in filter(None, text.split(",")):
        at, _, replica = part.partition(":")
        if replica[:1] not in ("+", "-") or len(replica) < 2:
            raise ConfigError(f"--fleet {text!r} is not understood at {part!r}; write SECONDS:-NAME or SECONDS:+NAME")
        at_s = _number(at, "fleet", text)
        if not 0.0 <= at_s < float("inf"):
            raise ConfigError(f"--fleet {text!r} has {at!r} for a time; use seconds of at least 0, such as 600")
        changes.append(FleetChange(at_s, replica[1:], replica[0] == "+"))
    return tuple(changes)


def _number(text: str, option: str, argument: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{option} {argument!r} has {text!r} for a number; use one such as 6000") from None


def add_scheduling_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that need `--flops`."""
    group.add_argument(
        "--scheduling",
        metavar="NAMES",
        help="orders of service to compare on one replica: fcfs, prefix, and dfs, which knows all requests beforehand",
    )
    group.add_argument(
        "--load", type=float, default=1.0, metavar="FACTOR", help="requests come this many times as fast (default: 1)"
    )
    group.add_argument(
        "--max-overtake-s",
        type=float,
        default=SchedulerConfig().max_overtake_s,
        metavar="S",
        help="most seconds that a waiting request loses to later ones under prefix (default: %(default)s)",
    )


def schedulings_of(args: argparse.Namespace) -> list[tuple[Scheduling, SchedulerConfig]]:
    """Returns the orders of service to compare, each with the scheduler's options; empty without --scheduling."""
    if not 0.0 < args.load < float("inf"):
        raise ConfigError(f"--load {args.load} is no factor; use a number above 0, such as 1.5")
    config = SchedulerConfig(max_overtake_s=args.max_overtake_s)
    if args.scheduling is None:
        return []
    if args.flops is None:
        raise ConfigError("--scheduling compares first tokens, which need a time; give --flops and --model")
    if args.replicas > 1:
        raise ConfigError(f"--scheduling compares orders on one replica, not on {args.replicas}; leave out --replicas")
    for option, usual in (("routers", 1), ("event_delay", 0.0), ("fleet", None)):
        if (value := getattr(args, option)) != usual:
            raise ConfigError(
                "--scheduling compares orders on one replica that never dies, with one router and no delays; "
                f"leave out --{option.replace('_', '-')} {value}"
            )
    names = dict.fromkeys(name.strip() for name in args.scheduling.split(",") if name.strip())
    schedulings: dict[str, Scheduling] = {name: name for name in get_args(Scheduling)}
    unknown = [name for name in names if name not in schedulings]
    if unknown or not names:
        what = repr(unknown[0] if unknown else args.scheduling)
        raise ConfigError(f"--scheduling {what} is unknown; use some of {', '.join(schedulings)}")
    return [(schedulings[name], config) for name in names]


def _compare(
    load: float,
    options: ServingOptions,
    schedulings: list[tuple[Scheduling, SchedulerConfig]],
    reader: TraceReader,
    result: ReplayResult,
    console: Console,
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Serve the recording in each order. Returns the reports by order, eviction policy and name of the capacity."""
    reports: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    if not schedulings:
        return reports
    console.print(
        f"\nServed in several orders at {load:g} times the recorded load; seconds to the first token. "
        "Hits are shares of the prompt tokens. dfs knows all requests at the start.",
        style="bold",
    )
    table = table_of("scheduling", "policy", "capacity", "p50", "p90", "p99", "hits", "tokens/s", "busy")
    for scheduling, config in schedulings:
        for policy, capacity in result.served():
            served = replace(_at(options, policy, capacity), scheduler=config)
            report = simulate_scheduling(at_load(reader, load), scheduling, served)
            reports.setdefault(scheduling, {}).setdefault(policy, {})[capacity.name] = asdict(report)
            waits = (*_seconds(report.ttft_ms), f"{report.hit_ratio:.4f}")
            table.add_row(scheduling, policy, capacity.name, *waits, *_speed(report))
    console.print(table)
    for name, count in result.hits.get(OPTIMUM, {}).items():
        best = result.token_ratio(count)
        console.print(f"The clairvoyant optimum at {name} in order of arrival finds {best:.4f}.", highlight=False)
    console.print(f"Unlimited memory finds {result.token_ratio(result.unlimited):.4f}.", highlight=False)
    return reports


def add_linking_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for traces of chunks."""
    group = parser.add_argument_group("chunks", "if a line has `chunks`, or the trace is RAGPulse's folder")
    group.add_argument(
        "--link", default=DEFAULT_METHODS, metavar="METHODS", help=f"methods of linking (default: {DEFAULT_METHODS})"
    )


def run_linking(args: argparse.Namespace, file: Path, defaults: argparse.Namespace) -> int:
    """Run with parsed arguments on a file of chunks; `defaults` has the default value of each option."""
    for name in NOT_FOR_CHUNKS:
        if getattr(args, name) != getattr(defaults, name):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning for a trace of chunks; leave it out")
    if args.max_requests is not None and args.max_requests < 1:
        raise ConfigError(f"max_requests={args.max_requests} is too small; use at least 1")
    methods = [LinkMethod.parse(name.strip()) for name in dict.fromkeys(args.link.split(","))]
    bytes_per_token = args.kv_bytes_per_token
    if bytes_per_token is None and args.model is not None:
        bytes_per_token = kv_bytes_per_token(read_model_config(args.model))
    names = DEFAULT_TOKENS if args.capacity == defaults.capacity else args.capacity
    capacities = [parse_capacity(name, 1, bytes_per_token) for name in names.split(",") if name.strip()]
    console = Console(stderr=args.json)
    with console.status("replaying"):
        sizes = [*(capacity.num_blocks for capacity in capacities), None]
        replays = replay_linking(read_chunks(file, args.max_requests), sizes, methods)
    titles = [*(capacity.name for capacity in capacities), "unlimited"]
    _print(replays, titles, methods, console, args.trace.name)
    if args.json:
        shares = {
            title: {"prefix": replay.share(), **{method.name: replay.share(method.name) for method in methods}}
            for title, replay in zip(titles, replays, strict=True)
        }
        counts = {title: asdict(replay) for title, replay in zip(titles, replays, strict=True)}
        print(json.dumps({"not_computed": shares, "counts": counts}), flush=True)
    return 0


def _print(
    replays: list[LinkReplay], titles: list[str], methods: list[LinkMethod], console: Console, title: str
) -> None:
    unlimited = replays[-1]
    console.print(f"{title}: {unlimited.num_tokens:,} prompt tokens in chunks", markup=False)
    console.print("\nShare of the prompts' tokens that need not be computed", style="bold")
    table = table_of("capacity (tokens)", "prefix", *(method.name for method in methods))
    for name, replay in zip(titles, replays, strict=True):
        shares = (replay.share(), *(replay.share(method.name) for method in methods))
        table.add_row(name, *(f"{share:.4f}" for share in shares))
    console.print(table)
    if len(unlimited.parts) > 1:
        console.print("\nBy part, with unlimited memory", style="bold")
        table = table_of("part", "of all tokens", "prefix", "anywhere")
        for part, count in unlimited.parts.items():
            of_all = count.num_tokens / max(1, unlimited.num_tokens)
            of_part = (tokens / max(1, count.num_tokens) for tokens in (count.prefix_tokens, count.found_tokens))
            table.add_row(part or "(no name)", *(f"{share:.3f}" for share in (of_all, *of_part)))
        console.print(table)
    gain = max(replay.found_tokens - replay.prefix_tokens for replay in replays) / max(1, unlimited.num_tokens)
    text = (
        f"Linking finds up to {gain:.1%} of all tokens that prefix caching computes again; "
        f"{unlimited.num_linked:,} chunks come again where no prefix ends with them. What answers lose by it, only a "
        "measurement on the model tells."
    )
    console.print(f"\n{text}", style="bold", highlight=False, soft_wrap=True)

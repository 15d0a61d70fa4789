"""`foreword replay TRACE --prefill-rate N`: options of many replicas in simulated time, and their table.

Knows the terminal; `cluster` does the computing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from foreword.errors import ConfigError
from foreword.replay.capacity import Capacity
from foreword.replay.cluster import ClusterOptions, ClusterSimulation, FleetChange
from foreword.replay.report import table_of
from foreword.replay.rivals import COST
from foreword.replay.trace import TraceReader


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that `--prefill-rate` brings."""
    group = parser.add_argument_group(
        "many replicas",
        "given --prefill-rate, foreword's routing core sends the requests to --replicas; --routing is then cost "
        "(ours) or another router's rule with exact knowledge: first_token, bounded_hash, round_robin, power_of_two, "
        "ray, ray_10, sglang, llm_d, dynamo",
    )
    group.add_argument(
        "--prefill-rate",
        metavar="TOKENS/s",
        help="what a replica computes, one prompt after the other; several rates, such as 6000,3000, take turns",
    )
    group.add_argument("--routers", type=int, default=1, metavar="N", help="that share their reservations (default: 1)")
    group.add_argument(
        "--event-delay", type=float, default=0.0, metavar="S", help="of the events of caches, in seconds (default: 0)"
    )
    group.add_argument(
        "--fleet",
        metavar="CHANGES",
        help="replicas that die or join, in seconds: 600:-replica-3,900:+replica-3,1200:+replica-8",
    )


def cluster_options(args: argparse.Namespace) -> ClusterOptions | None:
    """The options, for any capacity; None without --prefill-rate."""
    if args.prefill_rate is None:
        return None
    if args.flops is not None:
        raise ConfigError("--prefill-rate and --flops are two models of time; give one of them")
    return ClusterOptions(
        1,
        tuple(_number(rate, "prefill-rate", args.prefill_rate) for rate in args.prefill_rate.split(",")),
        args.replicas,
        args.routing or COST,
        num_routers=args.routers,
        event_delay_s=args.event_delay,
        changes=_changes(args.fleet or ""),
    )


def simulate_cluster(
    options: list[tuple[str, Capacity, ClusterOptions]], reader: TraceReader, console: Console
) -> dict[str, dict[str, dict[str, Any]]]:
    """Serve the recording once for each policy and capacity. Reports by policy, by capacity's name."""
    one = options[0][2]
    routers = f"{one.num_routers} routers" if one.num_routers > 1 else "one router"
    console.print(
        f"\nServed in time by {one.num_replicas} replicas, {one.routing}, {routers}; seconds to the first token",
        style="bold",
    )
    table = table_of("policy", "capacity", "mean", "p50", "p90", "p99", "hits", "work max/mean")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for policy, capacity, each in options:
        report = ClusterSimulation(each).serve(reader)
        found.setdefault(policy, {})[capacity.name] = asdict(report)
        waits = (report.mean_ttft_s, *report.ttft_s.values())
        row = [f"{wait:,.2f}" for wait in waits]
        table.add_row(policy, capacity.name, *row, f"{report.hit_ratio:.4f}", f"{report.work_max_over_mean:.3f}")
    console.print(table)
    return found


def _changes(text: str) -> tuple[FleetChange, ...]:
    changes = []
    for part in filter(None, text.split(",")):
        at, _, replica = part.partition(":")
        if replica[:1] not in ("+", "-") or len(replica) < 2:
            raise ConfigError(f"--fleet {text!r} is not understood at {part!r}; write SECONDS:-NAME or SECONDS:+NAME")
        changes.append(FleetChange(_number(at, "fleet", text), replica[1:], replica[0] == "+"))
    return tuple(changes)


def _number(text: str, option: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{option} {given!r} has {text!r} for a number; use one such as 6000") from None

"""`foreword replay TRACE --scheduling NAMES`: its options, and the table of orders of service.

Knows the terminal; `scheduling` does the computing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, get_args

from rich.console import Console

from foreword.config import SchedulerConfig
from foreword.errors import ConfigError
from foreword.replay.report import table_of
from foreword.replay.scheduling import Scheduling, at_load, check_load, simulate_scheduling
from foreword.replay.simulator import OPTIMUM, ReplayResult
from foreword.replay.timing import StepCost, TimingOptions
from foreword.replay.trace import TraceReader


def add_scheduling_arguments(group: argparse._ArgumentGroup) -> None:
    """Options that `--flops` brings."""
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
        help="bound on delay under prefix (default: %(default)s)",
    )


def schedulings_of(args: argparse.Namespace) -> tuple[SchedulerConfig, list[Scheduling]]:
    """The options of the scheduler, and the orders to compare; none without --scheduling."""
    check_load(args.load)
    config = SchedulerConfig(max_overtake_s=args.max_overtake_s)
    if args.scheduling is None:
        return config, []
    if args.flops is None:
        raise ConfigError("--scheduling compares first tokens, which need a time; give --flops and --model")
    if args.replicas > 1:
        raise ConfigError(f"--scheduling compares orders on one replica, not on {args.replicas}; leave out --replicas")
    names = dict.fromkeys(name.strip() for name in args.scheduling.split(",") if name.strip())
    known = {name: name for name in get_args(Scheduling)}
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        what = repr(wrong[0] if wrong else args.scheduling)
        raise ConfigError(f"--scheduling {what} is unknown; use some of {', '.join(known)}")
    return config, [known[name] for name in names]


def compare_schedulings(
    args: argparse.Namespace,
    asked: tuple[SchedulerConfig, list[Scheduling]],
    reader: TraceReader,
    result: ReplayResult,
    cost: StepCost,
    console: Console,
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Serve the recording in each order. Reports by order, by eviction policy, by capacity's name."""
    config, schedulings = asked
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    if not schedulings:
        return found
    console.print(
        f"\nServed in several orders at {args.load:g} times the recorded load; seconds to the first token. "
        "Hits are shares of the prompt tokens. dfs knows all requests at the start.",
        style="bold",
    )
    table = table_of("scheduling", "policy", "capacity", "p50", "p90", "p99", "hits", "tokens/s", "busy")
    for scheduling in schedulings:
        for policy in (policy for policy in result.hits if policy != OPTIMUM):
            for capacity in result.capacities:
                options = TimingOptions(capacity.num_blocks, cost, eviction_policy=policy, scheduler=config)
                report = simulate_scheduling(at_load(reader, args.load), scheduling, options)
                found.setdefault(scheduling, {}).setdefault(policy, {})[capacity.name] = asdict(report)
                waits = [f"{wait / 1000:,.2f}" for wait in report.ttft_ms.values()] or ["-"] * 3
                rate, busy = f"{report.generated_tokens_per_s:,.0f}", f"{report.busy_share:.0%}"
                table.add_row(scheduling, policy, capacity.name, *waits, f"{report.hit_ratio:.4f}", rate, busy)
    console.print(table)
    for name, count in result.hits.get(OPTIMUM, {}).items():
        best = result.token_ratio(count)
        console.print(f"The clairvoyant optimum at {name} in order of arrival finds {best:.4f}.", highlight=False)
    console.print(f"Unlimited memory finds {result.token_ratio(result.unlimited):.4f}.", highlight=False)
    return found

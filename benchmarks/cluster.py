"""Compares foreword's routing of requests over replicas with other routers' rules, in simulated time.

    PYTHONPATH=src python benchmarks/cluster.py --trace mooncake_conversation_trace.jsonl --rates 9000,6000,4500
    PYTHONPATH=src python benchmarks/cluster.py --traffic agents    or few_shot, independent: seeded, not recorded
    ... --rules cost,first_token,bounded_hash       ours, and the two rules that it must not lose to
    ... --quick                                     small, to see that it works

At each of three rates of prefill (loads) each rule serves the same requests. A ratio is our mean time to the first
token over that of the better of `first_token` and `bounded_hash`; `worst_ratio` is the largest ratio of the three
loads. With `--more`, at the middle rate: late events, several routers, and the time of a decision.

8 replicas, each with a pool of 3,750 blocks (the engine's real pool, under LRU), compute one prompt after the other.
The other rules know exactly what each replica caches now (`foreword.replay.rules`), so they do better here than in
their systems. Mooncake's recording has one arrival time every 3 s, at which many requests arrive. Three routers decide
about them one after the other (`routers3_ratio`), or without knowing of each other (`routers3_blind_ratio`).
`routers3_spread_ratio` is measured with arrivals that are spread evenly over the 3 s.

`select_us_N`: processor time of one `choose`, its reservation included, for a prompt of 12,000 tokens in blocks of 16
(150 of 750 blocks new), over N replicas that each hold a quarter of the prefixes. It is the best of some medians,
because other programs disturb the machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cluster_traffic import agents, few_shot, independent
from foreword.cache import BlockStored
from foreword.cluster import EventBatch, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.replay.rules import COST, RULES
from foreword.replay.serving import ServingOptions, ServingReport, ServingSimulation
from foreword.replay.timing import PromptRates
from foreword.replay.trace import RecordedRequest, TraceReader

TICK_MS = 3000
MUST_NOT_LOSE_TO = ("first_token", "bounded_hash")
TRAFFIC = {
    "agents": (agents, (6000.0, 2500.0, 1700.0)),
    "few_shot": (few_shot, (6000.0, 1500.0, 800.0)),
    "independent": (independent, (2500.0, 1600.0, 1350.0)),
}
NUM_BLOCKS, NUM_FAMILIES, NUM_SHARED = 750, 20, 600


def spread(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """The same requests. Those that arrive at one time are spread evenly over the seconds to the next arrival time."""
    found = []
    for _, group in groupby(requests, key=lambda request: round((request.timestamp_ms or 0) / TICK_MS)):
        of_tick = list(group)
        for number, request in enumerate(of_tick):
            found.append(
                request._replace(timestamp_ms=(of_tick[0].timestamp_ms or 0) + TICK_MS * number / len(of_tick))
            )
    return found


def serve(requests: list[RecordedRequest], what: str, tokens_per_s: float, **changes: Any) -> ServingReport:
    options = ServingOptions(3750, PromptRates((tokens_per_s,)), num_replicas=8, **changes)
    report = ServingSimulation(options).serve(requests)
    print(
        f"{what:34} hits {report.hit_ratio:.4f}  mean {report.mean_ttft_s:9.2f} s  p99 {report.ttft_s['p99']:9.2f} s  "
        f"work max/mean {report.work_max_over_mean:.2f}",
        flush=True,
    )
    return report


def _key(*what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def filled_core(num_replicas: int, families: list[list[bytes]]) -> RoutingCore:
    """A router whose replicas each hold a quarter of the prefix families, each family to another depth."""
    core, rng = RoutingCore(RoutingOptions(16)), np.random.default_rng(0)
    for replica in range(num_replicas):
        core.join(f"replica-{replica}", ReplicaSpec(20_000, 6000.0, is_prefix_closed=True))
        for number, family in enumerate(rng.choice(NUM_FAMILIES, NUM_FAMILIES // 4, replace=False)):
            held = families[family][: int(rng.integers(1, NUM_BLOCKS))]
            core.observe(f"replica-{replica}", EventBatch(b"", number, (BlockStored(tuple(held), None, (), 16),)), 0.0)
    return core


def select_us(num_replicas: int, rounds: int, per_round: int = NUM_FAMILIES) -> float:
    """Microseconds of processor time for one decision."""
    families = [[_key(family, at) for at in range(NUM_BLOCKS)] for family in range(NUM_FAMILIES)]
    core = filled_core(num_replicas, families)
    medians, now = [], 0.0
    for round_number in range(rounds):
        taken = []
        for number in range(per_round):
            name = f"{round_number}.{number}"
            own = [_key(name, at) for at in range(NUM_BLOCKS - NUM_SHARED)]
            request = RoutingRequest(name, families[number % NUM_FAMILIES][:NUM_SHARED] + own, 16 * NUM_BLOCKS)
            began = time.thread_time_ns()
            decision = core.choose(request, now)
            taken.append(time.thread_time_ns() - began)
            core.note_first_token(decision.reservation, now + 0.5, decision.hit_tokens)
            core.release(decision.reservation, now + 0.9)
            now += 1.0
        medians.append(median(taken) / 1000)
    return round(min(medians), 1)


def at_each_rate(requests: list[RecordedRequest], rules: list[str], rates: list[float]) -> dict[str, Any]:
    """Mean and 99th percentile of the time to the first token, by rate and rule."""
    found: dict[str, Any] = {}
    for rate in rates:
        of_rule = {rule: serve(requests, f"{rule}, {rate:,.0f} tokens/s", rate, routing=rule) for rule in rules}
        found[f"{rate:g}"] = {
            rule: {
                "mean_ttft_s": round(report.mean_ttft_s, 3),
                "p99_ttft_s": round(report.ttft_s["p99"], 2),
                "hit_ratio": round(report.hit_ratio, 4),
                "work_max_over_mean": round(report.work_max_over_mean, 2),
            }
            for rule, report in of_rule.items()
        }
    return found


def worst_ratio(found: dict[str, Any]) -> float | None:
    """Our mean time to the first token over that of the better of the two rules; None if a rule was not run."""
    if any(rule not in rates for rates in found.values() for rule in (COST, *MUST_NOT_LOSE_TO)):
        return None
    return max(
        rates[COST]["mean_ttft_s"] / min(rates[rule]["mean_ttft_s"] for rule in MUST_NOT_LOSE_TO)
        for rates in found.values()
    )


def more_figures(requests: list[RecordedRequest], rate: float, quick: bool) -> dict[str, float]:
    """Late events, several routers, and the time of a decision."""
    selects = {f"select_us_{number}": select_us(number, 3 if quick else 100) for number in (8, 64, 1000)}
    print("  ".join(f"{name} {value}" for name, value in selects.items()), flush=True)
    ours = serve(requests, COST, rate)
    stale = serve(requests, f"{COST}, events 30 s late", rate, event_delay_s=30.0)
    in_turn = serve(requests, f"{COST}, 3 routers", rate, num_routers=3)
    blind = serve(requests, f"{COST}, 3 routers, no turns", rate, num_routers=3, turn_s=0.0)
    even = spread(requests)
    alone = serve(even, f"{COST}, arrivals spread", rate)
    three = serve(even, f"{COST}, 3 routers, arrivals spread", rate, num_routers=3)
    return {
        "routers3_ratio": round(in_turn.mean_ttft_s / ours.mean_ttft_s, 3),
        "routers3_blind_ratio": round(blind.mean_ttft_s / ours.mean_ttft_s, 3),
        "routers3_spread_ratio": round(three.mean_ttft_s / alone.mean_ttft_s, 3),
        "stale30_ratio": round(stale.mean_ttft_s / ours.mean_ttft_s, 3),
        **selects,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="routing over replicas")
    parser.add_argument("--trace", type=Path, help="a recording in Mooncake's format, in place of generated traffic")
    parser.add_argument("--traffic", choices=TRAFFIC, default="agents", help="generated traffic (default: agents)")
    parser.add_argument("--rates", help="prefill tokens a second, such as 9000,6000,4500")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", default=",".join(RULES), help="rules to compare (default: all)")
    parser.add_argument("--more", action="store_true", help="also late events, several routers, time of a decision")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    make, rates = TRAFFIC[args.traffic]
    requests = list(TraceReader(args.trace)) if args.trace else make(args.seed)
    if args.trace:
        rates = (9000.0, 6000.0, 4500.0)
    if args.rates:
        rates = tuple(float(rate) for rate in args.rates.split(","))
    if args.quick:
        requests = requests[:300]
    found = at_each_rate(requests, args.rules.split(","), list(rates))
    more = more_figures(requests, rates[len(rates) // 2], args.quick) if args.more else {}
    name = args.trace.name if args.trace else args.traffic
    figures = {"traffic": name, "requests": len(requests), "worst_ratio": worst_ratio(found), **more, "rates": found}
    print(json.dumps({"benchmark": "cluster", **figures}))


if __name__ == "__main__":
    main()

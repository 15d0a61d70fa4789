"""How well requests are spread over replicas: foreword's routing core beside other routers' rules, in simulated time.

    PYTHONPATH=src python benchmarks/cluster.py --trace mooncake_conversation_trace.jsonl
    ...                                             without --trace: made-up conversations, seeded
    ... --quick                                     small, to see that it works

8 replicas with pools of 3,750 blocks (the engine's own, under LRU) compute one prompt after the other at 6,000 tokens a
second, and at 4,500 for the overload. Rivals' rules get exact, fresh knowledge (`foreword.replay.rivals`), so they do
better here than their own systems would. The recording has a time of arrival each 3 s only, where many requests meet at
one moment: three routers decide them in turn (`routers3_ratio`), or blindly (`routers3_blind_ratio`). On arrivals that
are spread evenly over these 3 s, `routers3_spread_ratio`.

`select_us_N`: processor time of one `choose`, its reservation included, for a prompt of 12,000 tokens in blocks of 16
(150 of 750 blocks new), over N replicas that hold a quarter of the prefixes each; the best of some medians, because
others disturb the machine. The last line is JSON.
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

from foreword.cache import BlockStored
from foreword.cluster import EventBatch, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.replay.cluster import ClusterOptions, ClusterReport, ClusterSimulation
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.rivals import COST, RULES
from foreword.replay.trace import RecordedRequest, TraceReader
from replay import conversations

TICK_MS = 3000
NUM_BLOCKS, NUM_FAMILIES, NUM_SHARED = 750, 20, 600


def made_up(num_requests: int, seed: int) -> list[RecordedRequest]:
    """An hour of conversations, compressed to the rate of the recording."""
    return [
        RecordedRequest(
            record["timestamp"] * num_requests / 12_031,
            chain(as_content_ids(record["hash_ids"])),
            record["input_length"],
            record["output_length"],
            512,
        )
        for record in conversations(num_requests, seed)
    ]


def spread(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """The same requests, those of one tick evenly over the time to the next one."""
    found = []
    for _, group in groupby(requests, key=lambda request: round((request.timestamp_ms or 0) / TICK_MS)):
        of_tick = list(group)
        for number, request in enumerate(of_tick):
            found.append(
                request._replace(timestamp_ms=(of_tick[0].timestamp_ms or 0) + TICK_MS * number / len(of_tick))
            )
    return found


def serve(requests: list[RecordedRequest], what: str, tokens_per_s: float = 6000.0, **changes: Any) -> ClusterReport:
    options = ClusterOptions(num_blocks=3750, tokens_per_s=(tokens_per_s,), num_replicas=8, **changes)
    report = ClusterSimulation(options).serve(requests)
    print(
        f"{what:34} hits {report.hit_ratio:.4f}  mean {report.mean_ttft_s:9.2f} s  p99 {report.ttft_s['p99']:9.2f} s  "
        f"work max/mean {report.work_max_over_mean:.2f}",
        flush=True,
    )
    return report


def _key(*what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def filled_core(num_replicas: int, families: list[list[bytes]]) -> RoutingCore:
    """A router whose replicas hold a quarter of the families, each to another depth."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="routing over replicas")
    parser.add_argument("--trace", type=Path, help="a recording in Mooncake's format")
    parser.add_argument("--requests", type=int, default=12_000, help="of made-up traffic, an hour's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", default=",".join(RULES), help="rules to compare (default: all)")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    requests = list(TraceReader(args.trace)) if args.trace else made_up(args.requests, args.seed)
    if args.quick:
        requests = requests[:300]
    selects = {f"select_us_{number}": select_us(number, 3 if args.quick else 100) for number in (8, 64, 1000)}
    print("  ".join(f"{name} {value}" for name, value in selects.items()), flush=True)
    rivals = [rule for rule in args.rules.split(",") if rule != COST]
    ours, overload = serve(requests, COST), serve(requests, f"{COST}, overload", 4500.0)
    stale = serve(requests, f"{COST}, events 30 s late", event_delay_s=30.0)
    in_turn = serve(requests, f"{COST}, 3 routers", num_routers=3)
    blind = serve(requests, f"{COST}, 3 routers, no turns", num_routers=3, turn_s=0.0)
    even = spread(requests)
    alone = serve(even, f"{COST}, arrivals spread")
    three = serve(even, f"{COST}, 3 routers, arrivals spread", num_routers=3)
    others = {
        rule: (serve(requests, rule, routing=rule), serve(requests, f"{rule}, overload", 4500.0, routing=rule))
        for rule in rivals
    }
    figures = {
        "mean_ttft_s": round(ours.mean_ttft_s, 3),
        "hit_ratio": round(ours.hit_ratio, 4),
        "overload_ttft_s": round(overload.mean_ttft_s, 3),
        "routers3_ratio": round(in_turn.mean_ttft_s / ours.mean_ttft_s, 3),
        "routers3_blind_ratio": round(blind.mean_ttft_s / ours.mean_ttft_s, 3),
        "routers3_spread_ratio": round(three.mean_ttft_s / alone.mean_ttft_s, 3),
        "stale30_ratio": round(stale.mean_ttft_s / ours.mean_ttft_s, 3),
        **selects,
        "rivals": {
            rule: {
                "mean_ttft_s": round(plain.mean_ttft_s, 3),
                "hit_ratio": round(plain.hit_ratio, 4),
                "overload_ttft_s": round(slow.mean_ttft_s, 3),
            }
            for rule, (plain, slow) in others.items()
        },
    }
    print(json.dumps({"benchmark": "cluster", "requests": len(requests), **figures}))


if __name__ == "__main__":
    main()

"""How many more blocks `value` finds than `lru`, and its worst loss, on tuned and on held-out traffic.

    python benchmarks/eviction.py [--traces FOLDER] [--blocks 300000] [--only NAME] [--others] [--json FILE]

Each trace is replayed on the real manager at three pools: where LRU finds 30%, 70% and 95% of what unlimited memory
finds, but no smaller than the longest prompt. `gain` is the share of all blocks that `value` finds, less that of `lru`.
With --others the policies that only a replay has are replayed, too. The last line is JSON.

The first table compares `lru`, which evicts empty blocks first, with an `lru` that ranks all blocks by the time of
freeing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eviction_traffic import HELD_OUT, TUNED_ON, make_requests
from foreword.cache import EvictionPolicy, FreeKVCacheBlockQueue, KVCacheManager, RadixIndex, TokenSequence
from foreword.cache.block_ids import BlockIds
from foreword.replay.caches import LruCache, ManagerCache
from foreword.replay.policies import POLICIES
from foreword.replay.simulator import OnePass, Optimum
from foreword.replay.trace import RecordedRequest, TraceReader

OTHERS = tuple(name for name in POLICIES if name not in ("lru", "value", "priority"))
POOLS = {"small": 0.3, "middle": 0.7, "large": 0.95}
RECORDED = ("conversation", "synthetic")
BLOCK_TOKENS = {  # one size for each kind, so that every size occurs in held-out traffic
    "coding agents": 64,
    "chat": 16,
    "documents": 64,
    "recency": 64,
    "phases": 512,
    "forking agents": 16,
    "patient agents": 64,
    "slow chat": 64,
    "drifting documents": 512,
    "polluted chat": 16,
    "loops": 64,
    "busy day": 64,
}
SHORT = "short prompts"
HELD_OUT_SEED, TUNED_SEED = 1, 0


Row = dict[str, object]


def pools(requests: list[RecordedRequest]) -> tuple[dict[str, int], float]:
    """Capacities by the pool's name, and the share of blocks that unlimited memory finds."""
    one_pass = OnePass()
    for request in requests:
        one_pass.admit(request)
    one_pass.flush()
    capacities = np.unique(np.rint(np.geomspace(16, one_pass.curve.num_blocks, 200)).astype(np.int64))
    ratios = one_pass.curve.hit_ratios(capacities)
    longest = max(len(request.keys) for request in requests)
    found = {name: int(capacities[np.argmax(ratios >= share * ratios[-1])]) for name, share in POOLS.items()}
    return {name: max(longest, capacity) for name, capacity in found.items()}, float(ratios[-1])


def replay(requests: list[RecordedRequest], cache: LruCache | ManagerCache) -> tuple[int, float]:
    """Blocks found, and seconds of CPU."""
    began = time.process_time()
    return sum(cache.admit(request) for request in requests), time.process_time() - began


def measure(
    name: str, requests: list[RecordedRequest], capacities: dict[str, int], use: str, others: Sequence[str]
) -> list[Row]:
    """Figures of one trace, a row for each pool."""
    num_blocks = sum(len(request.keys) for request in requests)
    optimum = Optimum([request.keys for request in requests])
    rows = []
    for pool, capacity in capacities.items():
        found, seconds = replay(requests, ManagerCache(capacity, "value"))
        lru, _ = replay(requests, LruCache(capacity))
        rest = {other: replay(requests, ManagerCache(capacity, other))[0] for other in others}
        best = int(optimum.hits(capacity).sum())
        rows.append(
            {
                "trace": name,
                "use": use,
                "block_tokens": requests[0].block_tokens,
                "pool": pool,
                "capacity": capacity,
                "uses_per_block": round(num_blocks / capacity, 1),
                "lru": round(lru / num_blocks, 5),
                "value": round(found / num_blocks, 5),
                "optimum": round(best / num_blocks, 5),
                "gain": round((found - lru) / num_blocks, 5),
                "gap_closed": round((found - lru) / max(1, best - lru), 4),
                "us_per_block": round(1e6 * seconds / num_blocks, 1),
                **{other: round(hits / num_blocks, 5) for other, hits in rest.items()},
            }
        )
        row = rows[-1]
        print(
            f"{name:19s} {use:9s} {row['block_tokens']:4} {pool:6s} {capacity:7,} {row['uses_per_block']:7} "
            f"{row['lru']:.4f} {row['value']:.4f} {row['optimum']:.4f} {row['gain']:+.5f} {row['gap_closed']:+.1%} "
            f"{row['us_per_block']:5} {' '.join(f'{other} {row[other]:.4f}' for other in others)}",
            flush=True,
        )
    return rows


# -------------------------------------------------------------------------------- blocks that hold nothing


class FreedOrder(FreeKVCacheBlockQueue):
    """An LRU that ranks blocks by the time of freeing alone, also blocks that hold nothing."""

    num_empty = 0
    """Always 0: this policy does not know which blocks hold nothing."""

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        pass

    def note_hit(self, block_ids: BlockIds) -> None:
        pass

    def note_forgotten(self, block_ids: BlockIds) -> None:
        pass


def short_prompts(policy: str | EvictionPolicy, index: str, num_requests: int = 6000, num_blocks: int = 500) -> float:
    """Share of the tokens found of short prompts under 400 templates, in blocks of 16."""
    rng = np.random.default_rng(0)
    templates = [rng.integers(0, 30_000, rng.integers(16, 49)) for _ in range(400)]
    weights = 1 / np.arange(1, 401) ** 0.9
    radix = RadixIndex(num_blocks, 16) if index == "radix" else None
    manager = KVCacheManager(num_blocks, block_size=16, eviction_policy=policy, index=radix)
    num_found = num_tokens = 0
    for number, chosen in enumerate(rng.choice(400, num_requests, p=weights / weights.sum())):
        prompt = np.concatenate((templates[chosen], rng.integers(0, 30_000, rng.integers(1, 9))))
        sequence = TokenSequence(str(number), prompt.astype(np.int32), block_size=16)
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, len(sequence), hit) is not None
        manager.take_copies()
        num_found, num_tokens = num_found + hit.num_tokens, num_tokens + len(sequence)
        for token in range(int(rng.integers(1, 12))):
            sequence.append((7 * number + token) % 30_000)
            manager.allocate_slots(sequence, len(sequence))
        manager.free(sequence.request_id)
    return num_found / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with Mooncake's conversation and synthetic traces")
    parser.add_argument("--blocks", type=int, default=300_000, help="blocks of each generated trace (default: 300,000)")
    parser.add_argument("--only", action="append", help="name of a trace to run, once or more")
    parser.add_argument("--others", action="store_true", help="also replay the policies that only a replay has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    args = parser.parse_args()

    short = {}
    if not args.only or SHORT in args.only:
        for index in ("hash", "radix"):
            for name in ("in order of freeing", "lru", "value"):
                policy = FreedOrder(500) if name == "in order of freeing" else name
                short[f"{index}, {name}"] = round(short_prompts(policy, index), 4)
        print("tokens found of short prompts:", short, flush=True)
    print(f"{'trace':19s} {'use':9s} size pool   capacity    uses    lru  value   best     gain   gap us/block")
    rows: list[Row] = []
    for name in (*RECORDED, *TUNED_ON, *HELD_OUT):
        if args.only and name not in args.only:
            continue
        if name in RECORDED:
            if args.traces is None:
                continue
            requests, use = list(TraceReader(args.traces / f"mooncake_{name}_trace.jsonl")), "recorded"
            capacities = {"small": 1_000, "middle": 10_000, "large": 50_000}
        else:
            use = "tuned on" if name in TUNED_ON else "held out"
            seed = TUNED_SEED if name in TUNED_ON else HELD_OUT_SEED
            requests = make_requests(name, seed, BLOCK_TOKENS[name], args.blocks)
            capacities, _ = pools(requests)
        rows += measure(name, requests, capacities, use, OTHERS if args.others else ())
    if not rows:
        return
    worst = min(rows, key=lambda row: float(str(row["gain"])))
    recorded = [float(str(row["gap_closed"])) for row in rows if row["use"] == "recorded" and row["pool"] != "large"]
    report = {
        "benchmark": "eviction",
        "machine": platform.processor() or platform.machine(),
        "short_prompts": short,
        "mean_gain": round(float(np.mean([float(str(row["gain"])) for row in rows])), 5),
        "worst_gain": worst["gain"],
        "worst_gain_of": f"{worst['trace']}, {worst['pool']}",
        "recorded_gap_closed_at_1000_and_10000": round(float(np.mean(recorded)), 4) if recorded else None,
        "rows": rows,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

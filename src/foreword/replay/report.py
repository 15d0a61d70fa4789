"""A replay's results as tables, a few sentences of advice, and a JSON value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreword.cache.account.ledger import MissReason
from foreword.config import EvictionName
from foreword.replay.simulator import ReplayResult

LITTLE_REUSE = 0.3
"""If a smaller share of the blocks was seen before, the advice is to look at the prompts themselves."""
NOTABLE = 0.005
"""Smallest difference, as a share of the blocks, that the advice mentions."""


def knee(result: ReplayResult) -> int:
    """The capacity in blocks at which the LRU curve, over the logarithm of capacity, bends most.

    There the curve lies farthest above the line between its ends (Satopaa et al., "Kneedle", 2011).
    """
    x = np.log(np.array(result.curve_capacities, np.float64))
    y = np.array(result.curve_ratios)
    if x[-1] == x[0] or y[-1] == y[0]:
        return result.curve_capacities[0]
    above = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
    # A convex curve bends at its end: each doubling of memory gains more than the doubling before.
    return result.curve_capacities[len(above) - 1 - int(np.argmax(above[::-1]))]


def capacity_for(result: ReplayResult, share: float) -> int:
    """The least capacity of the curve, in blocks, at which LRU has this share of unlimited memory's hits."""
    limit = share * result.curve_ratios[-1]
    curve = zip(result.curve_capacities, result.curve_ratios, strict=True)
    return next(capacity for capacity, ratio in curve if ratio >= limit - 1e-12)


def advice(result: ReplayResult, kv_bytes_per_token: int | None = None) -> str:
    """Advice for an operator, in plain words."""
    limit = result.block_ratio(result.unlimited)
    if limit < 0.01:
        return "Hardly any prompt begins like an earlier one: no cache of prefixes, however large, will help here."
    sentences = [
        f"{limit:.1%} of the prompts' blocks had been there before; no cache finds more.",
        *_on_memory(result, kv_bytes_per_token),
        *_on_policies(result),
    ]
    if limit < LITTLE_REUSE:
        sentences.append(
            "Most blocks were never seen before: if prompts begin with dates, ids or names, put these last."
        )
    return " ".join(sentences)


def _on_memory(result: ReplayResult, kv_bytes_per_token: int | None) -> list[str]:
    enough, bend = capacity_for(result, 0.9), knee(result)
    text = f"LRU finds nine tenths of that with {_size(enough, result, kv_bytes_per_token)}"
    if bend < enough:
        at_bend = float(np.interp(bend, result.curve_capacities, result.curve_ratios))
        return [
            f"{text}; memory pays best up to {_size(bend, result, kv_bytes_per_token)}, where it finds {at_bend:.1%}."
        ]
    return [f"{text}; up to there, memory pays well."]


def _on_policies(result: ReplayResult) -> list[str]:
    """Advice on the policy that beats LRU most, and on what more memory than the given capacities would find."""
    online = {policy: hits for policy, hits in result.hits.items() if policy in get_args(EvictionName)}
    if not online or not result.capacities:
        return []
    sentences = []
    gains = [
        (result.block_ratio(count) - result.block_ratio(online["lru"][name]), policy, name)
        for policy, by_capacity in online.items()
        if "lru" in online and policy != "lru"
        for name, count in by_capacity.items()
    ]
    if gains and max(gains)[0] >= NOTABLE:
        _, policy, name = max(gains)
        ratio, lru = (result.block_ratio(online[each][name]) for each in (policy, "lru"))
        sentences.append(
            f"With {capacity_name(name)}, choose {policy}: it finds {ratio:.1%} of the blocks, LRU {lru:.1%}."
        )
    limit = result.block_ratio(result.unlimited)
    in_order = sorted(result.capacities, key=lambda capacity: capacity.num_blocks)
    best = [max(result.block_ratio(hits[capacity.name]) for hits in online.values()) for capacity in in_order]
    enough = [capacity.name for capacity, ratio in zip(in_order, best, strict=True) if limit - ratio < NOTABLE]
    largest = capacity_name(in_order[-1].name)
    if enough:
        sentences.append(f"Beyond {capacity_name(enough[0])}, memory finds hardly anything more.")
    else:
        sentences.append(
            f"With {largest}, {limit - best[-1]:.1%} of the blocks are still evicted before they are wanted again."
        )
    return sentences


def capacity_name(name: str) -> str:
    """A capacity as a user wrote it, with its unit."""
    return f"{int(name):,} blocks" if name.replace("_", "").isdigit() else name


def gigabytes(num_bytes: float) -> str:
    """Bytes in GB with at least three digits: 0.0671, 6.71, 67.1, 6,711."""
    size = num_bytes / 1e9
    return f"{size:,.0f}" if size >= 1000 else f"{size:.3g}"


def _size(num_blocks: int, result: ReplayResult, kv_bytes_per_token: int | None) -> str:
    blocks = f"{num_blocks:,} blocks" if num_blocks > 1 else "1 block"
    if kv_bytes_per_token is None:
        return blocks
    return f"{blocks} ({gigabytes(num_blocks * result.block_tokens * kv_bytes_per_token)} GB)"


def as_json(result: ReplayResult, kv_bytes_per_token: int | None = None) -> dict[str, Any]:
    """The result as JSON values; scripts should read `hit_ratio`."""
    return {
        "hit_ratio": result.hit_ratios(),
        "hit_ratio_tokens": result.of_each(lambda count: round(result.token_ratio(count), 6)),
        "infinite": {
            "blocks": round(result.block_ratio(result.unlimited), 6),
            "tokens": round(result.token_ratio(result.unlimited), 6),
        },
        "misses": result.of_each(result.misses),
        "evicted_per_1000_requests": _rounded(result.churn()),
        "memory_saved": _rounded(result.memory_saved()),
        "capacity_blocks": {capacity.name: capacity.num_blocks for capacity in result.capacities},
        "lru_curve": {
            "capacity_blocks": result.curve_capacities,
            "hit_ratio": [round(ratio, 6) for ratio in result.curve_ratios],
            "standard_error": [round(error, 6) for error in result.curve_errors],
        },
        "reuse_intervals": {
            "unit": result.reuse_intervals.unit,
            "from": {str(2.0**k if k >= 0 else 0): n for k, n in sorted(result.reuse_intervals.counts.items())},
        },
        "knee_blocks": knee(result),
        "kv_bytes_per_token": kv_bytes_per_token,
        "requests": result.num_requests,
        "blocks": result.num_blocks,
        "tokens": result.num_tokens,
        "different_blocks": result.num_different_blocks,
        "block_tokens": result.block_tokens,
        "sampling_rate": result.sampling_rate,
        "advice": advice(result, kv_bytes_per_token),
    }


def print_report(result: ReplayResult, console: Console, title: str, kv_bytes_per_token: int | None = None) -> None:
    """Print tables of hit ratios, misses and reuse intervals, and the advice."""
    headline = f"{result.num_requests:,} requests, {result.num_blocks:,} blocks of {result.block_tokens} tokens"
    console.print(f"{title}: {headline}, {result.num_different_blocks:,} of them different", markup=False)
    console.print("\nShare of the prompts' blocks found", style="bold")
    console.print(_ratios(result, kv_bytes_per_token))
    if result.sampling_rate < 1.0:
        error = max(result.curve_errors)
        console.print(f"Estimated from {result.sampling_rate:.2%} of the blocks; standard error at most {error:.4f}.")
    else:
        never_seen = result.num_blocks - result.unlimited.blocks
        console.print("\nBlocks missed because they had been evicted", style="bold")
        evicted = result.of_each(lambda count: result.misses(count)[MissReason.EVICTED.value])
        console.print(_by_capacity(result, evicted, ","))
        console.print("\nBlocks evicted per 1,000 requests", style="bold")
        console.print(_by_capacity(result, result.churn(), ",.0f"))
        if saved := result.memory_saved():
            console.print("\nMemory saved where LRU would find as much", style="bold")
            console.print(_by_capacity(result, saved, ".0%"))
        share = never_seen / max(1, result.num_blocks)
        console.print(f"Never seen before, and missed by any cache: {never_seen:,} blocks ({share:.1%}).")
        for name, num_blocks in _refused(result).items():
            console.print(f"In prompts that do not fit into {capacity_name(name)} at all: {num_blocks:,} blocks.")
        console.print(f"\nTime from one use of a block to the next ({result.reuse_intervals.unit})", style="bold")
        console.print(_intervals(result))
    console.print()
    console.print(advice(result, kv_bytes_per_token), style="bold", highlight=False)


def table_of(*headings: str) -> Table:
    """An empty table with these columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _ratios(result: ReplayResult, kv_bytes_per_token: int | None) -> Table:
    sizes = ["GB"] if kv_bytes_per_token is not None else []
    table = table_of("capacity", *sizes, *result.hits)
    for capacity in result.capacities:
        row = [capacity.name]
        if kv_bytes_per_token is not None:
            row.append(gigabytes(capacity.num_blocks * result.block_tokens * kv_bytes_per_token))
        row += [f"{result.block_ratio(by_capacity[capacity.name]):.4f}" for by_capacity in result.hits.values()]
        table.add_row(*row)
    limit = f"{result.block_ratio(result.unlimited):.4f}"
    table.add_row("unlimited", *("" for _ in sizes), *([limit] * len(result.hits)))
    return table


def _by_capacity(result: ReplayResult, figures: Mapping[str, Mapping[str, float]], form: str) -> Table:
    table = table_of("capacity", *figures)
    for size in result.capacities:
        table.add_row(size.name, *(format(by_capacity[size.name], form) for by_capacity in figures.values()))
    return table


def _rounded(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {policy: {name: round(figure, 4) for name, figure in sizes.items()} for policy, sizes in figures.items()}


def _refused(result: ReplayResult) -> dict[str, int]:
    """The number of blocks in prompts that are longer than the whole cache, by capacity."""
    largest = {
        capacity.name: max(by_capacity[capacity.name].refused_blocks for by_capacity in result.hits.values())
        for capacity in result.capacities
    }
    return {name: num_blocks for name, num_blocks in largest.items() if num_blocks}


def _intervals(result: ReplayResult) -> Table:
    table = table_of("", "share")
    table.add_column("")
    for name, share in interval_shares(result):
        table.add_row(name, f"{share:.1%}", "█" * round(40 * share))
    return table


def interval_shares(result: ReplayResult) -> list[tuple[str, float]]:
    """Rows of the histogram of reuse intervals: a name such as "4 to 8" (units), and the share of all reuses."""
    counts = result.reuse_intervals.counts
    total = sum(counts.values()) or 1
    return [
        (f"{2**doubling:,} to {2 ** (doubling + 1):,}" if doubling >= 0 else "below 1", counts.get(doubling, 0) / total)
        for doubling in range(min(counts, default=0), max(counts, default=-1) + 1)
    ]

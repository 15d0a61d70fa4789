"""What a replay found, as a table, a sentence of advice and a JSON value.

Knows results; knows nothing of how they came about.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from foreword.replay.simulator import ReplayResult

SHARES = (0.5, 0.9, 0.99)
"""Shares of what unlimited memory finds, for which the capacity is told."""


def knee(result: ReplayResult) -> int:
    """The capacity in blocks at which the LRU curve, over the logarithm of capacity, bends most.

    That is where it lies farthest above the line between its ends (Satopaa et al., "Kneedle", 2011).
    """
    x = np.log(np.array(result.curve_capacities, np.float64))
    y = np.array(result.curve_ratios)
    if x[-1] == x[0] or y[-1] == y[0]:
        return result.curve_capacities[0]
    above = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
    # A curve that is hollow throughout bends at its end: more memory always pays more than before.
    return result.curve_capacities[len(above) - 1 - int(np.argmax(above[::-1]))]


def capacity_for(result: ReplayResult, share: float) -> int:
    """The least capacity of the curve, in blocks, at which LRU finds this share of what unlimited memory would."""
    limit = share * result.curve_ratios[-1]
    reached = [
        capacity
        for capacity, ratio in zip(result.curve_capacities, result.curve_ratios, strict=True)
        if ratio >= limit - 1e-12
    ]
    return reached[0]


def advice(result: ReplayResult, kv_bytes_per_token: int | None = None) -> str:
    """What an operator might do about it, in plain words."""
    limit = result.block_ratio(result.unlimited)
    if limit < 0.01:
        return "Hardly any prompt begins like an earlier one: no cache of prefixes, however large, will help here."
    bend = knee(result)
    at_bend = float(np.interp(bend, result.curve_capacities, result.curve_ratios))
    enough = capacity_for(result, 0.9)
    text = (
        f"Unlimited memory would find {limit:.1%} of the blocks. LRU finds nine tenths of that with "
        f"{_size(enough, result, kv_bytes_per_token)}; its curve bends at "
        f"{_size(bend, result, kv_bytes_per_token)} ({at_bend:.1%})."
    )
    gains = [
        (result.block_ratio(count) - result.block_ratio(result.hits["lru"][name]), policy, name)
        for policy, by_capacity in result.hits.items()
        if "lru" in result.hits and policy not in ("lru", "optimum")
        for name, count in by_capacity.items()
    ]
    if gains and max(gains)[0] >= 0.005:
        gain, policy, name = max(gains)
        text += f" At a capacity of {name}, the policy {policy} finds {gain * 100:.1f} points more than LRU."
    return text


def _size(num_blocks: int, result: ReplayResult, kv_bytes_per_token: int | None) -> str:
    blocks = f"{num_blocks:,} blocks of {result.block_tokens} tokens"
    if kv_bytes_per_token is None:
        return blocks
    return f"{blocks} ({num_blocks * result.block_tokens * kv_bytes_per_token / 1e9:,.1f} GB)"


def as_json(result: ReplayResult, kv_bytes_per_token: int | None = None) -> dict[str, Any]:
    """The result as JSON values; `hit_ratio` is what scripts are meant to read."""
    return {
        "hit_ratio": result.hit_ratios(),
        "hit_ratio_tokens": {
            policy: {name: round(result.token_ratio(count), 6) for name, count in by_capacity.items()}
            for policy, by_capacity in result.hits.items()
        },
        "infinite": {
            "blocks": round(result.block_ratio(result.unlimited), 6),
            "tokens": round(result.token_ratio(result.unlimited), 6),
        },
        "misses": {
            policy: {name: result.misses(count) for name, count in by_capacity.items()}
            for policy, by_capacity in result.hits.items()
        },
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
    """Tables of hit ratios, misses and reuse intervals, and the advice."""
    table = Table(title=f"{title}: share of prompt blocks found", title_justify="left")
    table.add_column("capacity", justify="right")
    if kv_bytes_per_token is not None:
        table.add_column("GB", justify="right")
    for policy in result.hits:
        table.add_column(policy, justify="right")
    for capacity in result.capacities:
        row = [capacity.name]
        if kv_bytes_per_token is not None:
            row.append(f"{capacity.num_blocks * result.block_tokens * kv_bytes_per_token / 1e9:,.2f}")
        row += [f"{result.block_ratio(by_capacity[capacity.name]):.4f}" for by_capacity in result.hits.values()]
        table.add_row(*row)
    limit = f"{result.block_ratio(result.unlimited):.4f}"
    table.add_row("unlimited", *([""] * (kv_bytes_per_token is not None)), *([limit] * len(result.hits)))
    console.print(table)
    if result.sampling_rate < 1.0:
        error = max(result.curve_errors)
        console.print(f"Estimated from {result.sampling_rate:.2%} of the blocks; standard error at most {error:.4f}.")
    else:
        console.print(_misses(result))
        console.print(_intervals(result))
    console.print(
        f"{result.num_requests:,} requests, {result.num_blocks:,} blocks of {result.block_tokens} tokens, "
        f"{result.num_different_blocks:,} of them different."
    )
    console.print(advice(result, kv_bytes_per_token), style="bold")


def _misses(result: ReplayResult) -> Table:
    table = Table(title="Missed blocks by reason", title_justify="left")
    table.add_column("policy")
    table.add_column("capacity", justify="right")
    for heading in ("never seen", "evicted", "of these, too long a prompt"):
        table.add_column(heading, justify="right")
    for policy, by_capacity in result.hits.items():
        for name, count in by_capacity.items():
            never_seen, evicted = result.misses(count).values()
            table.add_row(policy, name, f"{never_seen:,}", f"{evicted:,}", f"{count.refused_blocks:,}")
    return table


def _intervals(result: ReplayResult) -> Table:
    intervals = result.reuse_intervals
    table = Table(title=f"Time from one use of a block to the next ({intervals.unit})", title_justify="left")
    table.add_column("from", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = sum(intervals.counts.values()) or 1
    for doubling, count in sorted(intervals.counts.items()):
        share = count / total
        table.add_row(f"{2**doubling:,}" if doubling >= 0 else "0", f"{share:.1%}", "█" * round(40 * share))
    return table

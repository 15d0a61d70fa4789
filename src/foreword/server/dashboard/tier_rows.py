"""Draws what lies below the pool: a row for each tier, and what waits to be stored.

Knows the engine's report of its tiers.
"""

from __future__ import annotations

from html import escape

from foreword.engine import TierReport, TiersReport
from foreword.server.dashboard import drawings as draw


def tier_rows(report: TiersReport) -> str:
    """The whole card."""
    queue = f"{draw.count(report.num_waiting_stores)} sequences wait to be stored"
    note = f'<div class="note">{draw.size(report.bytes_today)} stored today; {queue}.</div>'
    return "".join(map(_row, report.tiers)) + note


def _row(tier: TierReport) -> str:
    stats, loads = tier.stats, tier.loads
    damaged = loads.blocks_by_outcome["corrupt"]
    facts = {
        "tier": tier.name,
        "blocks": draw.count(stats.num_blocks),
        "in use": f"{draw.size(stats.shared_bytes)} of {draw.size(stats.budget_bytes)}",
        "loads": draw.count(loads.num_loads),
        "loaded": draw.tokens(loads.num_tokens),
        "saved": ("-" if loads.saved_s < 0 else "") + draw.seconds(abs(loads.saved_s)),  # loads in vain cost time
        "computed instead": f"{draw.count(loads.num_declined)} declined, {draw.count(damaged)} blocks damaged",
        "state": "works" if stats.breaker == "closed" else f"left alone after failures ({stats.breaker})",
    }
    return (
        '<div class="model-facts">'
        + "".join(f"<div><span>{name}</span><b>{escape(value)}</b></div>" for name, value in facts.items())
        + "</div>"
    )

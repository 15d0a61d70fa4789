"""Cards of the page: the model, the cache's entries, what lies below the pool, and what became of drafted tokens."""

from __future__ import annotations

from html import escape

from foreword.cache import CacheEntry
from foreword.engine import Snapshot, TierReport, TiersReport
from foreword.request import DraftCounts
from foreword.server.dashboard import drawings as draw
from foreword.server.service import Service

MOST_ROWS = 20


def model_card(service: Service, num_blocks: int) -> str:
    """The card's facts, for a pool of `num_blocks` blocks."""
    llm = service.llm
    layout, block_size = llm.layout, llm.layout.block_size
    facts = {
        "model": service.model_name,
        "dtype": llm.dtype,
        "KV": layout.kv_format.name,
        "layers": ", ".join(f"{number} {kind}" for kind, number in layout.layers_by_kind().items()),
        "context": draw.tokens(service.max_model_len),
        "pool": f"{draw.size(num_blocks * llm.kv_block_bytes)}, {draw.tokens(layout.tokens_in(num_blocks))}",
        "blocks": f"{draw.count(num_blocks)} of {block_size} tokens",
        "eviction": llm.config.cache.eviction_policy,
        "index": llm.config.cache.prefix_index or "radix",
    }
    return "".join(f"<div><span>{name}</span><b>{escape(str(value))}</b></div>" for name, value in facts.items())


def entry_rows(look: Snapshot, *, with_tenants: bool) -> str:
    """The whole card: broken entries first, then those that keep most."""
    shown = sorted(look.entries, key=lambda entry: (entry.is_whole, -entry.num_kept_tokens))
    broken = sum(not entry.is_whole for entry in look.entries)
    note = f"{draw.count(len(shown))} entries, {draw.count(broken)} of them not whole."
    if len(shown) > MOST_ROWS:
        note += f" The first {MOST_ROWS} are shown; GET /v1/cache/entries has all."
    rows = "".join(_entry_row(entry, look.clock, with_tenants) for entry in shown[:MOST_ROWS])
    return f'{rows}<div class="note">{note}</div>'


def _entry_row(entry: CacheEntry, now: float, with_tenants: bool) -> str:
    state = "whole" if entry.is_whole else "not in memory" if not entry.num_kept_tokens else "broken"
    facts = {
        "kept": f"{entry.num_kept_tokens:,} of {draw.tokens(entry.num_tokens)}",
        "by": entry.source,
        "for": draw.seconds(max(0.0, entry.until - now)) + (" from its last use" if entry.refresh_s else ""),
        "state": state,
        **({"tenant": entry.owner or "-"} if with_tenants else {}),
    }
    return (
        '<div class="model-facts">'
        + "".join(f"<div><span>{name}</span><b>{escape(value)}</b></div>" for name, value in facts.items())
        + "</div>"
    )


def tier_rows(report: TiersReport) -> str:
    """The whole card."""
    queue = f"{draw.count(report.num_waiting_stores)} sequences wait to be stored"
    note = f'<div class="note">{draw.size(report.bytes_today)} stored today; {queue}.</div>'
    return "".join(map(_tier_row, report.tiers)) + note


def _tier_row(tier: TierReport) -> str:
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


def draft_rows(drafts: DraftCounts) -> str:
    """The whole card, the source with the most guesses first; empty if nothing was drafted."""
    drafted = {
        source: drafts.accepted.get(source, 0) + drafts.rejected.get(source, 0)
        for source in {**drafts.accepted, **drafts.rejected}
    }
    most = max(drafted.values(), default=1)
    return "".join(
        _draft_row(source, drafts.accepted.get(source, 0), number, most)
        for source, number in sorted(drafted.items(), key=lambda item: (-item[1], item[0]))
    )


def _draft_row(source: str, accepted: int, drafted: int, most: int) -> str:
    widths = {"found": 100 * accepted / most, "computed": 100 * (drafted - accepted) / most}
    return (
        f'<div class="reason"><div><span>{escape(source)}</span><b>{accepted / drafted:.0%}</b>'
        f"<small>{draw.count(accepted)} of {draw.tokens(drafted)}</small></div>"
        '<div class="bar"><div style="width:100%">'
        + "".join(f'<i class="{kind}" style="width:{width:.1f}%"></i>' for kind, width in widths.items())
        + "</div></div></div>"
    )

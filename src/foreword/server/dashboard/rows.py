"""Cards of the page: the model, the cache's entries, sessions, what lies below the pool, what became of drafts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape

from foreword.cache import CacheEntry
from foreword.engine import Snapshot, TierReport, TiersReport
from foreword.request import DraftCounts
from foreword.server.dashboard import drawings as draw
from foreword.server.records import SessionStats
from foreword.server.service import Service

MOST_ROWS, MOST_LETTERS = 20, 40
"""Of a card; of a session's id."""


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
    return _facts_row(facts)


def session_rows(service: Service) -> str:
    """The whole card: the sessions whose requests ended last; empty if no request named one."""
    shown = service.records.sessions(MOST_ROWS + 1)
    with_tenants = service.tenants.asks_for_keys
    rows = "".join(_session_row(*one, with_tenants) for one in shown[:MOST_ROWS])
    more = "" if len(shown) <= MOST_ROWS else f" The newest {MOST_ROWS} are shown; GET /v1/cache/sessions has more."
    return rows and f'{rows}<div class="note">Requests that have ended, since a session was last closed.{more}</div>'


def _session_row(tenant: str, session_id: str, stats: SessionStats, with_tenants: bool) -> str:
    facts = {
        "session": session_id if len(session_id) <= MOST_LETTERS else f"{session_id[:MOST_LETTERS]}…",
        "turns": draw.count(stats.requests),
        "found": f"{stats.hit_rate:.0%} of {draw.tokens(stats.queried_tokens)}",
        "answered": draw.tokens(stats.output_tokens),
        "last": f"{draw.seconds(max(0.0, time.time() - stats.last_time))} ago",
        **({"tenant": tenant} if with_tenants else {}),
    }
    return _facts_row(facts)


def _facts_row(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><span>{name}</span><b>{escape(value)}</b></div>" for name, value in facts.items())
    return f'<div class="model-facts">{items}</div>'


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
    return _facts_row(facts)


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

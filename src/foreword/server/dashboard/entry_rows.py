"""Draws the cache's entries: who asked to keep what, how much of it is kept, and for how long yet.

Knows a snapshot's entries.
"""

from __future__ import annotations

from html import escape

from foreword.cache import CacheEntry
from foreword.engine import Snapshot
from foreword.server.dashboard import drawings as draw

MOST_ROWS = 20


def entry_rows(look: Snapshot, *, with_tenants: bool) -> str:
    """The whole card: broken entries first, then those that keep most."""
    shown = sorted(look.entries, key=lambda entry: (entry.is_whole, -entry.num_kept_tokens))
    broken = sum(not entry.is_whole for entry in look.entries)
    note = f"{draw.count(len(shown))} entries, {draw.count(broken)} of them not whole."
    if len(shown) > MOST_ROWS:
        note += f" The first {MOST_ROWS} are shown; GET /v1/cache/entries has all."
    rows = "".join(_row(entry, look.clock, with_tenants) for entry in shown[:MOST_ROWS])
    return f'{rows}<div class="note">{note}</div>'


def _row(entry: CacheEntry, now: float, with_tenants: bool) -> str:
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

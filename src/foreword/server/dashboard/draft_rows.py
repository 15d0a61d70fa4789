"""Draws what became of drafted tokens: a bar for each source of guesses.

Knows the engine's counts of drafts.
"""

from __future__ import annotations

from html import escape

from foreword.request import DraftCounts
from foreword.server.dashboard import drawings as draw


def draft_rows(drafts: DraftCounts) -> str:
    """The whole card, the source with the most guesses first; empty if nothing was drafted."""
    drafted = {
        source: drafts.accepted.get(source, 0) + drafts.rejected.get(source, 0)
        for source in {**drafts.accepted, **drafts.rejected}
    }
    most = max(drafted.values(), default=1)
    return "".join(
        _row(source, drafts.accepted.get(source, 0), number, most)
        for source, number in sorted(drafted.items(), key=lambda item: (-item[1], item[0]))
    )


def _row(source: str, accepted: int, drafted: int, most: int) -> str:
    widths = {"found": 100 * accepted / most, "computed": 100 * (drafted - accepted) / most}
    return (
        f'<div class="reason"><div><span>{escape(source)}</span><b>{accepted / drafted:.0%}</b>'
        f"<small>{draw.count(accepted)} of {draw.tokens(drafted)}</small></div>"
        '<div class="bar"><div style="width:100%">'
        + "".join(f'<i class="{kind}" style="width:{width:.1f}%"></i>' for kind, width in widths.items())
        + "</div></div></div>"
    )

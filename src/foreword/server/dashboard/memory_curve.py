"""Draws the gain of more memory: the estimated curve, and the hits that ghosts count for twice the blocks.

Knows snapshots of the engine, as drawings.py knows records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from foreword.engine import Snapshot
from foreword.replay.curve import CurvePoint
from foreword.server.dashboard import drawings as draw


def memory_curve(look: Snapshot, curve: Sequence[CurvePoint], block_bytes: int, seconds_per_token: float) -> str:
    """The whole card, for blocks of `block_bytes`; a hit saves `seconds_per_token` of prefill for each token."""
    if not curve and not look.stats.requests:
        return '<div class="empty">No curve yet: it is drawn from requests that have ended.</div>'
    return drawn_curve(curve, lambda num_blocks: draw.size(num_blocks * block_bytes)) + _of_ghosts(
        look, block_bytes, seconds_per_token
    )


def drawn_curve(points: Sequence[CurvePoint], size: Callable[[int], str]) -> str:
    """Hit rates over sizes of the pool, the first of them its own; `size` puts a number of blocks into words."""
    if not points:
        return ""
    width = 100 / len(points)
    middles = [width * (at + 0.5) for at in range(len(points))]
    heights = [100 - 100 * point.hit_rate for point in points]
    errors = [100 * point.standard_error for point in points]
    band = [f"{x:.2f} {max(0.0, y - 2 * e):.2f}" for x, y, e in zip(middles, heights, errors, strict=True)]
    band += [
        f"{x:.2f} {min(100.0, y + 2 * e):.2f}" for x, y, e in reversed([*zip(middles, heights, errors, strict=True)])
    ]
    line = [f"{x:.2f} {y:.2f}" for x, y in zip(middles, heights, strict=True)]
    shapes = f'<path class="level" d="M{line[0]}H100"/>'  # the part above it is the gain
    shapes += f'<path class="band" d="M{"L".join(band)}Z"/><path class="line" d="M{"L".join(line)}"/>'
    shapes += "".join(f'<path class="dot stroke-found" d="M{at}h0"/>' for at in line)
    sizes = "".join(_size(point, points[0], size) for point in points)
    columns = f"grid-template-columns:repeat({len(points)},minmax(0,1fr))"
    below = f'<div class="sizes" style="{columns}">{sizes}</div>'
    return draw.chart(shapes, ["100%", "50%", "0%"], "estimated hit rate over memory", below)


def _size(point: CurvePoint, own: CurvePoint, size: Callable[[int], str]) -> str:
    factor = point.num_blocks / own.num_blocks
    name = "now" if point is own else f"\u00d7{factor:.3g}"
    error = f"<small>\u00b1{100 * point.standard_error:.1f}</small>" if point.standard_error else ""
    return (
        f"<div><b>{name}</b><span>{escape(size(point.num_blocks))}</span>"
        f'<span class="found">{100 * point.hit_rate:.0f}%</span>{error}</div>'
    )


def _of_ghosts(look: Snapshot, block_bytes: int, seconds_per_token: float) -> str:
    """The tokens that were computed again although twice the blocks would have held them: counted, not estimated."""
    stats = look.stats
    note = "Estimated for the lru policy and whole blocks, from the requests since the last reset. "
    if not look.has_ledger:
        return f'<div class="note">{note}</div>'
    if not stats.ghost_hits:
        return f'<div class="note">{note}No token was computed again that twice the blocks would have held.</div>'
    saved = draw.seconds(stats.ghost_hits * seconds_per_token)
    return (
        f'<div class="note">{note}Counted: <b>+{draw.size(look.num_blocks * block_bytes)}</b>, twice the blocks, would '
        f"have kept {draw.count(stats.ghost_hits)} tokens from being computed again, about {saved} of prefill: "
        f"{stats.hit_rate:.0%} \u2192 {stats.hit_rate_with_twice_the_blocks:.0%}.</div>"
    )

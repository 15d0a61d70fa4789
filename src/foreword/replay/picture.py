"""The curves of a replay as SVG, and as an HTML page that needs nothing else.

Knows results and drawing; writes files only where it is told to.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

from foreword.errors import ConfigError
from foreword.replay.report import advice, as_json, knee
from foreword.replay.simulator import ReplayResult

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 64
COLOURS = ("#1f5fbf", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be123c")


def write_picture(result: ReplayResult, file: Path, title: str, kv_bytes_per_token: int | None = None) -> None:
    """Draw the hit ratio over capacity; the file's name chooses .svg or .html. Raises ConfigError."""
    check_format(file)
    draw = as_svg if file.suffix == ".svg" else as_html
    text = draw(result, title, kv_bytes_per_token)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"picture {str(file)!r} cannot be written: {error}; choose another place") from error


def check_format(file: Path) -> None:
    """Raise ConfigError unless the file's name chooses a format."""
    if file.suffix not in (".svg", ".html"):
        raise ConfigError(f"picture {str(file)!r} has an unknown format; use a name that ends in .svg or .html")


class _Plot:
    """Coordinates: capacity on a logarithmic axis, ratio from 0 to a round number above the limit."""

    def __init__(self, result: ReplayResult) -> None:
        self.low = math.log10(max(1, min(100, result.curve_capacities[-1] // 10)))
        most = max([result.curve_capacities[-1], *(capacity.num_blocks for capacity in result.capacities)])
        self.high = max(math.log10(most), self.low + 1)
        self.top = max(0.1, math.ceil(10 * max(result.curve_ratios[-1], 0.05) + 0.2) / 10)

    def x(self, capacity: float) -> float:
        share = (math.log10(max(1.0, capacity)) - self.low) / (self.high - self.low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, ratio: float) -> float:
        return round(HEIGHT - BOTTOM - ratio / self.top * (HEIGHT - TOP - BOTTOM), 1)


def as_svg(result: ReplayResult, title: str, kv_bytes_per_token: int | None = None) -> str:
    """The picture: LRU's curve, a line with points for each other policy, the limit and the knee."""
    plot = _Plot(result)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{html.escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{html.escape(title)}: share of prompt blocks found</text>',
        *_axes(plot, result, kv_bytes_per_token),
    ]
    limit = result.block_ratio(result.unlimited)
    parts.append(_line([(LEFT, plot.y(limit)), (WIDTH - RIGHT, plot.y(limit))], "#666666", dashes="6 4"))
    parts.append(_label(WIDTH - RIGHT + 6, plot.y(limit) - 6, f"unlimited {limit:.3f}", "#666666"))
    curve = [
        (plot.x(capacity), plot.y(ratio))
        for capacity, ratio in zip(result.curve_capacities, result.curve_ratios, strict=True)
        if math.log10(capacity) >= plot.low
    ]
    parts.append(_line(curve, COLOURS[0]))
    bend = plot.x(knee(result))
    parts.append(_line([(bend, HEIGHT - BOTTOM), (bend, TOP)], "#bbbbbb", dashes="2 3"))
    parts.append(_label(bend + 4, TOP + 10, "knee", "#888888"))
    for number, (policy, by_capacity) in enumerate(result.hits.items()):
        colour = COLOURS[number % len(COLOURS)] if policy != "lru" else COLOURS[0]
        points = sorted(
            (plot.x(capacity.num_blocks), plot.y(result.block_ratio(by_capacity[capacity.name])))
            for capacity in result.capacities
        )
        if policy != "lru":
            parts.append(_line(points, colour))
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in points]
        parts.append(_label(WIDTH - RIGHT + 6, TOP + 60 + 18 * number, f"● {policy}", colour))
    return "\n".join([*parts, "</svg>\n"])


def _axes(plot: _Plot, result: ReplayResult, kv_bytes_per_token: int | None) -> list[str]:
    parts = []
    for step in range(6):
        ratio = plot.top * step / 5
        parts.append(_line([(LEFT, plot.y(ratio)), (WIDTH - RIGHT, plot.y(ratio))], "#e5e5e5"))
        parts.append(_label(LEFT - 8, plot.y(ratio) + 4, f"{ratio:.2f}", "#333333", anchor="end"))
    for power in range(math.ceil(plot.low), math.floor(plot.high) + 1):
        x = plot.x(10**power)
        parts.append(_line([(x, TOP), (x, HEIGHT - BOTTOM)], "#e5e5e5"))
        parts.append(_label(x, HEIGHT - BOTTOM + 18, f"{10**power:,}", "#333333", anchor="middle"))
        if kv_bytes_per_token is not None:
            size = 10**power * result.block_tokens * kv_bytes_per_token / 1e9
            parts.append(_label(x, HEIGHT - BOTTOM + 34, f"{size:,.3g} GB", "#777777", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    unit = f"capacity in blocks of {result.block_tokens} tokens"
    parts.append(_label(middle, HEIGHT - 10, unit, "#333333", anchor="middle"))
    return parts


def _line(points: list[tuple[float, float]], colour: str, *, dashes: str = "") -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>'


def _label(x: float, y: float, text: str, colour: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{html.escape(text)}</text>'


def as_html(result: ReplayResult, title: str, kv_bytes_per_token: int | None = None) -> str:
    """A page with the picture, the table, the advice and the figures as JSON."""
    names = list(result.hits)
    rows = [
        "<tr><td>"
        + "</td><td>".join(
            [html.escape(capacity.name), f"{capacity.num_blocks:,}"]
            + [f"{result.block_ratio(result.hits[policy][capacity.name]):.4f}" for policy in names]
        )
        + "</td></tr>"
        for capacity in result.capacities
    ]
    figures = json.dumps(as_json(result, kv_bytes_per_token)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.2rem 0.8rem; text-align: right; }}
</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(advice(result, kv_bytes_per_token))}</p>
{as_svg(result, title, kv_bytes_per_token)}
<table><tr><th>capacity</th><th>blocks</th><th>{"</th><th>".join(map(html.escape, names))}</th></tr>
{chr(10).join(rows)}
</table>
<script type="application/json" id="figures">{figures}</script>
</html>
"""

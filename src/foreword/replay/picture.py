"""The curves of a replay as SVG or PNG, and as an HTML page that needs nothing else.

Writes only the files that a caller names. resvg, an optional dependency, turns the SVG into a PNG with the fonts of the
machine.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from foreword.errors import ConfigError
from foreword.replay.report import advice, as_json, gigabytes, interval_shares, knee
from foreword.replay.simulator import ReplayResult

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 64
COLOURS = ("#1f5fbf", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be123c")
FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', 'Noto Sans', sans-serif"
"""Fonts of several systems. resvg takes the first one that is installed, and finds no font for `sans-serif` alone."""
PNG_ZOOM = 2


def write_picture(result: ReplayResult, file: Path, title: str, kv_bytes_per_token: int | None = None) -> None:
    """Draw the hit ratio over capacity; the file's name chooses .svg, .png or .html. Raises ConfigError."""
    check_format(file)
    if file.suffix == ".html":
        content = as_html(result, title, kv_bytes_per_token).encode()
    else:
        svg = as_svg(result, f"{title}: share of the prompts' blocks found", kv_bytes_per_token)
        content = as_png(svg) if file.suffix == ".png" else svg.encode()
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"picture {str(file)!r} cannot be written: {error}; choose another place") from error


def check_format(file: Path) -> None:
    """Raise ConfigError if the format in the file's name cannot be written, or the file's folder does not exist."""
    if file.suffix not in (".svg", ".png", ".html"):
        raise ConfigError(f"picture {str(file)!r} has an unknown format; use a name that ends in .svg, .png or .html")
    if not file.parent.is_dir():
        raise ConfigError(f"picture {str(file)!r} cannot be written: there is no folder {str(file.parent)!r}; make it")
    if file.suffix == ".png":
        _svg_to_png()


def as_png(svg: str) -> bytes:
    """Convert an SVG to PNG, at twice its size. Raises ConfigError without resvg, or without any font."""
    svg_to_png = _svg_to_png()
    image = svg_to_png(svg_string=svg, zoom=PNG_ZOOM)
    if image == svg_to_png(svg_string=re.sub("<text.*?</text>", "", svg), zoom=PNG_ZOOM):
        raise ConfigError(
            f"a .png would have no letters: this machine has none of the fonts {FONTS}; install one "
            "(such as Debian's fonts-dejavu-core), or write .svg"
        )
    return image


def _svg_to_png() -> Callable[..., bytes]:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ConfigError(
            "a .png needs resvg-py, which is not installed; run `pip install foreword[picture]`, or write .svg or .html"
        ) from error
    return svg_to_bytes


class _Plot:
    """Coordinates: x is capacity on a logarithmic axis, y is a ratio from 0 to a round number above the limit."""

    def __init__(self, result: ReplayResult) -> None:
        self.low = math.log10(max(1, min(100, result.curve_capacities[-1] // 10)))
        largest = max([result.curve_capacities[-1], *(capacity.num_blocks for capacity in result.capacities)])
        self.high = max(math.log10(largest), self.low + 1)
        self.top = min(1.0, max(0.1, math.ceil(20 * max(result.curve_ratios[-1], 0.05) + 0.2) / 20))

    def x(self, capacity: float) -> float:
        share = (math.log10(max(1.0, capacity)) - self.low) / (self.high - self.low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, ratio: float) -> float:
        return round(HEIGHT - BOTTOM - ratio / self.top * (HEIGHT - TOP - BOTTOM), 1)


def as_svg(result: ReplayResult, title: str, kv_bytes_per_token: int | None = None) -> str:
    """Draw LRU's curve, points where other policies were measured, the limit and the knee."""
    plot = _Plot(result)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONTS}" '
        f'font-size="12" role="img"><title>{html.escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{html.escape(title)}</text>',
        *_axes(plot, result, kv_bytes_per_token),
    ]
    limit = result.block_ratio(result.unlimited)
    parts.append(_line([(LEFT, plot.y(limit)), (WIDTH - RIGHT, plot.y(limit))], "#666666", dashes="6 4"))
    parts.append(_label(WIDTH - RIGHT + 6, plot.y(limit) - 6, f"unlimited {limit:.1%}", "#666666"))
    curve = [
        (plot.x(capacity), plot.y(ratio))
        for capacity, ratio in zip(result.curve_capacities, result.curve_ratios, strict=True)
        if math.log10(capacity) >= plot.low
    ]
    parts.append(_line(curve, COLOURS[0]))
    bend = plot.x(knee(result))
    parts.append(_line([(bend, HEIGHT - BOTTOM), (bend, TOP)], "#bbbbbb", dashes="2 3"))
    parts.append(_label(bend + 4, TOP + 10, f"knee: {knee(result):,}", "#888888"))
    for number, (policy, by_capacity) in enumerate(result.hits.items()):
        colour = COLOURS[number % len(COLOURS)] if policy != "lru" else COLOURS[0]
        points = sorted(
            (plot.x(capacity.num_blocks), plot.y(result.block_ratio(by_capacity[capacity.name])))
            for capacity in result.capacities
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in points]
        x, y = WIDTH - RIGHT + 12, plot.y(limit) + 24 + 18 * number
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="3.5" fill="{colour}"/>')
        parts.append(_label(x + 10, y, policy, colour))
    return "\n".join([*parts, "</svg>\n"])


def _axes(plot: _Plot, result: ReplayResult, kv_bytes_per_token: int | None) -> list[str]:
    parts = []
    for step in range(6):
        ratio = plot.top * step / 5
        parts.append(_line([(LEFT, plot.y(ratio)), (WIDTH - RIGHT, plot.y(ratio))], "#e5e5e5"))
        parts.append(_label(LEFT - 8, plot.y(ratio) + 4, f"{ratio:.0%}", "#333333", anchor="end"))
    for power in range(math.ceil(plot.low), math.floor(plot.high) + 1):
        x = plot.x(10**power)
        parts.append(_line([(x, TOP), (x, HEIGHT - BOTTOM)], "#e5e5e5"))
        parts.append(_label(x, HEIGHT - BOTTOM + 18, f"{10**power:,}", "#333333", anchor="middle"))
        if kv_bytes_per_token is not None:
            size = gigabytes(10**power * result.block_tokens * kv_bytes_per_token)
            parts.append(_label(x, HEIGHT - BOTTOM + 34, f"{size} GB", "#777777", anchor="middle"))
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
    """A page with the advice, the picture, the tables and the figures as JSON."""
    ratios, evicted = [], []
    for capacity in result.capacities:
        counts = [by_capacity[capacity.name] for by_capacity in result.hits.values()]
        head = [html.escape(capacity.name), f"{capacity.num_blocks:,}"]
        if kv_bytes_per_token:
            head.append(gigabytes(capacity.num_blocks * result.block_tokens * kv_bytes_per_token))
        ratios.append([*head, *(f"{result.block_ratio(count):.2%}" for count in counts)])
        evicted.append([*head, *(f"{result.unlimited.blocks - count.blocks:,}" for count in counts)])
    limit = f"{result.block_ratio(result.unlimited):.2%}"
    all_blocks = [f"{result.num_different_blocks:,}"]
    if kv_bytes_per_token:
        all_blocks.append(gigabytes(result.num_different_blocks * result.block_tokens * kv_bytes_per_token))
    ratios.append(["unlimited", *all_blocks, *([limit] * len(result.hits))])
    headings = ["capacity", "blocks", *(["GB"] if kv_bytes_per_token else []), *result.hits]
    never_seen = result.num_blocks - result.unlimited.blocks
    unit = result.reuse_intervals.unit
    intervals = [
        [name, f"{share:.1%}", f'<i style="width: {24 * share:.2f}rem"></i>'] for name, share in interval_shares(result)
    ]
    figures = json.dumps(as_json(result, kv_bytes_per_token)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }} svg {{ max-width: 100%; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.2rem 0.8rem; text-align: right; }}
tr:nth-child(odd) td {{ background: #f4f4f4; }}
td:has(i) {{ text-align: left; }} i {{ display: inline-block; height: 0.7rem; background: {COLOURS[0]}; }}
</style>
<h1>{html.escape(title)}</h1>
<p>{result.num_requests:,} requests, {result.num_blocks:,} blocks of {result.block_tokens} tokens,
{result.num_different_blocks:,} of them different.</p>
<p><b>{html.escape(advice(result, kv_bytes_per_token))}</b></p>
{as_svg(result, "Share of the prompts' blocks found", kv_bytes_per_token)}
<h2>Share of the prompts' blocks found</h2>
{_table(headings, ratios)}
<h2>Blocks missed because they had been evicted</h2>
{_table(headings, evicted)}
<p>Never seen before, and missed by any cache: {never_seen:,} blocks ({never_seen / max(1, result.num_blocks):.1%}).</p>
<h2>Time from one use of a block to the next ({unit})</h2>
{_table([unit, "share", ""], intervals)}
<script type="application/json" id="figures">{figures}</script>
</html>
"""


def _table(headings: list[str], rows: list[list[str]]) -> str:
    """A table in HTML. Cells are not escaped here, so values from users must be escaped before."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}\n</table>"

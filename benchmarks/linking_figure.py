"""Draws the right answers that linking costs, over the share of tokens computed, with a curve for each method.

    python benchmarks/linking_figure.py benchmarks/results/linking.json docs/images/linking.svg [--size 512x4]

The file maps a model's name to the JSON line of `benchmarks/linking.py` for that model. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

CURVES = {"first": "first-K", "deviation": "deviation-R"}
"""A curve's method names begin with the key. Every curve begins with `none` and ends with `all`."""
COLUMNS = 4


def share_right(found: dict[str, Any]) -> float | None:
    """The share of right answers. Older results count exact matches instead: answers that are the right one alone."""
    share: float | None = found.get("right", found.get("exact_match"))
    return share


def panels(reports: dict[str, Any], size: str) -> dict[str, dict[str, Any]]:
    """The cells of a size by title, without those where `none` is as good as `all` or one was not measured."""
    found = {}
    for name, report in reports.items():
        for cell in report["cells"]:
            least, most = (share_right(cell["methods"].get(method, {})) for method in ("none", "all"))
            if cell["size"] == size and None not in (least, most) and least != most:
                found[f"{cell['task']} ({name})"] = cell["methods"]
    return found


def curve(methods: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The points of one curve, from the least computed to the most."""
    own = [found for name, found in methods.items() if name.startswith(kind) or name in ("none", "all")]
    return sorted(own, key=lambda found: found["computed_share"])


def draw(cells: dict[str, dict[str, Any]], file: Path) -> None:
    """Draws a panel for each cell. Bars are 95% intervals."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "foreword", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    columns = min(COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows), sharex=True, sharey=True)
    flat = [axes] if len(cells) == 1 else list(axes.flat)
    for axis, (title, methods) in zip(flat, cells.items(), strict=False):
        for (kind, name), color in zip(CURVES.items(), ("#119a72", "#dd8a2b"), strict=True):
            points = curve(methods, kind)
            if len(points) < 3:
                continue
            shares = [100 * found["computed_share"] for found in points]
            right = [share_right(found) for found in points]
            low, high = zip(*(found["interval"] for found in points), strict=True)
            below = [max(0.0, one - other) for one, other in zip(right, low, strict=True)]
            above = [max(0.0, other - one) for one, other in zip(right, high, strict=True)]
            axis.errorbar(shares, right, (below, above), color=color, label=name, marker="o", ms=3, lw=1, capsize=2)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(-3, 103)
        axis.grid(alpha=0.3)
    for axis in flat[len(cells) :]:
        axis.set_visible(False)
    for axis in flat[max(0, len(cells) - columns) : len(cells)]:  # the lowest of each column
        axis.tick_params(labelbottom=True)
    figure.supxlabel("tokens of the prompt that are computed, %")
    figure.supylabel("right, %")
    flat[0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a JSON file: model -> last line of benchmarks/linking.py")
    parser.add_argument("figure", type=Path, help="the SVG to write")
    parser.add_argument("--size", default="512x4", help="tokens x parts (default: 512x4)")
    args = parser.parse_args()
    try:
        cells = panels(json.loads(args.results.read_text()), args.size)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        parser.error(f"{args.results} is no file of such reports ({error!r}); see benchmarks/results/linking.json")
    if not cells:
        parser.error(f"{args.results} has no cells of {args.size} whose methods differ; choose another --size")
    draw(cells, args.figure)


if __name__ == "__main__":
    main()

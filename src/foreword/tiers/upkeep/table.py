"""Plain tables for the terminal, and the line that shows progress there."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from foreword.config.sizes import format_bytes

REDRAW_S = 0.2


def print_table(rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows in aligned columns, the first row as heads. `right`: `r` for each column to align at the right."""
    printable = [["".join(char if char.isprintable() else "?" for char in cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*printable, strict=True)]
    for row in printable:
        cells = [
            cell.rjust(width) if right[at : at + 1] == "r" else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def counted(count: int, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class ProgressLine:
    """One line on standard error that says what share is done; no line if standard error is no terminal."""

    def __init__(self, verb: str, total_bytes: int) -> None:
        self._verb, self._total_bytes, self._done_bytes = verb, total_bytes, 0
        self._began = self._drawn = time.monotonic()
        self._shows = sys.stderr.isatty()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._shows and now - self._drawn >= REDRAW_S:
            self._drawn = now
            rate = self._done_bytes / (now - self._began)
            share = min(1.0, self._done_bytes / max(1, self._total_bytes))
            text = f"{self._verb} {share:4.0%} of {format_bytes(self._total_bytes)}, {format_bytes(rate)}/s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

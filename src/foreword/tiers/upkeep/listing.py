"""`foreword cache list DIR`: shows whose blocks a cache directory holds, with a row for each namespace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from foreword.config.sizes import format_bytes
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.upkeep.stats import print_unreadable
from foreword.tiers.upkeep.survey import Tally, moment, survey, tallies
from foreword.tiers.upkeep.table import print_table

HEADS = "NAMESPACE MODEL ARITHMETIC SHARING BLOCKS TOKENS PAYLOADS PINNED OLDEST NEWEST".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache list`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory")
    parser.add_argument("--json", action="store_true", help="print one JSON line, with all that manifests say")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    cache = survey(RealFiles(), args.directory)
    listed = tallies(cache)
    if args.json:
        print(json.dumps({"namespaces": [{**tally.as_json(), "manifest": tally.facts or None} for tally in listed]}))
    elif listed:
        print_table([HEADS, *map(_row, listed)], right="    rrrr")
    else:
        print("the cache is empty")
    print_unreadable(cache)
    return 0


def _row(tally: Tally) -> list[str]:
    return [
        tally.namespace.hex()[:8],
        tally.model,
        tally.arithmetic,
        tally.kind,
        f"{tally.num_blocks:,}",
        "-" if tally.num_tokens is None else f"{tally.num_tokens:,}",
        format_bytes(tally.payload_bytes),
        f"{tally.num_pinned:,}",
        moment(tally.oldest_s),
        moment(tally.newest_s),
    ]

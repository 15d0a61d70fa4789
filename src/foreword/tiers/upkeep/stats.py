"""`foreword cache stats DIR`: shows what a cache directory holds, and which processes use it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from foreword.config.sizes import format_bytes
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.tier import GROUP_APART
from foreword.tiers.upkeep.survey import Survey, Tally, survey, tallies
from foreword.tiers.upkeep.table import counted, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache stats`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the statistics; returns the exit code."""
    cache = survey(RealFiles(), args.directory)
    listed = tallies(cache)
    if args.json:
        print(json.dumps(_as_json(cache, listed)))
    else:
        _print(cache, listed)
    print_unreadable(cache)
    return 0


def print_unreadable(cache: Survey) -> None:
    """Say on standard error which files were left out."""
    for path, reason in {**cache.manifests.unsound, **cache.unreadable}.items():
        print(f"foreword: {cache.name(path)}: {reason}", file=sys.stderr)


def _as_json(cache: Survey, listed: list[Tally]) -> dict[str, Any]:
    defaults = _default_options(cache)
    return {
        "directory": str(cache.path),
        "num_blocks": sum(tally.num_blocks for tally in listed),
        "num_segments": len(cache.segments),
        "payload_bytes": sum(tally.payload_bytes for tally in listed),
        "physical_bytes": cache.physical_bytes,
        "default_budget_bytes": defaults.budget_bytes,
        "default_min_free_bytes": defaults.min_free_bytes,
        "free_bytes": cache.space.free_bytes,
        "total_bytes": cache.space.total_bytes,
        "processes": [
            {"folder": home.path.name, "is_live": home.is_live, "process_id": home.process_id} for home in cache.homes
        ],
        "bytes_by_day": dict(sorted(_by_day(listed).items())),
        "namespaces": [tally.as_json() for tally in listed],
        "unreadable": {cache.name(path): reason for path, reason in cache.unreadable.items()},
    }


def _print(cache: Survey, listed: list[Tally]) -> None:
    defaults = _default_options(cache)
    live = [home.owner for home in cache.homes if home.is_live]
    num_blocks = sum(tally.num_blocks for tally in listed)
    rows = [
        ("directory", str(cache.path)),
        ("blocks", f"{counted(num_blocks, 'block')} in {counted(len(cache.segments), 'segment')}"),
        ("payloads", format_bytes(sum(tally.payload_bytes for tally in listed))),
        ("on disk", format_bytes(cache.physical_bytes)),
        ("budget", f"{format_bytes(defaults.budget_bytes or 0)} if a process starts now and names none"),
        (
            "free",
            f"{format_bytes(cache.space.free_bytes)} of {format_bytes(cache.space.total_bytes)}; "
            f"the cache leaves {format_bytes(defaults.min_free_bytes or 0)} free",
        ),
        ("in use by", ", ".join(live) or "no process"),
    ]
    print_table(rows)
    if not num_blocks:
        return
    print()
    heads = ("NAMESPACE", "MODEL", "GROUP", "BLOCKS", "PAYLOADS")
    groups = [
        (
            tally.namespace.hex()[:8],
            tally.model,
            "pictures" if group_id == GROUP_APART else str(group_id),
            f"{group.num_blocks:,}",
            format_bytes(group.payload_bytes),
        )
        for tally in listed
        for group_id, group in sorted(tally.groups.items())
    ]
    print_table([heads, *groups], right="  rrr")
    print()
    days = [(date, format_bytes(num_bytes)) for date, num_bytes in sorted(_by_day(listed).items())]
    print_table([("WRITTEN (UTC)", "PAYLOADS"), *days], right=" r")


def _default_options(cache: Survey) -> DiskOptions:
    """The default options of a process that starts now. The options of live processes are recorded nowhere."""
    return DiskOptions().completed(cache.space.total_bytes, cache.space.free_bytes, cache.physical_bytes)


def _by_day(listed: list[Tally]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tally in listed:
        total.update(tally.bytes_by_day)
    return total

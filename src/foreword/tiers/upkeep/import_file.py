"""`foreword cache import DIR FILE`: takes the blocks of a prefix file into a cache directory.

No model is loaded, because the file says to which model its blocks belong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.prefix_file import OF_THE_NAMESPACE, PrefixFile, UnsoundFileError, store_prefix_file
from foreword.tiers.upkeep.table import counted
from foreword.tiers.upkeep.verify import add_key_argument

NO_BUDGET_BYTES = 1 << 60
"""An import has no budget, so it evicts no segment. A process with a budget evicts when it opens the directory."""
FLUSH_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword cache import`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the cache's directory, made if it is missing")
    parser.add_argument("file", metavar="FILE", type=Path, help="file that `foreword cache export` has written")
    add_key_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Import the file and print the result; returns the exit code, 1 if the file is damaged or was not taken."""
    try:
        with PrefixFile(RealFiles(), args.file) as file:
            options = DiskOptions(budget_bytes=NO_BUDGET_BYTES, key_file=args.key_file)
            tier = DiskTier(args.directory, options)
            try:
                tier.wait_scanned()
                facts, namespace = file.facts, bytes.fromhex(file.facts["namespace"])
                report = store_prefix_file(file, tier)
                if report.blocks:
                    tier.describe(namespace, {name: facts[name] for name in OF_THE_NAMESPACE if name in facts})
            finally:
                tier.close(FLUSH_S)
    except UnsoundFileError as error:
        print(f"foreword: {args.file} is refused: {error}", file=sys.stderr)
        return 1
    if report.rejected is not None or report.blocks < file.num_blocks:
        reason = report.rejected or f"only {report.blocks:,} of {counted(file.num_blocks, 'block')} were stored"
        print(f"foreword: {args.file}: {reason}", file=sys.stderr)
        return 1
    size, where = counted(report.blocks, "block"), f"namespace {facts['namespace'][:8]} of {args.directory}"
    print(f"took {counted(report.tokens, 'token')} in {size} of model {facts['model_name']!r} into {where}")
    return 0

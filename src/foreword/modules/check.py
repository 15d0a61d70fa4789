"""`foreword pml check FILE`: shows a schema's layout, or the place of its error.

Exit codes: 0 the schema is sound, 1 it is not, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from foreword.config import user_path
from foreword.errors import ConfigError, PMLError
from foreword.pml.check import MOST_NEIGHBOURS, Row, SchemaReport, report_on
from foreword.pml.library import Library, load_schema
from foreword.text import Tokenizer
from foreword.text.schema_text import schema_text
from foreword.tiers.upkeep.table import counted, print_table

MAX_SEAMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword pml check`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="schema of prompt modules")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or hub id of the tokenizer and chat template (default: check the structure only)",
    )
    parser.add_argument("--include", metavar="FOLDER", type=Path, help="folder of the files that `src` may name")
    parser.add_argument("--prompt", metavar="FILE", type=Path, help="file of a prompt to check, too")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments."""
    for file, what in ((args.file, "a schema of prompt modules"), (args.prompt, "a prompt of the schema")):
        if file is not None and not user_path(file).is_file():
            raise ConfigError(f"{str(file)!r} is not a file; name {what}")
    if args.prompt is not None and args.model is None:
        raise ConfigError("--prompt needs --model, whose tokenizer counts tokens; give both")
    tokenizer = None if args.model is None else Tokenizer.load(args.model)
    if args.model is not None and tokenizer is None:
        raise ConfigError(f"--model {args.model!r} comes without a tokenizer; name one that has it")
    try:
        if tokenizer is None:
            schema = load_schema(args.file, args.include)
            print(f"{args.file}: schema {schema.name!r} is sound; --model shows its layout")
            return 0
        loaded = Library(schema_text(tokenizer)).load(args.file, include=args.include)
        prompt = None if args.prompt is None else loaded.read_prompt(args.prompt)
    except PMLError as error:
        print(f"foreword: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    report = report_on(loaded.layout)
    composition = None if prompt is None else prompt.composition
    if args.json:
        counts = (
            {"prompt_tokens": composition.num_tokens, "exact_tokens": composition.num_exact_tokens}
            if composition
            else {}
        )
        print(json.dumps({**asdict(report), **counts}))
        return 0
    print_report(report, str(args.file))
    if composition is not None:
        print(
            f"\n{args.prompt}: {counted(composition.num_tokens, 'token')} at positions up to "
            f"{composition.next_position:,}; the first {composition.num_exact_tokens:,} are an ordinary prefix"
        )
    return 0


def print_report(report: SchemaReport, title: str) -> None:
    """Print the layout as a table, and notes for the schema's author."""
    num_modules = counted(len(report.rows) - 1, "module")
    print(
        f"{title}: schema {report.name!r}, {num_modules}, {counted(report.num_positions, 'position')}, "
        f"{counted(report.num_source_tokens, 'token')} to compute once\n"
    )
    heads = ["module", "tokens", "positions", "room after", "parameters"]
    print_table([heads, *map(_cells, report.rows)], right="lrrrl")
    for paths in report.shared:
        print(f"\n{', '.join(paths)} have equal texts and are computed once")
    if report.seams:
        print(
            f"\n{counted(len(report.seams), 'seam')} where texts that touch each other have other tokens than one text "
            "would have:"
        )
    for seam in report.seams[:MAX_SEAMS]:
        between = f"{seam.before or '(schema)'} and {seam.after or '(schema)'}"
        print(f"    between {between}: {seam.text_before[-16:]!r} | {seam.text_after[:16]!r}")
    if len(report.seams) > MAX_SEAMS:
        print(f"    and {len(report.seams) - MAX_SEAMS:,} more")
    if not report.is_every_seam_known:
        print(f"\nonly the first {MOST_NEIGHBOURS:,} pairs of texts that touch each other were tried for seams")
    for note in report.notes:
        print(f"\n{note}")


def _cells(row: Row) -> list[str]:
    depth = row.path.count("/")
    name = "  " * (depth + 1) + row.path.rpartition("/")[2] if row.path else "(schema)"
    room = "any" if row.room is None else f"{row.room:,}"
    parameters = ", ".join(f"{name} ({length:,})" for name, length in row.parameters)
    return [name, f"{row.num_tokens:,}", f"{row.begin:,}..{row.end:,}", room, parameters]

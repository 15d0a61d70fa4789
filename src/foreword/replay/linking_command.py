"""`foreword replay` on traces of chunks: what linking would add to prefix caching, as a table and as JSON.

Knows the terminal; `linking` does the computing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from foreword.errors import ConfigError
from foreword.replay.capacity import kv_bytes_per_token, parse_capacity, read_model_config
from foreword.replay.chunks import read_chunks
from foreword.replay.linking import LinkMethod, LinkReplay, replay_linking
from foreword.replay.report import table_of

DEFAULT_METHODS = "none,first-16,deviation-0.15"
DEFAULT_TOKENS = "50000,200000,1000000"
NOT_FOR_CHUNKS = ("tier", "flops", "sample", "picture", "policy", "block_tokens", "tokenizer")
"""Options of `foreword replay` that need blocks."""


def add_linking_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for traces of chunks."""
    group = parser.add_argument_group("chunks", "if a line has `chunks`, or the trace is RAGPulse's folder")
    group.add_argument(
        "--link", default=DEFAULT_METHODS, metavar="METHODS", help=f"methods to compare (default: {DEFAULT_METHODS})"
    )


def run_linking(args: argparse.Namespace, file: Path, defaults: argparse.Namespace) -> int:
    """Run with parsed arguments on a file of chunks; `defaults` are the options' values if none is given."""
    for name in NOT_FOR_CHUNKS:
        if getattr(args, name) != getattr(defaults, name):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning for a trace of chunks; leave it out")
    if args.max_requests is not None and args.max_requests < 1:
        raise ConfigError(f"max_requests={args.max_requests} is too small; use at least 1")
    methods = [LinkMethod.parse(name.strip()) for name in dict.fromkeys(args.link.split(","))]
    bytes_per_token = args.kv_bytes_per_token
    if bytes_per_token is None and args.model is not None:
        bytes_per_token = kv_bytes_per_token(read_model_config(args.model))
    names = DEFAULT_TOKENS if args.capacity == defaults.capacity else args.capacity
    capacities = [parse_capacity(name, 1, bytes_per_token) for name in names.split(",") if name.strip()]
    console = Console(stderr=args.json)
    with console.status("replaying"):
        found = replay_linking(
            read_chunks(file, args.max_requests), [*(one.num_blocks for one in capacities), None], methods
        )
    titles = [*(one.name for one in capacities), "unlimited"]
    _print(found, titles, methods, console, args.trace.name)
    if args.json:
        shares = {
            title: {"prefix": one.share(), **{method.name: one.share(method.name) for method in methods}}
            for title, one in zip(titles, found, strict=True)
        }
        counts = {title: asdict(one) for title, one in zip(titles, found, strict=True)}
        print(json.dumps({"not_computed": shares, "counts": counts}), flush=True)
    return 0


def _print(found: list[LinkReplay], titles: list[str], methods: list[LinkMethod], console: Console, title: str) -> None:
    unlimited = found[-1]
    console.print(f"{title}: {unlimited.num_tokens:,} prompt tokens in chunks", markup=False)
    console.print("\nShare of the prompts' tokens that need not be computed", style="bold")
    table = table_of("capacity (tokens)", "prefix", *(method.name for method in methods))
    for name, one in zip(titles, found, strict=True):
        shares = (one.share(), *(one.share(method.name) for method in methods))
        table.add_row(name, *(f"{share:.4f}" for share in shares))
    console.print(table)
    if len(unlimited.parts) > 1:
        console.print("\nBy part, with unlimited memory", style="bold")
        table = table_of("part", "of all tokens", "prefix", "anywhere")
        for part, count in unlimited.parts.items():
            of_all = count.num_tokens / max(1, unlimited.num_tokens)
            found_of_part = (tokens / max(1, count.num_tokens) for tokens in (count.prefix_tokens, count.found_tokens))
            table.add_row(part or "(no name)", *(f"{share:.3f}" for share in (of_all, *found_of_part)))
        console.print(table)
    gain = max(one.found_tokens - one.prefix_tokens for one in found) / max(1, unlimited.num_tokens)
    text = (
        f"Linking finds up to {gain:.1%} of all tokens that prefix caching computes again; "
        f"{unlimited.num_linked:,} chunks come again where no prefix ends with them. What answers lose by it, only a "
        "measurement on the model tells."
    )
    console.print(f"\n{text}", style="bold", highlight=False, soft_wrap=True)

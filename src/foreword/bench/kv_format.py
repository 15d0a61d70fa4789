"""`foreword bench kv-format`: measures how many more tokens' KV fits into the same memory in eight bits, and how much
eight bits change predictions.

The measurement runs a user's model on the user's texts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rich.console import Console

from foreword.config import Dtype, ModelConfig
from foreword.errors import ConfigError

MOST_DIVERGENCE = 0.002
"""The largest mean divergence, in nats, that is called small: foreword's own goal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword bench kv-format`."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of the model that is served")
    parser.add_argument("texts", metavar="TEXT", nargs="+", type=Path, help="files of text such as the model gets")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="only the first N tokens of a text (default: 512)"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="auto",
        help="precision of weights and own KV (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments. Raises ConfigError for texts that cannot be read, and the errors of loading."""
    from foreword.model.kv_quality import quality, tokens_a_gigabyte
    from foreword.model.loader import load_model
    from foreword.text import Tokenizer

    if args.max_tokens < 1:
        raise ConfigError(f"max_tokens={args.max_tokens} is too small; use at least 1")
    tokenizer = Tokenizer.load(args.model)
    if tokenizer is None:
        raise ConfigError(f"model {args.model!r} has no tokenizer, and texts need one; give its folder one")
    read = [tokenizer.encode(_read(path)) for path in args.texts]
    model = load_model(ModelConfig(args.model, dtype=args.dtype))
    longest = min(args.max_tokens, model.max_positions)
    texts = [tokens[:longest].tolist() for tokens in read if len(tokens)]
    if not texts:
        raise ConfigError("all texts are empty; give files of text such as the model gets")
    sizes, loss = tokens_a_gigabyte(model), quality(model, texts)
    if args.json:
        print(json.dumps({"tokens_a_gigabyte": sizes, **asdict(loss)}))
        return 0
    dtype, is_small = str(model.dtype).removeprefix("torch."), loss.mean_divergence <= MOST_DIVERGENCE
    console = Console(highlight=False)
    console.print(
        f"a gigabyte holds {sizes['own']:,} tokens in {dtype}, {sizes['int8']:,} in int8 "
        f"({sizes['int8'] / sizes['own']:.2f} times as many)"
    )
    console.print(
        f"int8 moves the next token's distribution by {loss.mean_divergence:.5f} nats on average over "
        f"{loss.num_tokens:,} positions of {loss.num_texts} texts, {loss.largest_divergence:.5f} in the worst text; "
        f"the likeliest token stays the same at {loss.same_likeliest_token:.2%}"
    )
    console.print(
        f"this is at most {MOST_DIVERGENCE} nats: serve with --kv-cache-dtype int8"
        if is_small
        else f"this is more than {MOST_DIVERGENCE} nats: compare answers before you serve with --kv-cache-dtype int8"
    )
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}; give files of text in UTF-8") from error

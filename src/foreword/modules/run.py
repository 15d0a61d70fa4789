"""`foreword pml run FILE PROMPT --model M`: answers one prompt of a schema, with or without linking."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreword import LLM
from foreword.config import engine_options, user_path
from foreword.config.flags import Flags, grouped
from foreword.config.vllm import ENGINE_OPTIONS
from foreword.errors import ConfigError, PMLError
from foreword.linking import METHODS, LinkedAnswer, Method
from foreword.pml.library import SchemaPrompt
from foreword.pml.prompt import looks_like_xml
from foreword.request import LinkReport, RequestOutput, SamplingParams
from foreword.tiers.upkeep.table import print_table


def add_engine_flags(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Add the options of an engine; `arguments` stand before the options in the usage."""
    flags = Flags(grouped(engine_options()), ENGINE_OPTIONS)
    flags.add_to(parser)
    parser.usage = f"%(prog)s {arguments} [OPTIONS]"
    parser.set_defaults(flags=flags)


def check_model(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if no model is given."""
    if "model" not in options:
        raise ConfigError("no model is given; name a folder or a hub id with --model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword pml run`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="schema of prompt modules")
    parser.add_argument("prompt", metavar="PROMPT", help="file of a prompt, or its text, which begins with <prompt")
    parser.add_argument("--include", metavar="FOLDER", type=Path, help="folder of the files that `src` may name")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    parser.add_argument("--link", metavar="METHOD", help="reuse modules at any position, such as first-16: approximate")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer by none, first-16, all and METHOD, and say which answers equal that of all, the exact one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the text")
    add_engine_flags(parser, "FILE PROMPT --model MODEL")


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run the command with its parsed arguments. `options`: the options of the engine."""
    check_model(options)
    for file in (args.file, *(() if looks_like_xml(args.prompt) else (Path(args.prompt),))):
        if not user_path(file).is_file():
            raise ConfigError(
                f"{str(file)!r} is not a file; name one, or give a prompt's text, which begins with <prompt"
            )
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    if args.link is not None:
        Method.parse(args.link)  # before seconds of loading
    if args.link is not None or args.compare:
        options.setdefault("allow_links", True)
    with LLM(**options) as llm:
        try:
            schema = llm.pml.load(args.file, include=args.include)
            prompt = schema.prompt(args.prompt) if looks_like_xml(args.prompt) else schema.read_prompt(args.prompt)
        except PMLError as error:
            print(f"foreword: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        if args.compare:
            methods = (*METHODS, *(() if args.link is None else (args.link,)))
            _print_comparison(llm.compare_links(prompt, params, methods=methods), as_json=args.json)
            return 0
        [output] = llm.generate(prompt, params, link=args.link)
    print(json.dumps(_as_json(prompt, output)) if args.json else output.outputs[0].text)
    if output.link is not None and not args.json:
        print(f"foreword: {_in_words(output.link)}", file=sys.stderr)
    return 0


def _as_json(prompt: SchemaPrompt, output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.outputs[0].text,
        "modules": list(prompt.modules),
        "prompt_tokens": len(prompt.token_ids),
        "cached_tokens": output.num_cached_tokens,
        **({} if output.link is None else {"link": _report(output.link)}),
    }


def _report(link: LinkReport) -> dict[str, Any]:
    return {**asdict(link), "exact": link.exact}


def _in_words(link: LinkReport) -> str:
    kind = "exact: it has the bits of the plain prompt" if link.exact else "approximate"
    return (
        f"{link.method}: {link.linked_tokens:,} of the prompt's tokens linked, {link.recomputed_tokens:,} recomputed, "
        f"{link.computed_tokens:,} computed, {link.cached_tokens:,} cached; {kind}"
    )


def _print_comparison(answers: Sequence[LinkedAnswer], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**asdict(answer), "link": _report(answer.link)} for answer in answers]))
        return
    heads = ["method", "as all", "linked", "recomputed", "computed", "cached", "first token ms", "answer"]
    print_table([heads, *map(_cells, answers)], right="lrrrrrrl")


def _cells(answer: LinkedAnswer) -> list[str]:
    link = answer.link
    counts = (link.linked_tokens, link.recomputed_tokens, link.computed_tokens, link.cached_tokens)
    same = "equal" if answer.is_equal else f"first {answer.num_equal_tokens:,}"
    return [
        answer.method,
        same,
        *(f"{count:,}" for count in counts),
        f"{answer.first_token_ms:.1f}",
        json.dumps(answer.text, ensure_ascii=False),
    ]

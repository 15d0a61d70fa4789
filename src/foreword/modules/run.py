"""`foreword pml run FILE PROMPT --model M`: answers one prompt of a schema.

Knows the terminal; `pml/` and an LLM do the work.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from foreword.config import engine_options
from foreword.config.flags import Flags
from foreword.config.vllm import ENGINE_OPTIONS
from foreword.errors import ConfigError, PMLError
from foreword.llm import LLM
from foreword.pml.library import LoadedSchema, SchemaPrompt
from foreword.pml.prompt import looks_like_xml
from foreword.request import RequestOutput, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword pml run`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="schema of prompt modules")
    parser.add_argument("prompt", metavar="PROMPT", help="file of a prompt, or its text, which begins with <prompt")
    parser.add_argument("--include", metavar="FOLDER", type=Path, help="folder of the files that `src` may name")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (default: 128)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the text")
    flags = Flags({"engine": engine_options()}, ENGINE_OPTIONS)
    flags.add_to(parser)
    parser.usage = "%(prog)s FILE PROMPT --model MODEL [OPTIONS]"
    parser.set_defaults(flags=flags)


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run with parsed arguments; `options` are those of the engine."""
    if "model" not in options:
        raise ConfigError("no model is given; name a folder or a hub id with --model")
    for file in (args.file, *(() if looks_like_xml(args.prompt) else (Path(args.prompt),))):
        if not file.expanduser().is_file():
            raise ConfigError(f"{str(file)!r} is no file; name one, or give a prompt's text, which begins with <prompt")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    with LLM(**options) as llm:
        try:
            prompt = _prompt(llm.pml.load(args.file, include=args.include), args.prompt)
        except PMLError as error:
            print(f"foreword: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        [output] = llm.generate(prompt, params)
    print(json.dumps(_as_json(prompt, output)) if args.json else output.outputs[0].text)
    return 0


def _prompt(schema: LoadedSchema, given: str) -> SchemaPrompt:
    return schema.prompt(given) if looks_like_xml(given) else schema.read_prompt(given)


def _as_json(prompt: SchemaPrompt, output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.outputs[0].text,
        "modules": list(prompt.modules),
        "prompt_tokens": len(prompt.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }

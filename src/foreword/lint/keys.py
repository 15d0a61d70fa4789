"""`foreword keys`: prints the block hashes that vLLM and SGLang give to a prompt, and the tokens of each message."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.cache import common_length
from foreword.cache.keys.foreign import (
    Context,
    Media,
    check_tokens,
    published,
    sglang_keys,
    vllm_keys,
)
from foreword.cache.keys.hashing import HASH_FUNCTION_NAMES
from foreword.errors import ChatTemplateError, ConfigError, InvalidRequestError
from foreword.lint.align import TokenIds
from foreword.lint.bodies import ANTHROPIC_BLOCKS, Conversation, read_body
from foreword.text import Tokenizer

SIZES = {"vllm": 16, "sglang": 1}
"""Each engine's default number of tokens per block."""
OTHER_INPUTS = ("add_generation_prompt", "continue_final_message", "chat_template", "add_special_tokens")
"""Fields of a body that change an engine's rendering, and that foreword does not support here."""
TEXTS = frozenset("text functionCall function_call functionResponse function_response".split())
NUM_WORDS = 8
"""The number of a block's first tokens that are shown as text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword keys`."""
    parser.add_argument("engine", choices=SIZES, help="engine whose hashes to print")
    parser.add_argument("--model", metavar="MODEL", help="folder or hub id of the tokenizer and chat template")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to complete")
    what.add_argument("--prompt-token-ids", metavar="IDS", help="token ids of a prompt, such as 5,17,9")
    what.add_argument("--body", metavar="FILE", type=Path, help="body of a chat request, as JSON")
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens of a block or page (default: 16 for vLLM, 1 for SGLang)"
    )
    parser.add_argument("--unit-tokens", type=int, metavar="N", help="vLLM's tokens per hash, if blocks are larger")
    parser.add_argument("--hash", choices=HASH_FUNCTION_NAMES, default="sha256", help="vLLM's hash (default: sha256)")
    parser.add_argument("--seed", metavar="TEXT", help="PYTHONHASHSEED of vLLM's process (default: none)")
    parser.add_argument("--salt", metavar="TEXT", help="cache_salt of the request")
    parser.add_argument(
        "--adapter", metavar="NAME=PATH", help="LoRA adapter, as vLLM was given it; no part of SGLang's hashes"
    )
    parser.add_argument(
        "--media",
        metavar="OFFSET:LENGTH:ID",
        action="append",
        default=[],
        help="place of a picture's tokens, and vLLM's identifier of it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")


def run(args: argparse.Namespace) -> int:
    """Print the keys of one prompt; returns the exit code."""
    tokenizer = None if args.model is None else Tokenizer.load(args.model)
    token_ids, parts = _prompt(args, tokenizer)
    texts = "".join(filter(None, (args.salt, args.adapter, args.seed, *args.media)))
    if any("\ud800" <= sign <= "\udfff" for sign in texts):
        raise ConfigError("an option is not valid Unicode (it holds half of a surrogate pair); give UTF-8")
    size = SIZES[args.engine] if args.block_tokens is None else args.block_tokens
    if size < 1 or (args.unit_tokens is not None and args.unit_tokens < 1):
        raise ConfigError(f"block_tokens={size} and unit_tokens={args.unit_tokens} must be at least 1")
    ignored = {"--adapter": args.adapter, "--seed": args.seed, "--unit-tokens": args.unit_tokens}
    if args.engine == "sglang" and (names := [name for name, value in ignored.items() if value is not None]):
        raise ConfigError(f"SGLang's hashes do not depend on {', '.join(names)}; leave it out")
    context = Context(args.salt, _adapter(args.adapter), tuple(map(_media, args.media)))
    if args.engine == "vllm":
        keys = vllm_keys(token_ids, size, context, algorithm=args.hash, seed=args.seed, unit_tokens=args.unit_tokens)
    else:
        keys = sglang_keys(token_ids, size, context)
    blocks = [
        {"first": at * size, "end": (at + 1) * size, "key": key.hex(), "event": published(args.engine, key)}
        for at, key in enumerate(keys)
    ]
    answer = {"tokens": len(token_ids), "block_tokens": size, "parts": parts, "blocks": blocks}
    print(json.dumps(answer) if args.json else _table(answer, token_ids, tokenizer))
    return 0


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the prompt's tokens, and the place of each message of a conversation."""
    if args.prompt_token_ids is not None:
        try:
            ids = [int(token) for token in args.prompt_token_ids.split(",")]
        except ValueError as error:
            raise InvalidRequestError(
                f"--prompt-token-ids {args.prompt_token_ids!r} is not a list of numbers such as 5,17,9"
            ) from error
        check_tokens(ids)
        return ids, []
    if tokenizer is None:
        raise ConfigError("a text needs a tokenizer; name a folder or hub id that has one with --model")
    tokenizer.take_control_tokens()  # vLLM and SGLang never read control tokens as text
    if args.prompt is not None:
        return list(map(int, tokenizer.encode(args.prompt))), []
    try:
        body = json.loads(args.body.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"--body {str(args.body)!r} cannot be read as JSON: {error}") from error
    conversation = read_body(body) if isinstance(body, dict) else None
    if conversation is None:
        raise InvalidRequestError(
            f"--body {str(args.body)!r} holds no conversation; give it messages, input or contents"
        )
    if (what := _written_otherwise(body)) is not None:
        raise InvalidRequestError(
            f"--body {str(args.body)!r} has {what}, of which an engine may make other tokens; give the tokens with "
            "--prompt-token-ids"
        )
    token_ids = tokenizer.render_chat(conversation.messages, template_inputs=conversation.inputs)
    return list(map(int, token_ids)), _parts(conversation, token_ids, tokenizer)


def _written_otherwise(body: Mapping[str, Any]) -> str | None:
    """Name a part of a body that engines may render in another way, such as a picture; None if all render alike."""
    for name in OTHER_INPUTS:
        if body.get(name) is not None:
            return name
    pending = [body.get(name) for name in ("messages", "contents", "input")] + [{"content": body.get("system")}]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        if not isinstance(value, Mapping):
            continue
        if value.get("role") == "developer":
            return "the role developer"
        for pieces in (value.get(name) for name in ("content", "parts", "output")):
            parts = [part for part in pieces if isinstance(part, Mapping)] if isinstance(pieces, list) else []
            others = [part for part in parts if part.get("type") not in ANTHROPIC_BLOCKS and not TEXTS & set(part)]
            if others:
                return f"a part that is no text ({others[0].get('type') or next(iter(others[0]), None)})"
            if sum("text" in part for part in parts) > 1:
                return "a content of several texts"
            pending.append(pieces)
    return None


def _parts(conversation: Conversation, token_ids: TokenIds, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the span of each message. If the template cannot render a message without the next, both are joined."""
    parts: list[dict[str, Any]] = []
    first, roles = 0, []
    for count, message in enumerate(conversation.messages, 1):
        roles.append(str(message["role"]))
        try:
            beginning = tokenizer.render_chat(
                conversation.messages[:count], add_generation_prompt=False, template_inputs=conversation.inputs
            )
        except ChatTemplateError:
            continue
        end = common_length(beginning, token_ids)
        if end > first:
            parts.append({"name": " + ".join(roles), "first": first, "end": end})
            first, roles = end, []
    if first < len(token_ids):
        parts.append({"name": " + ".join([*roles, "begin of the reply"]), "first": first, "end": len(token_ids)})
    return parts


def _adapter(argument: str | None) -> tuple[str, str] | None:
    if argument is None:
        return None
    name, sign, path = argument.partition("=")
    if not (name and sign and path):
        raise ConfigError(f"--adapter {argument!r} is not NAME=PATH; vLLM hashes both")
    return name, path


def _media(argument: str) -> Media:
    parts = argument.split(":", 2)
    try:
        media = Media(int(parts[0]), int(parts[1]), parts[2])
        if media.offset < 0 or media.num_tokens < 1:
            raise ValueError(argument)
        return media
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"--media {argument!r} is not OFFSET:LENGTH:ID, from 0 and from 1, such as 10:256:c0ffee"
        ) from error


def _table(answer: dict[str, Any], token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    size = answer["block_tokens"]
    lines = [f"{answer['tokens']:,} tokens, {len(answer['blocks']):,} whole blocks of {size:,}"]
    for part in answer["parts"]:
        whole = part["end"] // size
        lines.append(f"{part['name']}: tokens {part['first']:,} to {part['end']:,}; {whole:,} whole blocks end by then")
    for block in answer["blocks"]:
        beginning = token_ids[block["first"] : block["end"]][:NUM_WORDS]
        text = " ".join(map(str, beginning)) if tokenizer is None else repr(tokenizer.decode(beginning))
        lines.append(f"{block['first']:>8}  {block['key']}  {block['event']}  {text}")
    return "\n".join(lines)

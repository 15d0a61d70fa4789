"""Conversations with one planted cause each, for the tests of the linter. Seeded: the same in every run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from random import Random
from typing import Any

from foreword.lint.bodies import read_body
from foreword.lint.prompts import LintPrompt
from foreword.text import Tokenizer

Message = dict[str, Any]

FACTS = "".join(
    f"The code of the amber falcon {n} is {4821 + 37 * n}. The home of lantern {n} is Lisbon.\n" for n in range(20)
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {name} of a city, in words that people understand.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "lookup", "news", "traffic")
]
PASSAGES = [
    f"Passage {number}. "
    + " ".join(Random(number).choices("falcon lantern kettle bridge harbour meadow".split(), k=30))
    + "\n"
    for number in range(8)
]
NUM_REQUESTS = 24


def conversation(cause: str, number: int, random: Random) -> tuple[list[Message], list[Message]]:
    """Messages and tools of request `number` of traffic that suffers from `cause`."""
    tools: list[Message] = []
    match cause:
        case "date":
            system = f"You are a bot. Today is 2026-11-{1 + number:02d}.\n{FACTS}"
        case "uuid":
            system = f"Trace {uuid.UUID(int=random.getrandbits(128))}.\n{FACTS}"
        case "counter":
            system = f"Session {1000 + number}.\n{FACTS}"
        case "header":
            system = f"x-billing-header: cch={random.getrandbits(40):010x};\n{FACTS}"
        case "name":
            system = f"You are talking to user {random.choice(['Anna', 'Bob Miller', 'Carla', 'Dimitri'])}.\n{FACTS}"
        case "tools":
            system, tools = FACTS, random.sample(TOOLS, len(TOOLS))
        case "keys":
            system, tools = FACTS, [shuffled(tool, random) for tool in TOOLS]
        case "space":
            system = f"Answer well.{random.choice([' ', chr(10) * 2])}{FACTS}"
        case "order":
            system = f"Answer from these.\n{''.join(random.sample(PASSAGES, len(PASSAGES)))}{FACTS}"
        case "picture":
            url = f"data:image/png;base64,{random.getrandbits(80):020x}"
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": FACTS}]
            read = read_body({"messages": [{"role": "user", "content": parts}]})
            assert read is not None
            system = read.messages[0]["content"]
        case "passages":
            system = f"Answer from these.\n{''.join(random.sample(PASSAGES, 3))}{FACTS}"
        case _:
            system, tools = FACTS, TOOLS
    return [{"role": "system", "content": system}, question(random)], tools


def question(random: Random) -> Message:
    words = random.choices("why when where how falcon lantern code home is was the of".split(), k=12)
    return {"role": "user", "content": f"{' '.join(words)} {random.random()}?"}


def shuffled(value: Any, random: Random) -> Any:
    """The same JSON with its keys in another order."""
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], random) for key in random.sample(list(value), len(value))}


def rendered(tokenizer: Tokenizer, chats: Sequence[tuple[list[Message], list[Message]]]) -> list[LintPrompt]:
    """Prompts, one a minute."""
    return [
        LintPrompt(
            tokenizer.render_chat(messages, template_inputs={"tools": tools} if tools else {}),
            60_000.0 * number,
            tuple(json.dumps(part) for part in ([tools, *messages] if tools else messages)),
        )
        for number, (messages, tools) in enumerate(chats)
    ]


def planted(tokenizer: Tokenizer, cause: str, seed: int = 1) -> list[LintPrompt]:
    random = Random(seed)
    return rendered(tokenizer, [conversation(cause, number, random) for number in range(NUM_REQUESTS)])

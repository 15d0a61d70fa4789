"""Conversations with tools: lists of tools, lookups, their results and the answers, for training and evaluation.

Knows messages, no tokens. A tool's result may contradict facts in the prompt; the latest result counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from foreword.demo import recall

TOKENS_PER_TOOLS = 137
"""Rough length of a list of tools with its instruction."""

TOKENS_PER_ROUND = 61
"""Rough length of a question, its call, the result and the answer."""

OTHER_NAMES = "weather clock search convert read write translate send list book run open".split()
PARAMETERS = "city day text path query zone unit name number to from words count".split()
DESCRIPTIONS = (
    "Look up a fact.",
    "Looks a fact up.",
    "Find a fact by its name and tell it.",
    "Get the value of a fact, such as the code of the brave lion.",
    "Read one fact from the notes of our museum.",
    "",
)
SYSTEM_TEXTS = (
    "You are a careful clerk.",
    "You answer in one word or number.",
    "Answer each question from your tools.",
    "You are a good assistant. You look facts up and do not guess.",
    "Please use your tools before you answer.",
)


def draw_tools(rng: Random, *, with_lookup: bool = True) -> list[dict[str, Any]]:
    """One to four tools in any order, with or without `lookup`."""
    names = rng.sample(OTHER_NAMES, rng.choice((0, 0, 1, 2, 3)) if with_lookup else rng.randint(1, 3))
    if with_lookup:
        names.insert(rng.randint(0, len(names)), "lookup")
    return [_tool(rng, name) for name in names]


def _tool(rng: Random, name: str) -> dict[str, Any]:
    if name == "lookup":
        if rng.random() < 0.4:
            return recall.LOOKUP
        names, description = ["fact"], rng.choice(DESCRIPTIONS)
    else:
        names = rng.sample(PARAMETERS, rng.randint(0, 2))
        description = " ".join(rng.choices((*recall.NOUNS, *recall.ADJECTIVES, "the", "a", "of"), k=rng.randint(1, 9)))
    kinds = ("string",) if name == "lookup" else ("string", "string", "integer", "number")
    properties = {parameter: {"type": rng.choice(kinds)} for parameter in names}
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": names}
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    if rng.random() < 0.2:
        for name_of, schema in properties.items():
            schema["title"] = name_of.capitalize()
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if not description:
        del function["description"]
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def result_text(rng: Random, question: recall.Question) -> str:
    """A result of a tool: mostly the fact's sentence, else its value, or JSON that holds sentence or value."""
    sentence = recall.Fact(question.key, question.answer).text
    chance = rng.random()
    if chance < 0.5:
        return sentence
    if chance < 0.7:
        return question.answer
    value: Any = rng.choice((sentence, question.answer, question.answer))
    if value.isdigit() and rng.random() < 0.5:
        value = int(value)
    return json.dumps({rng.choice(("result", "value", "answer")): value})


def changed(rng: Random, question: recall.Question) -> recall.Question:
    """The same question after the fact has got another value of its kind."""
    if question.answer.isdigit():
        size = len(question.answer)
        return replace(question, answer=str(rng.randrange(10 ** (size - 1), 10**size)))
    return replace(question, answer=rng.choice(recall.CITIES if question.answer in recall.CITIES else recall.NAMES))


def rounds(rng: Random, questions: Sequence[recall.Question]) -> list[recall.Message]:
    """For each question: the question, the call, its result and the answer."""
    messages: list[recall.Message] = []
    for question in questions:
        messages.append({"role": "user", "content": question.text})
        messages.append(recall.call_message(question))
        messages.append({"role": "tool", "content": result_text(rng, question)})
        messages.append({"role": "assistant", "content": question.answer})
    return messages

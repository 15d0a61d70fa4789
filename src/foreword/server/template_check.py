"""Template check: does a chat template leave earlier turns unchanged when a conversation grows?

Knows conversations and tokens. Some templates write an old turn differently once a new one follows: they drop its
reasoning, move the system prompt or count turns. Every later turn then misses from that point on. This is the usual
cause of misses in chats, and the texts that clients send do not show it. Agents' turns count too: calls of tools, their
results, and reasoning that clients send back as `reasoning_content`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.cache import common_length
from foreword.errors import ForewordError
from foreword.server.observe.explanations import NUM_CONTEXT_TOKENS, TokenIds, text_of
from foreword.text import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

NUM_TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SAID, THOUGHT = "The answer to that is {}.", "I count to {}."


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of conversation, as clients send it back."""

    name: str
    messages: Sequence[Message]
    """What follows the question in each turn; `{}` in a text stands for a number."""
    needs: tuple[str, ...] = ()
    """Words that a template must have for this kind to mean anything to it."""
    has_tools: bool = False


def _calling(more: Message) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "{}"}
    answer = {"role": "assistant", "content": SAID}
    return [{"role": "assistant", "content": "", "tool_calls": [call], **more}, result, {**answer, **more}]


KINDS = (
    _Kind("plain answers", [{"role": "assistant", "content": SAID}]),
    _Kind("answers with reasoning", [{"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"}]),
    _Kind(
        "answers with separate reasoning",
        [{"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}],
        ("reasoning_content",),
    ),
    _Kind("calls of tools", _calling({}), ("tools",), has_tools=True),
    _Kind(
        "calls of tools with reasoning",
        _calling({"reasoning_content": THOUGHT}),
        ("tools", "reasoning_content"),
        has_tools=True,
    ),
)

_PROBE = (("system", "one"), ("user", "two"), ("system", "three"))


@dataclass(frozen=True, slots=True)
class TemplateChange:
    """An earlier turn that the template writes differently once a later one follows."""

    conversation: str
    """The kind of conversation that shows it."""
    turn: int
    """Number of the turn (a question and its answer) that changes, from 1."""
    position: int
    """First token that changes; the tokens before it stay cached."""
    num_tokens: int
    """Number of tokens computed by then, all of which could have been reused."""
    before: str
    was: str
    becomes: str

    def __str__(self) -> str:
        return (
            f"with {self.conversation}, turn {self.turn} is written differently from when it was computed: "
            f"from token {self.position} of {self.num_tokens}, after {self.before!r}, {self.was!r} becomes "
            f"{self.becomes!r}"
        )


def check_template(tokenizer: Tokenizer) -> list[TemplateChange]:
    """The first change in each kind of conversation; none if the template only appends, or if there is no template."""
    changes = []
    for kind in KINDS:
        if not all(word in (tokenizer.chat_template or word) for word in kind.needs):
            continue
        for system in (True, False):
            change = _first_change(tokenizer, kind, system=system)
            if change is not None:
                changes.append(change)
                break
    return changes


def takes_system_anywhere(tokenizer: Tokenizer) -> bool:
    """Whether the template writes a system message after a question there; some refuse it, move it or drop it."""
    system, question, note = ({"role": role, "content": f"{role} {text}"} for role, text in _PROBE)
    try:
        text = tokenizer.spell(tokenizer.render_chat([system, question, note]).tolist())
    except ForewordError:
        return False
    return text.count(note["content"]) == 1 and text.index(note["content"]) > text.index(question["content"])


def takes_successive_questions(tokenizer: Tokenizer) -> bool:
    """Whether the template takes two user messages in succession; some want an answer between them."""
    try:
        tokenizer.render_chat([{"role": "user", "content": "one"}] * 2)
    except ForewordError:
        return False
    return True


def warn_of(changes: Sequence[TemplateChange]) -> None:
    """Log what the check found."""
    for change in changes:
        logger.warning("the chat template spoils reuse of conversations: %s", change)


def _first_change(tokenizer: Tokenizer, kind: _Kind, *, system: bool) -> TemplateChange | None:
    """Compare the tokens that the engine has computed (a prompt and its answer) with how later prompts write them."""
    name = kind.name + ("" if system else ", no system prompt")
    inputs = {"tools": [TOOL]} if kind.has_tools else {}
    messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}] if system else []
    answered: TokenIds | None = None
    answered_turn = 0
    for turn in range(1, NUM_TURNS + 1):
        messages.append({"role": "user", "content": f"What is {turn} and {turn}?"})
        for message in kind.messages:
            said = {key: _numbered(value, 2 * turn) for key, value in message.items()}
            if said["role"] != "assistant":
                messages.append(said)
                continue
            try:
                prompt = tokenizer.render_chat(messages, template_inputs=inputs)
                messages.append(said)
                written = tokenizer.render_chat(messages, add_generation_prompt=False, template_inputs=inputs)
            except ForewordError as error:
                logger.debug("the template takes no %s: %s", name, error)
                return None
            if answered is not None and common_length(answered, prompt) < len(answered):
                return _change(tokenizer, name, answered_turn, answered, prompt)
            if kind.needs:  # what the model wrote is not known here; the template writes it
                if common_length(prompt, written) < len(prompt):
                    return _change(tokenizer, name, turn, prompt, written)
            elif not tokenizer.spell(written.tolist()).startswith(tokenizer.spell(prompt.tolist()) + said["content"]):
                computed = np.concatenate((prompt, tokenizer.encode(said["content"])))
                return _change(tokenizer, name, turn, computed, written)
            answered, answered_turn = written, turn
    return None


def _numbered(value: Any, number: int) -> Any:
    return value.replace("{}", str(number)) if isinstance(value, str) else value


def _change(tokenizer: Tokenizer, name: str, turn: int, before: TokenIds, after: TokenIds) -> TemplateChange:
    position = common_length(before, after)
    end = position + NUM_CONTEXT_TOKENS
    parts = (before[max(0, position - NUM_CONTEXT_TOKENS) : position], before[position:end], after[position:end])
    texts = [text_of(part.tolist(), tokenizer) or "" for part in parts]
    return TemplateChange(name, turn, position, len(before), *texts)

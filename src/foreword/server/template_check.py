"""Template check: does a chat template leave earlier turns unchanged when a conversation grows?

Knows conversations and tokens. Some templates write an old turn differently once a new one follows: they drop its
reasoning, move the system prompt or count turns. Every later turn then misses from that point on. This is the usual
cause of misses in chats, and the texts that clients send do not show it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.cache import common_length
from foreword.errors import ForewordError
from foreword.server.observe.explanations import NUM_CONTEXT_TOKENS, TokenIds, text_of
from foreword.text import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, str]

ANSWERS = {
    "plain answers": "The answer to that is {}.",
    "answers with reasoning": "<think>\nI count to {}.\n</think>\n\nThe answer to that is {}.",
}
NUM_TURNS = 3
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
    for name, answer in ANSWERS.items():
        for system in (True, False):
            change = _first_change(tokenizer, name + ("" if system else ", no system prompt"), answer, system)
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


def warn_of(changes: Sequence[TemplateChange]) -> None:
    """Log what the check found."""
    for change in changes:
        logger.warning("the chat template spoils reuse of conversations: %s", change)


def _first_change(tokenizer: Tokenizer, name: str, answer: str, system: bool) -> TemplateChange | None:
    """Compare the tokens that the engine has computed (a prompt and its answer) with how later prompts write them."""
    messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}] if system else []
    answered: TokenIds | None = None
    for turn in range(1, NUM_TURNS + 1):
        messages = [*messages, {"role": "user", "content": f"What is {turn} and {turn}?"}]
        said = answer.format(2 * turn, 2 * turn)
        try:
            prompt = tokenizer.render_chat(messages)
            messages = [*messages, {"role": "assistant", "content": said}]
            written = tokenizer.render_chat(messages, add_generation_prompt=False)
        except ForewordError as error:
            logger.debug("the template takes no %s: %s", name, error)
            return None
        if answered is not None and common_length(answered, prompt) < len(answered):
            return _change(tokenizer, name, turn - 1, answered, prompt)
        computed = np.concatenate((prompt, tokenizer.encode(said)))
        if not tokenizer.spell(written.tolist()).startswith(tokenizer.spell(prompt.tolist()) + said):
            return _change(tokenizer, name, turn, computed, written)
        answered = written
    return None


def _change(tokenizer: Tokenizer, name: str, turn: int, before: TokenIds, after: TokenIds) -> TemplateChange:
    position = common_length(before, after)
    end = position + NUM_CONTEXT_TOKENS
    parts = (before[max(0, position - NUM_CONTEXT_TOKENS) : position], before[position:end], after[position:end])
    texts = [text_of(part.tolist(), tokenizer) or "" for part in parts]
    return TemplateChange(name, turn, position, len(before), *texts)

"""Template check: does a chat template leave earlier turns alone when a conversation grows?

Knows conversations and tokens. A template that writes an old turn differently once a new one follows (drops its
reasoning, moves the system prompt, counts turns) makes every later turn miss from there on: the usual cause of
misses in chats, and invisible in the texts that clients send.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from foreword.errors import ForewordError
from foreword.server.explanations import NUM_CONTEXT_TOKENS, common_length, text_of
from foreword.text import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, str]

ANSWERS = {
    "plain answers": "The answer to that is {}.",
    "answers with reasoning": "<think>\nI count to {}.\n</think>\n\nThe answer to that is {}.",
}
NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class TemplateChange:
    """An earlier turn that is written differently when a later one follows."""

    conversation: str
    """Which kind of conversation shows it."""
    turn: int
    """The user's turn, from 1, whose rendering changes when the next one is added."""
    position: int
    """Token at which it changes; what comes before stays cached."""
    num_tokens: int
    """Tokens of that rendering: so many could have been reused."""
    before: str
    was: str
    becomes: str

    def __str__(self) -> str:
        return (
            f"with {self.conversation}, turn {self.turn} is rendered differently once turn {self.turn + 1} follows: "
            f"from token {self.position} of {self.num_tokens}, after {self.before!r}, {self.was!r} becomes "
            f"{self.becomes!r}"
        )


def check_template(tokenizer: Tokenizer) -> list[TemplateChange]:
    """The first change in each kind of conversation; none for a template that only appends, or for no template."""
    changes = []
    for name, answer in ANSWERS.items():
        for system in (True, False):
            change = _first_change(tokenizer, name + ("" if system else ", no system prompt"), answer, system)
            if change is not None:
                changes.append(change)
                break
    return changes


def warn_of(changes: Sequence[TemplateChange]) -> None:
    """Log what the check found."""
    for change in changes:
        logger.warning("the chat template spoils reuse of conversations: %s", change)


def _first_change(tokenizer: Tokenizer, name: str, answer: str, system: bool) -> TemplateChange | None:
    before = None
    for turn, messages in enumerate(_growing(answer, system)):
        try:
            # Up to the answer's beginning: what the engine has computed when the next turn comes.
            now = tokenizer.render_chat(messages)
        except ForewordError as error:
            logger.debug("the template takes no %s: %s", name, error)
            return None
        if before is not None:
            position = common_length(before, now)
            if position < len(before):
                end = position + NUM_CONTEXT_TOKENS
                parts = (
                    before[max(0, position - NUM_CONTEXT_TOKENS) : position],
                    before[position:end],
                    now[position:end],
                )
                texts = [text_of(part.tolist(), tokenizer) or "" for part in parts]
                return TemplateChange(name, turn, position, len(before), *texts)
        before = now
    return None


def _growing(answer: str, system: bool) -> Iterator[list[Message]]:
    messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}] if system else []
    for turn in range(1, NUM_TURNS + 1):
        messages = [*messages, {"role": "user", "content": f"What is {turn} and {turn}?"}]
        yield messages
        messages = [*messages, {"role": "assistant", "content": answer.format(2 * turn, 2 * turn)}]

"""Template check: does a chat template leave earlier turns unchanged when a conversation grows?

Some templates write an old turn differently once a new one follows: they drop its reasoning, move the system prompt or
count turns. Every later turn then misses from that point on. This is the usual cause of misses in chats, and the texts
that clients send do not show it. The check includes agents' turns: calls of tools, their results, and reasoning that
clients send back as `reasoning_content`. The engine has computed a prompt and the model's reply, and the next prompt
has to begin with both.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.cache import common_length
from foreword.errors import ForewordError
from foreword.server.observe.explanations import NUM_CONTEXT_TOKENS, text_of
from foreword.text import Tokenizer
from foreword.text.template_form import written_calls
from foreword.text.template_probe import TemplateReport

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
ANSWER, THOUGHT = "The answer to that is {}.", "I count to {}."
SWITCHES = ("enable_thinking", "thinking")
"""Inputs by which templates switch a model's thinking on or off."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of conversation, as clients send it back."""

    name: str
    messages: Sequence[Message]
    """The messages after the question in each turn; `{}` in a text stands for a number."""
    needs: tuple[str, ...] = ()
    """Words that a template must contain to have this kind of conversation."""
    has_tools: bool = False
    thinks: bool = False
    """Whether the model thinks before each of its messages."""


def _calling(more: Message) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    result = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "{}"}
    answer = {"role": "assistant", "content": ANSWER}
    return [{"role": "assistant", "content": "", "tool_calls": [call], **more}, result, {**answer, **more}]


KINDS = (
    _Kind("plain answers", [{"role": "assistant", "content": ANSWER}]),
    _Kind(
        "answers with reasoning",
        [{"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}],
    ),
    _Kind(
        "answers with separate reasoning",
        [{"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}],
        ("reasoning_content",),
        thinks=True,
    ),
    _Kind("calls of tools", _calling({}), ("tools",), has_tools=True),
    _Kind(
        "calls of tools with reasoning",
        _calling({"reasoning_content": THOUGHT}),
        ("tools", "reasoning_content"),
        has_tools=True,
        thinks=True,
    ),
)


@dataclass(frozen=True, slots=True)
class TemplateChange:
    """An earlier turn that the template writes differently once a later turn follows."""

    conversation: str
    """The name of the checked kind of conversation, such as "calls of tools"."""
    turn: int
    """The number of the turn (a question and its answer) that changes, from 1."""
    position: int
    """The first token that changes. The tokens before it stay cached."""
    num_tokens: int
    """The number of tokens that were computed before. All of them could have been reused."""
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
    """Find the first change in each kind of conversation; empty if the template only appends, or without a template."""
    changes = []
    template = tokenizer.chat_template
    for kind in KINDS:
        if template is None or not all(word in template for word in kind.needs):
            continue
        for name, inputs in _switched(tokenizer, template):
            checks = (_Check(tokenizer, kind, name, inputs, system=system) for system in (True, False))
            changes += list(filter(None, (check.first_change() for check in checks)))[:1]
    return changes


def _switched(tokenizer: Tokenizer, template: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and template inputs of each case: no input, and each thinking switch that changes a prompt."""
    variants: list[tuple[str, dict[str, Any]]] = [("", {})]
    for switch, value in itertools.product(SWITCHES, (False, True)):
        if re.search(rf"\b{switch}\b", template):
            messages = [{"role": "user", "content": "Hi"}]
            prompts = [_prompt(tokenizer, messages, inputs) for inputs in ({}, {switch: value})]
            if None not in prompts and prompts[0] != prompts[1]:
                variants.append((f", {switch}={value}", {switch: value}))
    return variants


def _prompt(tokenizer: Tokenizer, messages: Sequence[Message], inputs: Mapping[str, Any]) -> str | None:
    try:
        return tokenizer.render_text(messages, add_generation_prompt=True, template_inputs=inputs)
    except ForewordError as error:
        logger.debug("the template takes no %s: %s", inputs, error)
        return None


def log_template(tokenizer: Tokenizer | None, report: TemplateReport, changes: Sequence[TemplateChange]) -> None:
    """Log the template's losses (`report`) and the changes of earlier turns (`changes`)."""
    if tokenizer is not None and tokenizer.chat_template is None:
        logger.warning(
            "the model has no chat template: it answers texts (/v1/completions), and conversations are refused; name "
            "a template with --chat-template if it is made for them"
        )
    if report.form.tools == "written":
        logger.warning("the chat template takes no tools; the system message lists the tools of requests")
    if report.changes:
        changed = ", ".join(f"{name}={value!r}" for name, value in report.changes.items())
        logger.info("the chat template does not show all that agents send; messages are rewritten for it: %s", changed)
    for loss in report.losses:
        logger.warning("the chat template does not show %s", loss)
    for change in changes:
        logger.warning("the chat template spoils reuse of conversations: %s", change)


class _Check:
    """Compares the text that the engine computed (a prompt and its reply) with the same turns in later prompts."""

    def __init__(
        self, tokenizer: Tokenizer, kind: _Kind, suffix: str, inputs: Mapping[str, Any], *, system: bool
    ) -> None:
        self._tokenizer, self._kind = tokenizer, kind
        self._name = f"{kind.name}{suffix}" + ("" if system else ", no system prompt")
        self._inputs = {**inputs, **({"tools": [TOOL]} if kind.has_tools else {})}
        self._messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}] if system else []

    def first_change(self) -> TemplateChange | None:
        """Find the first earlier turn that a later prompt writes differently."""
        before, computed_turn = ("", ""), 0
        for turn in range(1, NUM_TURNS + 1):
            self._messages.append({"role": "user", "content": f"What is {turn} and {turn}?"})
            for pattern in self._kind.messages:
                message = {key: _numbered(value, 2 * turn) for key, value in pattern.items()}
                if message["role"] == "assistant":
                    prompt = _prompt(self._tokenizer, self._messages, self._inputs)
                    reply = None if prompt is None else self._reply(prompt, message)
                    if prompt is None or reply is None:
                        return None
                    if not self._begins(prompt, *before):
                        return self._change(computed_turn, "".join(before), prompt)
                    before, computed_turn = (prompt, reply), turn
                self._messages.append(message)
        return None

    def _reply(self, prompt: str, message: Message) -> str | None:
        """Return the model's text after a prompt; None if the model would not write this message there."""
        form, reply = self._tokenizer.reply_format, str(message["content"])
        marks = None if form is None else form.thinking
        if marks is not None:
            after = prompt[prompt.rfind(marks.opens) :] if marks.opens in prompt else ""
            is_open = bool(after) and not after.removeprefix(marks.opens).strip()
            is_closed = prompt.rstrip().endswith(marks.closes)
            if self._kind.thinks or reply.startswith(marks.opens):
                is_real = not is_closed and not (is_open and reply.startswith(marks.opens))
            else:
                is_real = is_closed or not (is_open or marks.is_expected)
            if not is_real:
                return None
        if message.get("tool_calls"):
            if form is None or form.call_form is None:
                return self._as_written(prompt, message)
            reply += written_calls(message["tool_calls"], form)
        if not self._kind.thinks:
            return reply
        if marks is None:
            return self._as_written(prompt, message)
        after_closing = marks.after if not message.get("tool_calls") or marks.after_call is None else marks.after_call
        opening = "" if is_open else marks.opens + marks.before
        return f"{opening}{message['reasoning_content']}{marks.before}{marks.closes}{after_closing}{reply}"

    def _begins(self, prompt: str, before: str, reply: str) -> bool:
        """Say whether a prompt begins with an earlier prompt and its reply.

        White space may differ at the reply's start. In replies with calls or reasoning it may differ anywhere, because
        a model writes the white space that it learned in training.
        """
        continuation = prompt[len(before) :].lstrip()
        if self._kind.thinks or self._kind.has_tools:
            continuation, reply = "".join(continuation.split()), "".join(reply.split())
        return prompt.startswith(before) and continuation.startswith(reply.lstrip())

    def _as_written(self, prompt: str, message: Message) -> str | None:
        """Return the reply as the template writes it, because the model's own form is not known."""
        rendered = self._tokenizer.render_text(
            [*self._messages, message], add_generation_prompt=False, template_inputs=self._inputs
        )
        return rendered[len(prompt) :] if rendered.startswith(prompt) else None

    def _change(self, turn: int, was: str, becomes: str) -> TemplateChange:
        before, after = (np.array(self._tokenizer.encode_part(text), np.int32) for text in (was, becomes))
        position = common_length(before, after)
        end = position + NUM_CONTEXT_TOKENS
        parts = (before[max(0, position - NUM_CONTEXT_TOKENS) : position], before[position:end], after[position:end])
        texts = [text_of(part.tolist(), self._tokenizer) or "" for part in parts]
        return TemplateChange(self._name, turn, position, len(before), *texts)


def _numbered(value: Any, number: int) -> Any:
    return value.replace("{}", str(number)) if isinstance(value, str) else value

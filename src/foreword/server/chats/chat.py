"""Chat: one conversation to answer, as all dialects ask for it, and its answer in parts.

Knows messages and tools as chat templates take them, and the service; knows no dialect, and nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.request import SamplingParams
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.bodies.off_loop import off_loop
from foreword.server.chats.tools import Tool, ToolCallReader, ToolChoice, ToolUse
from foreword.server.service import Caller, Ending, Service, digests
from foreword.text.reply import Call, Part, Text

AUTO, WHOLE = ToolChoice(), Ending()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: `content` is one text, calls have their arguments as mappings."""
    tools: Sequence[Tool] = ()
    choice: ToolChoice = AUTO
    template_inputs: Mapping[str, Any] = field(default_factory=dict)
    """The chat template's inputs besides messages and tools, such as `{"enable_thinking": False}`."""
    ending: Ending = WHOLE
    num_bytes: int = 0
    """Length of the body that asked; work on long ones leaves the event loop."""
    thinking_budget: int | None = None
    """Most tokens of reasoning; None: any number."""


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """The new parts of one choice since its last delta."""

    parts: Sequence[Part]
    finish_reason: str | None
    """"tool_calls" in place of "stop" if the choice made a call."""


class ChatAnswer:
    """The running answer to a chat."""

    def __init__(self, answer: AnswerStream, tool_use: ToolUse) -> None:
        self.stream = answer
        self._tool_use = tool_use
        self._readers: dict[int, ToolCallReader | None] = {}

    def read(self, delta: Delta) -> ReplyDelta:
        """Split a choice's next delta into parts. Deltas must come in order, each once."""
        if delta.choice not in self._readers:
            self._readers[delta.choice] = self._tool_use.reader()
        reader = self._readers[delta.choice]
        if reader is None:
            return ReplyDelta([Text(delta.text)] if delta.text else [], delta.finish_reason)
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        calls = reader.num_calls and delta.finish_reason == "stop"
        return ReplyDelta(parts, "tool_calls" if calls else delta.finish_reason)


async def start_chat(
    service: Service, caller: Caller, response_id: str, chat: Chat, params: SamplingParams, *, stream: bool
) -> ChatAnswer:
    """Have a conversation answered; returns once the engine has queued it.

    Raises APIError, InvalidRequestError or ChatTemplateError for chats that this model, or this server, cannot answer.
    """
    use, inputs = await _tool_use(service, chat)
    params = replace(params, stop=(*params.stop, *use.stop))
    if use.is_forced:
        if params.open_constraint is not None:
            raise bad_request("structured outputs cannot be combined with a forced tool_choice", param="tool_choice")
        grammar = await off_loop(chat.num_bytes, use.grammar)
        params = replace(params, open_constraint=await service.compile_grammar(grammar))
    prompt = service.fit(await service.conversation(chat.messages, inputs, chat.ending), params)
    caller = replace(caller, template_digests=await off_loop(chat.num_bytes, lambda: digests(inputs)))
    answer = await service.start(caller, response_id, [prompt], params, stream=stream)
    return ChatAnswer(answer, use)


async def count_tokens(service: Service, chat: Chat) -> int:
    """The number of tokens of a conversation's prompt. Raises the errors of `start_chat`."""
    _, inputs = await _tool_use(service, chat)
    return len(await service.render_chat(chat.messages, ending=chat.ending, template_inputs=inputs))


async def _tool_use(service: Service, chat: Chat) -> tuple[ToolUse, dict[str, Any]]:
    """The use of a chat's tools, and all inputs of its template besides the messages."""
    template = None if service.llm.tokenizer is None else service.llm.tokenizer.chat_template
    use = await off_loop(chat.num_bytes, lambda: ToolUse(chat.tools, chat.choice, template))
    # Tools are in the prompt even if none may be called: the prefix stays the same.
    return use, {**chat.template_inputs, **({"tools": list(chat.tools)} if chat.tools else {})}


def text_of(parts: Sequence[Part]) -> str:
    """The text of an answer without its reasoning and its calls."""
    return "".join(part.text for part in parts if isinstance(part, Text))


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """The calls of an answer."""
    return [part for part in parts if isinstance(part, Call)]

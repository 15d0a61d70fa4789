"""Chat: a conversation to answer, in one form for all dialects, and its answer in parts."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreword.engine import Prompt
from foreword.errors import InvalidRequestError, PromptTooLongError, TooManyPicturesError
from foreword.request import SamplingParams, TokenConstraint, TokenLogprobs
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.chats.edits import linked_to_session
from foreword.server.chats.tools import Tool, ToolChoice, ToolUse
from foreword.server.crews import off_loop
from foreword.server.service import Caller, ChatMark, Ending, Service, digests
from foreword.text import Tokenizer
from foreword.text.conversation import Place, parse_json
from foreword.text.reply import Call, Part, ReplyReader, Text
from foreword.text.reply.turn import Turn

Messages = Sequence[Mapping[str, Any]]
STRIDE = 16
"""Messages are left out in steps of this number of messages, so that prompts of successive turns begin alike. If the
prompt would then have less than half of the allowed tokens, as few messages as possible are left out."""
AUTO, WHOLE = ToolChoice(), Ending()
LOWEST = -9999.0
"""Replaces the log probability of an impossible token, because JSON cannot express minus infinity."""


def thinking_inputs(template: str, *, enabled: bool | None = None, effort: str | None = None) -> dict[str, Any]:
    """Return the template inputs that a client sets (not None) and the template mentions."""
    inputs = {"enable_thinking": enabled, "reasoning_effort": effort}
    return {name: value for name, value in inputs.items() if value is not None and name in template}


async def shortened(messages: Messages, max_tokens: int, count: Callable[[Messages], Awaitable[int]]) -> Messages:
    """Leave the earliest messages of a conversation out, so that it has at most `max_tokens` tokens.

    System messages at its beginning stay, and a tool's result never stays without its call. The last message always
    stays, even if it is too long by itself. `count` returns the number of tokens of a conversation.
    """
    if await count(messages) <= max_tokens:
        return messages
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [at for at in range(head + 1, len(messages)) if messages[at]["role"] not in ("tool", "assistant")]
    if not starts:
        return messages

    low, high = 0, len(starts) - 1  # the last start is taken if no start fits
    while low < high:
        middle = (low + high) // 2
        if await count([*messages[:head], *messages[starts[middle] :]]) <= max_tokens:
            high = middle
        else:
            low = middle + 1
    longest = [*messages[:head], *messages[starts[low] :]]
    aligned = -(-(starts[low] - head) // STRIDE) * STRIDE + head
    start = next((start for start in starts if start >= aligned), None)
    if start is not None:
        even = [*messages[:head], *messages[start:]]
        if await count(even) >= max_tokens // 2:
            return even
    return longest


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer."""

    messages: Messages
    """Messages in the form for chat templates: `content` is one text, and calls have mappings as arguments."""
    tools: Sequence[Tool] = ()
    choice: ToolChoice = AUTO
    template_inputs: Mapping[str, Any] = field(default_factory=dict)
    """The chat template's inputs, except messages and tools, such as `{"enable_thinking": False}`."""
    ending: Ending = WHOLE
    shortens: bool = False
    """Whether the earliest messages are left out if the conversation is too long."""
    thinking_budget: int | None = None
    """Limit of the reasoning in tokens; None: no separate limit."""
    marks: Sequence[ChatMark] = ()
    """Places up to which the prompt is to be kept."""
    context: Sequence[int] = ()
    """Token ids of an earlier prompt and its answer. The messages follow them."""
    num_bytes: int = 0
    """Length of the call's body in bytes. Work on a long body runs in a thread, not on the event loop."""
    link: str | None = None
    """The method that copies the tokens after an edit from an earlier prompt of the session; None: no copies."""

    @property
    def inputs(self) -> dict[str, Any]:
        """All inputs of the template, except the messages.

        Tools are included even if no tool may be called, so that the prefix stays the same.
        """
        return {**self.template_inputs, **({"tools": list(self.tools)} if self.tools else {})}

    @property
    def system(self) -> dict[str, Any]:
        """The system messages at the beginning, in the form of a template input."""
        first = itertools.takewhile(lambda message: message["role"] == "system", self.messages)
        return {"system": [message["content"] for message in first]}


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """The new parts of one choice since its last delta."""

    parts: Sequence[Part]
    finish_reason: str | None
    """"tool_calls" in place of "stop" if the choice made a call."""


class ChatAnswer:
    """The running answer to a chat."""

    def __init__(
        self,
        answer: AnswerStream,
        tool_use: ToolUse,
        turn: Turn,
        tokenizer: Tokenizer,
        not_linked: str | None = None,
    ) -> None:
        self.stream = answer
        self.not_linked = not_linked
        """Why no token was linked although the chat has `link`; None: tokens were linked, or the chat has no `link`."""
        self._tool_use, self._turn, self._tokenizer = tool_use, turn, tokenizer
        self._readers: dict[int, ReplyReader | None] = {}

    def read(self, delta: Delta) -> ReplyDelta:
        """Split a choice's next delta into parts. Deltas must come in order, each once."""
        if delta.choice not in self._readers:
            self._readers[delta.choice] = self._tool_use.reader(self._turn)
        reader = self._readers[delta.choice]
        if reader is None:
            return ReplyDelta([Text(delta.text)] if delta.text else [], delta.finish_reason)
        num_calls = reader.num_calls
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        if self._tool_use.choice.at_most_one:
            parts = with_calls(parts, 0 if num_calls else 1)
        calls = reader.num_calls and delta.finish_reason == "stop"
        return ReplyDelta(parts, "tool_calls" if calls else delta.finish_reason)

    def num_reasoning_tokens(self) -> int:
        """Count the reasoning tokens of all choices, with markers. Takes O(tokens) time if there is reasoning."""
        return sum(
            self._tokenizer.num_tokens_in(choice.token_ids, reader.reasoning_spans)
            for choice in self.stream.outputs[0].outputs
            if (reader := self._readers.get(choice.index)) is not None and reader.reasoning_spans
        )

    def num_usage_bytes(self) -> int:
        """Estimate the bytes that `num_reasoning_tokens` reads, to decide whether to call it on the event loop."""
        if not any(reader is not None and reader.reasoning_spans for reader in self._readers.values()):
            return 0
        return 64 * sum(len(choice.token_ids) for choice in self.stream.outputs[0].outputs)


def with_calls(parts: Sequence[Part], max_calls: int) -> list[Part]:
    """Return the parts with at most the first `max_calls` calls."""
    numbers = itertools.count()
    return [part for part in parts if not isinstance(part, Call) or next(numbers) < max_calls]


async def start_chat(
    service: Service, caller: Caller, response_id: str, chat: Chat, params: SamplingParams, *, stream: bool
) -> ChatAnswer:
    """Answer a conversation. Returns as soon as the engine has queued the prompt.

    Raises APIError, InvalidRequestError or ChatTemplateError for chats that this model or this server cannot answer.
    """
    use = await _tool_use(service, chat)
    inputs = chat.inputs
    params = replace(params, stop=(*params.stop, *use.stop))
    if use.is_forced:
        if params.open_constraint is not None:
            raise bad_request("structured outputs cannot be combined with a forced tool_choice", param="tool_choice")
        params = replace(params, open_constraint=await _forced(service, chat, use))
    messages = chat.messages
    if chat.shortens and not chat.context:

        async def count(messages: Messages) -> int:
            try:
                return len((await service.conversation(messages, inputs, chat.ending)).token_ids)
            except (PromptTooLongError, TooManyPicturesError):  # the pictures alone are too many or too large
                return max_tokens + 1

        max_tokens = service.max_prompt_len(params.max_tokens)
        messages = await shortened(messages, max_tokens, count)
    marks = chat.marks if messages is chat.messages else _still_there(chat, messages)
    if chat.context:
        prompt = service.fit(await _continued(service, chat), params)
    else:
        prompt = service.fit(await service.conversation(messages, inputs, chat.ending, marks), params)
    not_linked = None
    if chat.link is not None:
        prompt, not_linked = await linked_to_session(service, caller, prompt, chat.link, params)
    caller = replace(caller, template_digests=await off_loop(chat.num_bytes, lambda: digests(inputs | chat.system)))
    turn, limits = Turn(service.tokenizer, prompt.token_ids), service.llm.engine.limits
    limit = turn.limit(
        params.open_constraint,
        budget=chat.thinking_budget,
        vocab_size=limits.vocab_size,
        end_token_ids=limits.eos_token_ids,
        is_call=use.is_forced,
    )
    params = replace(params, open_constraint=limit, keep_markers=True)
    answer = await service.start(caller, response_id, [prompt], params, stream=stream)
    return ChatAnswer(answer, use, turn, service.tokenizer, not_linked)


async def _continued(service: Service, chat: Chat) -> Prompt:
    """Return the prompt of messages that follow a context: the context, then the template's text after an answer.

    Raises APIError 400 if the end of an answer cannot be found in the template's text.
    """
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
    tokenizer, messages = service.tokenizer, [*before, *chat.messages]
    token_ids, [end] = await service.crews.text.run(
        lambda: tokenizer.render_places(messages, [Place(1, 1)], template_inputs=chat.inputs, **chat.ending.keywords)
    )
    if not end or not tokenizer.prompt_text(token_ids[:end].tolist()).endswith("."):
        raise bad_request("context is not supported with this model's chat template; send messages", param="context")
    return Prompt(np.concatenate([np.array(chat.context, np.int32), token_ids[end:]]), begins_reply=True)


def _still_there(chat: Chat, messages: Messages) -> list[ChatMark]:
    """Return the marks whose messages are still in the shortened conversation, with their new places."""
    index_of = {id(message): index for index, message in enumerate(messages)}
    marks = []
    for mark in chat.marks:
        at = mark.place.message
        index = None if at is None else index_of.get(id(chat.messages[at]))
        if at is None or index is not None:
            marks.append(replace(mark, place=replace(mark.place, message=index)))
    return marks


async def num_prompt_tokens(service: Service, chat: Chat) -> int:
    """Count the tokens of a conversation's prompt. Raises the errors of `start_chat`."""
    return len((await read_prompt(service, replace(chat, marks=()))).token_ids)


async def read_prompt(service: Service, chat: Chat) -> Prompt:
    """Return a conversation's prompt with its marks. Raises the errors of `start_chat`."""
    await _tool_use(service, chat)
    return await service.conversation(chat.messages, chat.inputs, chat.ending, chat.marks)


async def _forced(service: Service, chat: Chat, use: ToolUse) -> Callable[[], TokenConstraint]:
    """Compile constraints on forced calls, without the patterns that no grammar can follow.

    Raises InvalidRequestError for patterns that are not regular expressions.
    """
    try:
        return await service.compile_grammar(await off_loop(chat.num_bytes, use.grammar))
    except InvalidRequestError:
        grammars = service.llm.grammars
        left_out = await service.crews.grammars.run(
            lambda: use.relax(lambda pattern: grammars.can_follow(pattern) or grammars.is_broken(pattern))
        )
        if not left_out:
            raise
        service.logged_patterns.note(left_out)
    return await service.compile_grammar(await off_loop(chat.num_bytes, use.grammar))


async def _tool_use(service: Service, chat: Chat) -> ToolUse:
    tokenizer = service.tokenizer
    return await off_loop(chat.num_bytes, lambda: ToolUse(chat.tools, chat.choice, tokenizer))


def arguments_of(call: Call) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; None if the call was cut off, or if they are no JSON object."""
    try:
        read = parse_json(call.arguments) if call.is_complete else None
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def bytes_per_token(num_top: int | None) -> int:
    """Estimate a token's bytes in an answer with `num_top` other tokens' log probabilities (None: without any)."""
    return 8 if num_top is None else 128 * (1 + num_top)


def num_bytes(deltas: Sequence[Delta], num_top: int) -> int:
    """Estimate the bytes of these deltas."""
    return sum(len(delta.token_ids) * bytes_per_token(None if delta.logprobs is None else num_top) for delta in deltas)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """Return text, bytes and log probability of each token, and of the `num_top` likeliest tokens in its place."""
    content = []
    for token_id, of_position in zip(token_ids, logprobs, strict=True):
        top = sorted(of_position.items(), key=lambda item: item[1].rank)[:num_top]
        content.append(
            {
                **_token(tokenizer, token_id, of_position[token_id].logprob),
                "top_logprobs": [_token(tokenizer, other, logprob.logprob) for other, logprob in top],
            }
        )
    return content


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelt = tokenizer.token_bytes(token_id)
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": None if spelt is None else list(spelt),
    }

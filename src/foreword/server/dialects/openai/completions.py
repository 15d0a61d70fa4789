"""/v1/chat/completions and /v1/completions: calls whose answers have choices."""

from __future__ import annotations

import base64
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import TokenLogprobs
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.calls import Call, CallWith, sampling_of, sampling_params
from foreword.server.chats.chat import (
    Chat,
    ChatAnswer,
    bytes_per_token,
    chat_logprobs,
    num_bytes,
    start_chat,
)
from foreword.server.chats.tools import ToolChoice
from foreword.server.crews import off_loop
from foreword.server.dialect import Event
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.caching import Breakpoints, Caching, Extras, check_beside_link
from foreword.server.dialects.openai.fields import (
    ChatRequest,
    CompletionRequest,
    NamedToolChoice,
    PromptEmbeds,
    TextCall,
)
from foreword.server.dialects.openai.messages import (
    check_call,
    ending_of,
    plain_messages,
    plain_tools,
    structured_outputs,
    template_inputs,
)
from foreword.server.http import AnswerWriter, respond
from foreword.server.service import Service, new_id
from foreword.text.detokenizer import Detokenizer
from foreword.text.reply import Call as ToolCall
from foreword.text.reply import Part, Reasoning, Text

router = APIRouter(tags=["openai"])
Chunk = dict[str, Any]
AnyChoices = ChatRequest | TextCall


class ChoicesAnswer(AnswerWriter):
    """Writes one answer with its choices."""

    object_name: str
    chunk_name: str
    piece_depth = 5

    def __init__(self, call: Call[AnyChoices], answer: AnswerStream, extras: Extras) -> None:
        self.answer = answer
        self._extras = extras
        self._service = call.service
        self._body = call.body
        self._num_top = 0
        self._hides_answer = False
        method = answer.jobs[0].record.approximate
        self._approximate = {} if method is None else {"approximate": method}

    def _frame(self, object_name: str, choices: list[Chunk]) -> Chunk:
        record = self.answer.jobs[0].record
        return {
            "id": record.response_id,
            "object": object_name,
            "created": int(record.created),
            "model": self._body.model or self._service.model_name,
            "system_fingerprint": None,
            "choices": choices,
            **self._approximate,
        }

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        return num_bytes(deltas, self._num_top)

    def whole(self, deltas: Sequence[Delta]) -> Chunk:
        choices = [self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)]
        last = {"usage": self._usage(), **self._extras.of(self.answer)}
        return self._frame(self.object_name, choices) | last

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield the events of a streamed answer. Their names are None, because OpenAI's events have no names here."""
        yield self._chunks(self._first_choices())
        async for events in super().events():
            yield events
        options, extras = self._body.stream_options, self._extras.of(self.answer)
        with_usage = options is not None and bool(options.include_usage)
        if with_usage or extras:
            last = {"usage": await off_loop(self._num_usage_bytes(), self._usage)} if with_usage else {}
            yield [(None, {**self._frame(self.chunk_name, []), **last, **extras})]

    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        return self._chunks(choice for delta in deltas for choice in self._chunk_choices(delta))

    def _chunks(self, choices: Iterable[Chunk]) -> list[Event]:
        """Return a chunk for each of these choices, with the usage so far if the call asks for it."""
        options, used = self._body.stream_options, Chunk()
        if options is not None and options.include_usage:
            is_continuous, hides_answer = options.continuous_usage_stats, self._hides_answer
            used["usage"] = form.usage_so_far(self.answer, hides_answer=hides_answer) if is_continuous else None
        return [(None, {**self._frame(self.chunk_name, [choice]), **used}) for choice in choices]

    def _usage(self) -> Chunk:
        num_reasoning = self._num_reasoning_tokens()
        return form.usage(self.answer, self._service, num_reasoning, hides_answer=self._hides_answer)

    def _num_reasoning_tokens(self) -> int:
        return 0

    def _num_usage_bytes(self) -> int:
        """Estimate the bytes that `_usage` reads."""
        return 0

    def _first_choices(self) -> list[Chunk]:
        return []

    @abstractmethod
    def _choice(self, delta: Delta) -> Chunk:
        """Return one choice of a whole answer."""

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        """Return choices with the new text of a delta. Each choice becomes a chunk."""


@router.post("/v1/chat/completions")
async def chat_completions(call: CallWith[ChatRequest]) -> Response:
    """Answer a conversation."""
    body, service = call.body, call.service
    check_call(call)
    chat, caching = await call.work(lambda: _chat(body, call.num_bytes))
    if body.link is not None:
        check_beside_link(call, caching)
    params = await sampling_params(service, _sampling(body), structured_outputs(body, body.response_format))
    if body.prediction is not None:
        params = replace(params, prediction_token_ids=await service.encode_part(body.prediction.text))
    extras = Extras(call, "chat.completions", caching)
    answer = await start_chat(service, extras.caller, new_id("chatcmpl-"), chat, params, stream=bool(body.stream))
    return await respond(call.request, _ChatCompletion(call, answer, extras))


def _chat(body: ChatRequest, num_bytes: int) -> tuple[Chat, Caching]:
    breakpoints = Breakpoints()
    messages = plain_messages(body.messages, breakpoints)
    caching = Caching(body, breakpoints)
    chat = Chat(
        messages,
        plain_tools(body.tools),
        _tool_choice(body),
        template_inputs(body.reasoning_effort, body.chat_template_kwargs),
        ending_of(body),
        thinking_budget=body.thinking_budget,
        marks=caching.chat_marks(len(messages)),
        num_bytes=num_bytes,
        link=body.link,
    )
    return chat, caching


def _tool_choice(body: ChatRequest) -> ToolChoice:
    tool_choice, at_most_one = body.tool_choice, body.parallel_tool_calls is False
    if tool_choice not in (None, "none") and not body.tools:
        raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
    if tool_choice is None or isinstance(tool_choice, str):
        choice = ToolChoice(tool_choice or "auto", at_most_one=at_most_one)
    else:
        choice = ToolChoice("required", (tool_choice.function.name,), at_most_one=True)
    if choice.mode == "required" and body.response_format is not None and body.response_format.type != "text":
        raise bad_request("response_format cannot be combined with a forced tool_choice", param="tool_choice")
    return choice


def _sampling(body: ChatRequest) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_of(body) | {"max_tokens": max_tokens, "logprobs": logprobs}


class _ChatCompletion(ChoicesAnswer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, call: Call[ChatRequest], answer: ChatAnswer, extras: Extras) -> None:
        super().__init__(call, answer.stream, extras)
        self._num_top = call.body.top_logprobs or 0
        self._chat_answer = answer
        self._is_named = isinstance(call.body.tool_choice, NamedToolChoice)
        self._num_sent: dict[int, int] = {}
        """The number of calls that a stream has sent, by choice."""

    def _parts(self, delta: Delta) -> tuple[Sequence[Part], str | None]:
        """Return the new parts of a choice, and its finish reason.

        If the client named the function to call, a call ends with "stop" in place of "tool_calls".
        """
        reply = self._chat_answer.read(delta)
        return reply.parts, delta.finish_reason if self._is_named else reply.finish_reason

    def _usage(self) -> Chunk:
        used, why = super()._usage(), self._chat_answer.not_linked
        return used if why is None else used | {"foreword": {**used.get("foreword", {}), "not_linked": why}}

    def _num_reasoning_tokens(self) -> int:
        return self._chat_answer.num_reasoning_tokens()

    def _num_usage_bytes(self) -> int:
        return self._chat_answer.num_usage_bytes()

    def _choice(self, delta: Delta) -> Chunk:
        parts, finish_reason = self._parts(delta)
        calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
        text, reasoning = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Text, Reasoning))
        message: Chunk = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": delta.choice,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _first_choices(self) -> list[Chunk]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._body.n or 1)
        ]

    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        parts, finish_reason = self._parts(delta)
        logprobs = self._logprobs(delta)
        if not parts and (logprobs or finish_reason is None):  # tokens without text yet; a chunk shows progress
            parts = [Text("")]
        changes = [change for part in parts for change in self._changes(delta.choice, part)]
        choices: list[Chunk] = [
            {"index": delta.choice, "delta": change, "logprobs": logprobs if not at else None, "finish_reason": None}
            for at, change in enumerate(changes)
        ]
        if finish_reason is not None:
            end = {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}
            choices.append({"index": delta.choice, "delta": {}, "logprobs": None, **end})
        return choices

    def _changes(self, choice: int, part: Part) -> list[Chunk]:
        """Return the `delta` of a text, or the two `delta`s of a call: one with the name, one with the arguments."""
        if not isinstance(part, ToolCall):
            return [{"reasoning_content" if isinstance(part, Reasoning) else "content": part.text}]
        index = self._num_sent.get(choice, 0)
        self._num_sent[choice] = index + 1
        call = _call(part)
        begun = {"index": index, **call, "function": {"name": part.name, "arguments": ""}}
        return [{"tool_calls": [begun]}, {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}]

    def _logprobs(self, delta: Delta) -> Chunk | None:
        if not delta.logprobs:
            return None
        content = chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        return {"content": content, "refusal": None}


def _call(call: ToolCall) -> Chunk:
    """Return a call in OpenAI's form, with the id that the model wrote, or a new id."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@router.post("/v1/completions")
async def completions(call: CallWith[CompletionRequest]) -> Response:
    """Continue one or several texts."""
    return await complete(call, partial(_prompts, call), "completions")


async def complete(call: Call[TextCall], find: Callable[[], Awaitable[Sequence[Prompt]]], endpoint: str) -> Response:
    """Answer a call by continuing the prompts that `find` returns. `endpoint` is the call's name in records."""
    body, service = call.body, call.service
    check_call(call)
    if body.best_of not in (None, body.n or 1):
        raise bad_request(f"best_of={body.best_of} must be equal to n; leave it out", param="best_of")
    caching = Caching(body)
    extras = Extras(call, endpoint, caching)
    params = await sampling_params(service, _text_sampling(body), structured_outputs(body, body.response_format))
    prompts = [
        service.fit(replace(prompt, marks=caching.text_marks(len(prompt.token_ids))), params) for prompt in await find()
    ]
    answer = await service.start(extras.caller, new_id("cmpl-"), prompts, params, stream=bool(body.stream))
    return await respond(call.request, _Completion(call, answer, extras))


def _text_sampling(body: TextCall) -> dict[str, Any]:
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 asks for nothing; use 1 or more, or echo=true", param="max_tokens")
    # The engine always generates a token. With max_tokens=0 the answer does not show this token.
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.score_from and (not body.echo or body.logprobs is None):
        raise bad_request("score_from is only allowed with echo=true and logprobs", param="score_from")
    of_prompt = body.logprobs if body.echo else None
    return sampling_of(body) | {"max_tokens": max_tokens, "logprobs": body.logprobs, "prompt_logprobs": of_prompt}


async def _prompts(call: Call[CompletionRequest]) -> list[Prompt]:
    body, service = call.body, call.service
    prompt: Any = body.prompt
    if body.prompt_embeds is not None:
        if body.echo:
            raise bad_request("echo repeats a prompt's text, and embeddings have none; leave it out", param="echo")
        return [await _begun_with(body.prompt_embeds, prompt, service)]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if isinstance(prompt[0], str):
        is_cut = body.truncate_prompt_tokens is not None
        return list(map(Prompt, await service.encode_each(prompt, service.tokenizer.encode, is_cut=is_cut)))
    return await call.work(lambda: [Prompt(np.array(token_ids, np.int32)) for token_ids in prompt])


async def _begun_with(field: PromptEmbeds, prompt: Any, service: Service) -> Prompt:
    """Return a prompt of embeddings, then the text or token ids of `prompt`. Raises APIError or InvalidRequestError."""
    reader = service.llm.embeds
    if reader is None:
        raise bad_request(
            "prompt_embeds need a server that was started with --enable-prompt-embeds", param="prompt_embeds"
        )
    forms = [value is not None for value in (field.safetensors, field.data, field.shape)]
    if forms not in ([True, False, False], [False, True, True]):
        raise bad_request("prompt_embeds need data and shape, or safetensors alone", param="prompt_embeds")
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        raise bad_request("prompt_embeds take one prompt after them, but prompt is a list; send a text", param="prompt")

    def read() -> Prompt:
        if field.safetensors is not None:
            embeds = reader.read_safetensors(_bytes_of(field.safetensors))
        else:
            assert field.data is not None
            assert field.shape is not None
            embeds = reader.read_raw(_bytes_of(field.data), field.shape, field.dtype)
        after = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        return service.llm.read_prompt({**after, "prompt_embeds": embeds})

    return await service.crews.text.run(read)


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise bad_request(f"prompt_embeds are not base64 ({error})", param="prompt_embeds") from error


class _Completion(ChoicesAnswer):
    object_name = chunk_name = "text_completion"

    def __init__(self, call: Call[TextCall], answer: AnswerStream, extras: Extras) -> None:
        super().__init__(call, answer, extras)
        body = call.body
        self._num_top = body.logprobs or 0
        self._echo = bool(body.echo)
        self._hides_answer = body.max_tokens == 0
        self._num_each = body.n or 1
        self._texts: dict[int, Detokenizer | None] = {}
        """Index of a begun choice -> the detokenizer that finds its tokens' offsets; None without a tokenizer."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        echoed = sum(
            len(self.answer.jobs[delta.choice // self._num_each].prompt.token_ids)
            for delta in deltas
            if self._echo and delta.choice not in self._texts
        )
        return super().num_bytes(deltas) + echoed * bytes_per_token(
            self._num_top if self._body.logprobs is not None else None
        )

    def _choice(self, delta: Delta) -> Chunk:
        """Return a whole choice, or the next piece of a choice. In OpenAI's API both have the same form."""
        token_ids, text = list(delta.token_ids), delta.text
        logprobs: list[TokenLogprobs | None] | None = None if delta.logprobs is None else list(delta.logprobs)
        if self._hides_answer:
            token_ids, text, logprobs = [], "", None if logprobs is None else []
        begins, number = delta.choice not in self._texts, delta.choice // self._num_each
        if begins:
            self._texts[delta.choice] = self._open_text(number)
        if self._echo and begins:
            prompt_ids, prompt_text, prompt_logprobs = self._echoed(number)
            token_ids, text = prompt_ids + token_ids, prompt_text + text
            logprobs = None if logprobs is None else prompt_logprobs + logprobs
        return {
            "index": delta.choice,
            "text": text,
            "logprobs": None
            if logprobs is None
            else form.completion_logprobs(
                self._service.llm.tokenizer, token_ids, logprobs, self._num_top, self._offsets(delta.choice, token_ids)
            ),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _open_text(self, number: int) -> Detokenizer | None:
        tokenizer = self._service.llm.tokenizer
        if tokenizer is None:
            return None
        return tokenizer.detokenizer(after=() if self._echo else self.answer.jobs[number].prompt.token_ids.tolist())

    def _offsets(self, choice: int, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of a choice's next tokens in its text, including tokens that a stop string cut off."""
        text, tokenizer = self._texts[choice], self._service.llm.tokenizer
        return [0] * len(token_ids) if text is None or tokenizer is None else tokenizer.offsets(token_ids, text)

    def _echoed(self, number: int) -> tuple[list[int], str, list[TokenLogprobs | None]]:
        """Return tokens, text and log probabilities of a prompt."""
        token_ids: list[int] = self.answer.jobs[number].prompt.token_ids.tolist()
        tokenizer = self._service.llm.tokenizer
        text = "" if tokenizer is None else tokenizer.prompt_text(token_ids)
        return token_ids, text, self.answer.outputs[number].prompt_logprobs or []

    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        return [self._choice(delta)]

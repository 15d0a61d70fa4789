"""/v1/completions.

Knows OpenAI's fields and their meaning for texts and token ids; choices.py has the frame of answers.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import TokenLogprobs
from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import bad_request
from foreword.server.calls import Limits, caller_of, sampling_params
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.caching import Caching
from foreword.server.dialects.openai.choices import ChoicesAnswer, Chunk
from foreword.server.dialects.openai.extras import Extras, structured_outputs
from foreword.server.dialects.openai.fields import CompletionRequest, PromptEmbeds, TextCall
from foreword.server.dialects.openai.messages import check_call
from foreword.server.http import Authorized, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.service import Service, new_id
from foreword.text.detokenizer import Detokenizer

router = APIRouter(tags=["openai"])


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def completions(
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))], request: Request, tenant: Authorized
) -> Response:
    """Continue one or several texts."""
    return await complete(body, partial(_prompts, body), request, tenant, "completions")


FindPrompts = Callable[[Service, Request], Awaitable[Sequence[Prompt]]]


async def complete(body: TextCall, find: FindPrompts, request: Request, tenant: Tenant, endpoint: str) -> Response:
    """Answer a call that continues the prompts that `find` makes; `endpoint` names it in records."""
    service = service_of(request)
    check_call(service, tenant, body)
    if body.best_of not in (None, body.n or 1):
        raise bad_request(f"best_of={body.best_of} is not supported, other than equal to n", param="best_of")
    caching = Caching(body)
    caller = caller_of(body, request, tenant, endpoint)
    caller = replace(caller, is_uncached=caching.is_off)
    extras = Extras(service, caller, request, body, caching)
    limits = _completion_limits(body)
    params = await sampling_params(service, body, limits, structured_outputs(body, body.response_format))
    prompts = [
        service.fit(replace(prompt, marks=caching.text_marks(len(prompt.token_ids))), params)
        for prompt in await find(service, request)
    ]
    answer = await service.start(caller, new_id("cmpl-"), prompts, params, stream=bool(body.stream))
    return await respond(request, _Completion(service, answer, body, extras))


def _completion_limits(body: TextCall) -> Limits:
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 asks for nothing; use 1 or more, or echo=true", param="max_tokens")
    # The engine always generates something; with max_tokens=0 the answer does not show it.
    most = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.score_from and (not body.echo or body.logprobs is None):
        raise bad_request("score_from is only allowed with echo=true and logprobs", param="score_from")
    return Limits(most, body.logprobs, body.logprobs if body.echo else None)


async def _prompts(body: CompletionRequest, service: Service, request: Request) -> list[Prompt]:
    prompt: Any = body.prompt
    if body.prompt_embeds is not None:
        if body.echo:
            raise bad_request("echo repeats a prompt's text, and embeddings have none; leave it out", param="echo")
        return [await _begun_with(body.prompt_embeds, prompt, service)]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    if isinstance(prompt[0], str):
        is_cut = body.truncate_prompt_tokens is not None
        return [Prompt(one) for one in await service.encode_each(prompt, service.tokenizer.encode, is_cut=is_cut)]
    return await with_body(request, lambda: [Prompt(np.array(one, np.int32)) for one in prompt])


async def _begun_with(given: PromptEmbeds, rest: Any, service: Service) -> Prompt:
    """The prompt of embeddings, and of the text or the token ids after them. Raises APIError, InvalidRequestError."""
    reader = service.llm.embeds
    if reader is None:
        raise bad_request(
            "prompt_embeds need a server that was started with --enable-prompt-embeds", param="prompt_embeds"
        )
    forms = [one is not None for one in (given.safetensors, given.data, given.shape)]
    if forms not in ([True, False, False], [False, True, True]):
        raise bad_request("prompt_embeds need data and shape, or safetensors alone", param="prompt_embeds")
    if isinstance(rest, list) and not isinstance(rest[0], int):
        raise bad_request("prompt_embeds take one prompt after them, and prompt is a list", param="prompt")

    def read() -> Prompt:
        if given.safetensors is not None:
            embeds = reader.read_safetensors(_bytes_of(given.safetensors))
        else:
            assert given.data is not None
            assert given.shape is not None
            embeds = reader.read_raw(_bytes_of(given.data), given.shape, given.dtype)
        after = {"prompt": rest} if isinstance(rest, str) else {"prompt_token_ids": rest}
        return service.llm.read_prompt({**after, "prompt_embeds": embeds})

    return await service.crews.text.run(read)


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise bad_request(f"prompt_embeds are not base64 ({error})", param="prompt_embeds") from error


class _Completion(ChoicesAnswer):
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, answer: AnswerStream, body: TextCall, extras: Extras) -> None:
        super().__init__(service, answer, body, extras)
        self._num_top = body.logprobs or 0
        self._echo = bool(body.echo)
        self._hides_answer = body.max_tokens == 0
        self._num_each = body.n or 1
        self._texts: dict[int, Detokenizer | None] = {}
        """For each choice that has begun what finds the places of its tokens; None without a tokenizer."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        echoed = sum(
            len(self.answer.jobs[delta.choice // self._num_each].prompt.token_ids)
            for delta in deltas
            if self._echo and delta.choice not in self._texts
        )
        return super().num_bytes(deltas) + echoed * form.bytes_per_token(
            self._num_top if self._body.logprobs is not None else None
        )

    def _choice(self, delta: Delta) -> Chunk:
        """A whole choice, or the next piece of one: OpenAI gives both the same form."""
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
        """Where a choice's next tokens begin in its text; those that a stop string cut off where they would."""
        text, tokenizer = self._texts[choice], self._service.llm.tokenizer
        return [0] * len(token_ids) if text is None or tokenizer is None else tokenizer.offsets(token_ids, text)

    def _echoed(self, number: int) -> tuple[list[int], str, list[TokenLogprobs | None]]:
        """Tokens, text and log probabilities of a prompt."""
        token_ids: list[int] = self.answer.jobs[number].prompt.token_ids.tolist()
        tokenizer = self._service.llm.tokenizer
        text = "" if tokenizer is None else tokenizer.prompt_text(token_ids)
        return token_ids, text, self.answer.outputs[number].prompt_logprobs or []

    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        return [self._choice(delta)]

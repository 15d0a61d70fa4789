"""/v1/score and /v1/rerank: how likely a model is to answer with each of a few tokens, for many prompts at once.

Knows the fields of SGLang's scores, and of Jina's and Cohere's rankings. All prompts of a call are queued together;
what they share at their beginnings is computed once, and of each prompt one row of logits is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import SamplingParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import bad_request
from foreword.server.bodies.off_loop import off_loop
from foreword.server.calls import caller_of
from foreword.server.dialects.openai.fields import RerankRequest, ScoreRequest
from foreword.server.http import Authorized, finished, json_response, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.service import LONG_TEXT, Service, TokenIds, new_id

router = APIRouter(tags=["scores"])


@router.post("/v1/score", openapi_extra=takes(ScoreRequest))
async def score(
    body: Annotated[ScoreRequest, Depends(body_of(ScoreRequest))], request: Request, tenant: Authorized
) -> Response:
    """The probabilities of some tokens after a query with each of some items."""
    service = service_of(request)
    service.check_model(body.model)
    items = [body.items] if isinstance(body.items, str) else body.items
    query: Any = body.query
    if isinstance(query, str) != isinstance(items[0], str):
        raise bad_request("query and items must both be texts, or both be lists of token ids", param="items")

    def encode(item: Any) -> TokenIds:
        both = item + query if body.item_first else query + item
        return service.tokenizer.encode(both) if isinstance(both, str) else np.array(both, np.int32)

    prompts = [Prompt(one) for one in await service.encode_each(items, encode, num_beside=len(query))]
    run = _Run(service, new_id("score-"), body, request, tenant)
    found = await run.logprobs(prompts, body.label_token_ids)
    shown = [_shares(own) if body.apply_softmax else [math.exp(value) for value in own] for own in found]
    answer = run.answer(body.model) | {"object": "scoring", "scores": shown}
    return await off_loop(24 * len(shown) * len(shown[0]), lambda: json_response(answer))


@router.post("/rerank", openapi_extra=takes(RerankRequest))
@router.post("/v1/rerank", openapi_extra=takes(RerankRequest))
@router.post("/v2/rerank", openapi_extra=takes(RerankRequest))
async def rerank(
    body: Annotated[RerankRequest, Depends(body_of(RerankRequest))], request: Request, tenant: Authorized
) -> Response:
    """Documents by their relevance to a query, the most relevant first."""
    service = service_of(request)
    service.check_model(body.model)
    template, labels = service.score_template, service.score_labels
    if template is None:
        raise bad_request(
            "this server has no score template, without which scores mean nothing; start it with --score-template "
            "qwen3-reranker, or with a file of your model's",
            code="no_score_template",
        )
    texts = [one if isinstance(one, str) else one.text for one in body.documents]

    def render(text: str) -> TokenIds:
        return template.tokens(service.tokenizer, body.query, text, body.instruction)

    run = _Run(service, new_id("rerank-"), body, request, tenant)
    shown = await service.encode_each(texts, render, num_beside=LONG_TEXT)  # a template takes its time
    found = await run.logprobs([Prompt(one, begins_reply=True) for one in shown], labels)
    relevance = [_shares(own)[0] for own in found]
    order = sorted(range(len(texts)), key=lambda at: -relevance[at])[: body.top_n]
    shows = body.return_documents if body.return_documents is not None else request.url.path != "/v2/rerank"
    results = [
        {"index": at, "relevance_score": relevance[at], **({"document": {"text": texts[at]}} if shows else {})}
        for at in order
    ]
    answer = run.answer(body.model) | {"results": results}
    return await with_body(request, lambda: json_response(answer))  # which repeats the documents


class _Run:
    """One call's prompts."""

    def __init__(self, service: Service, response_id: str, body: Any, request: Request, tenant: Tenant) -> None:
        self._response_id = response_id
        self._service = service
        self._caller = caller_of(body, request, tenant, "score")
        self._num_tokens = self._num_cached = 0

    async def logprobs(self, prompts: Sequence[Prompt], token_ids: Sequence[int]) -> list[list[float]]:
        """Log probabilities of tokens after each prompt."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=tuple(token_ids))
        answer = await self._service.start(self._caller, self._response_id, prompts, params, stream=False)
        await finished(answer)
        self._num_tokens = sum(len(output.prompt_token_ids) for output in answer.outputs)
        self._num_cached = sum(output.num_cached_tokens for output in answer.outputs)
        found = []
        for output in answer.outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            [of_position] = logprobs
            found.append([of_position[token_id].logprob for token_id in token_ids])
        return found

    def answer(self, model: str | None) -> dict[str, Any]:
        """The fields that all answers have."""
        tokens = {"prompt_tokens": self._num_tokens, "completion_tokens": 0, "total_tokens": self._num_tokens}
        usage = tokens | {"prompt_tokens_details": {"cached_tokens": self._num_cached}}
        return {"id": self._response_id, "model": model or self._service.model_name, "usage": usage}


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Probabilities of tokens among each other."""
    most = max(logprobs)
    if most == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - most) for value in logprobs]
    return [weight / sum(weights) for weight in weights]

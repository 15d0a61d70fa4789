"""/v1/score, /v1/rerank and /v1/classify, which give probabilities of a few tokens as answers, and /v1/embeddings.

The fields are as in SGLang's scores, Jina's and Cohere's rankings, and vLLM's classes. All prompts of a call are queued
together, so that common prefixes are computed once. Each prompt needs one row of logits.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import SamplingParams
from foreword.server.api_errors import bad_request
from foreword.server.calls import Call, CallWith
from foreword.server.chats.chat import LOWEST
from foreword.server.chats.score_template import Judge
from foreword.server.crews import off_loop
from foreword.server.dialects.openai.fields import (
    ClassifyRequest,
    EmbeddingsRequest,
    LabelCall,
    RerankRequest,
    ScoreRequest,
)
from foreword.server.embeddings import embed
from foreword.server.http import finished, json_response
from foreword.server.service import LONG_TEXT, TokenIds, new_id

router = APIRouter()


@router.post("/v1/score", tags=["scores"])
async def score(call: CallWith[ScoreRequest]) -> Response:
    """Return the probabilities of the given tokens after a query together with each item."""
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    items = [body.items] if isinstance(body.items, str) else body.items
    query: Any = body.query
    if isinstance(query, str) != isinstance(items[0], str):
        raise bad_request("query and items must both be texts, or both be lists of token ids", param="items")

    wrong, size = max(body.label_token_ids), service.llm.engine.limits.vocab_size
    if wrong >= size:
        raise bad_request(
            f"token id {wrong} in label_token_ids is out of range; the model's ids are 0 to {size - 1}",
            param="label_token_ids",
        )

    def encode(item: Any) -> TokenIds:
        both = item + query if body.item_first else query + item
        return service.tokenizer.encode(both) if isinstance(both, str) else np.array(both, np.int32)

    prompts = [Prompt(token_ids) for token_ids in await service.encode_each(items, encode, num_beside=len(query))]
    run = _Run(call, "score-")
    logprobs = await run.logprobs(prompts, body.label_token_ids, among_each_other=bool(body.apply_softmax))
    scores = [_shares(row) if body.apply_softmax else [math.exp(value) for value in row] for row in logprobs]
    answer = run.fields | {"object": "scoring", "scores": scores}
    return await off_loop(24 * len(scores) * len(scores[0]), lambda: json_response(answer))


@router.post("/rerank", tags=["scores"])
@router.post("/v1/rerank", tags=["scores"])
@router.post("/v2/rerank", tags=["scores"])
async def rerank(call: CallWith[RerankRequest]) -> Response:
    """Sort documents by their relevance to a query, the most relevant first."""
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    remedy = "--score-template qwen3-reranker, or with a file of your model's"
    judge = _judge(service.ranking, "score template", remedy)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]

    def render(text: str) -> TokenIds:
        fields = {"query": body.query, "document": text}
        return judge.template.tokens(service.tokenizer, fields, body.instruction)

    run = _Run(call, "rerank-")
    logprobs = await run.judged(judge, texts, render)
    relevance = [_shares(of_document)[0] for of_document in logprobs]
    order = sorted(range(len(texts)), key=lambda at: -relevance[at])[: body.top_n]
    shows = body.return_documents if body.return_documents is not None else call.request.url.path != "/v2/rerank"
    results = [
        {"index": at, "relevance_score": relevance[at], **({"document": {"text": texts[at]}} if shows else {})}
        for at in order
    ]
    answer = run.fields | {"results": results}
    return await call.work(lambda: json_response(answer))  # the answer repeats the documents


@router.post("/classify", tags=["scores"])
@router.post("/v1/classify", tags=["scores"])
async def classify(call: CallWith[ClassifyRequest]) -> Response:
    """Return the label of each text, and the probabilities of all labels."""
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    judge = _judge(service.classifying, "classify template", "--classify-template and a TOML file")
    texts = [body.input] if isinstance(body.input, str) else body.input

    def render(text: str) -> TokenIds:
        return judge.template.tokens(service.tokenizer, {"input": text}, body.instruction)

    run = _Run(call, "classify-")
    logprobs = await run.judged(judge, texts, render)
    labels = judge.template.labels
    data = [
        {
            "index": at,
            "label": labels[of_text.index(max(of_text))],
            "probs": [max(value, LOWEST) for value in of_text] if body.use_activation is False else _shares(of_text),
            "num_classes": len(labels),
        }
        for at, of_text in enumerate(logprobs)
    ]
    answer = run.fields | {"object": "list", "created": int(time.time()), "data": data, "labels": labels}
    return await off_loop(24 * len(data) * len(labels), lambda: json_response(answer))


def _judge(judge: Judge | None, what: str, remedy: str) -> Judge:
    """Return the judge. Raises APIError 400 if the server was started without this template."""
    if judge is None:
        raise bad_request(
            f"this server has no {what}, without which scores mean nothing; start it with {remedy}",
            code=f"no_{what.replace(' ', '_')}",
        )
    return judge


class _Run:
    """The prompts of one call."""

    def __init__(self, call: Call[LabelCall], prefix: str) -> None:
        """`prefix`: the beginning of the response's id."""
        self._service, self._caller = call.service, call.caller("score")
        self._certifies = call.body.foreword is not None and call.body.foreword.certificate
        self.fields: dict[str, Any] = {"id": new_id(prefix), "model": call.body.model or call.service.model_name}
        """The fields that all answers have."""

    async def logprobs(
        self, prompts: Sequence[Prompt], token_ids: Sequence[int], *, among_each_other: bool = True
    ) -> list[list[float]]:
        """Return log probabilities of tokens after each prompt, normalised over these tokens or over all tokens."""
        distinct = tuple(dict.fromkeys(token_ids))
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            label_token_ids=distinct if among_each_other else (),
            logprob_token_ids=() if among_each_other else distinct,
            certify=self._certifies,
        )
        answer = await self._service.start(self._caller, self.fields["id"], prompts, params, stream=False)
        await finished(answer)
        num_tokens = sum(len(output.prompt_token_ids) for output in answer.outputs)
        num_cached = sum(output.num_cached_tokens for output in answer.outputs)
        tokens = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        self.fields["usage"] = tokens | {"prompt_tokens_details": {"cached_tokens": num_cached}}
        if self._certifies:
            self.fields["foreword"] = {"certificate": self._service.llm.certificate(answer.outputs)}
        rows = []
        for output in answer.outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            [of_position] = logprobs
            rows.append([of_position[token_id].logprob for token_id in token_ids])
        return rows

    async def judged(self, judge: Judge, texts: Sequence[str], render: Callable[[str], TokenIds]) -> list[list[float]]:
        """Return the log probabilities of a judge's labels for each text."""
        prompts = await self._service.encode_each(texts, render, num_beside=LONG_TEXT)  # in threads: rendering is slow
        return await self.logprobs([Prompt(token_ids, begins_reply=True) for token_ids in prompts], judge.label_ids)


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Convert log probabilities to probabilities that add up to 1."""
    largest = max(logprobs)
    if largest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - largest) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


@router.post("/v1/embeddings", tags=["openai"])
async def embeddings(call: CallWith[EmbeddingsRequest]) -> Response:
    """Return the vectors of texts."""
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    embedded = await embed(service, call.caller("embeddings"), new_id("embd-"), body.input, body.dimensions)
    answer = {
        "object": "list",
        "model": body.model or service.model_name,
        "usage": {
            "prompt_tokens": embedded.num_tokens,
            "total_tokens": embedded.num_tokens,
            "prompt_tokens_details": {"cached_tokens": embedded.num_cached_tokens},
        },
    }

    def encode(vector: Any) -> Any:
        if body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()

    def write() -> Response:
        vectors = map(encode, embedded.vectors)
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        return json_response({**answer, "data": data})

    return await off_loop(embedded.num_json_bytes, write)

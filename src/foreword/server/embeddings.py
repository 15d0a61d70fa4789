"""Embeds the texts of one call, for all dialects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.engine import Prompt
from foreword.model.checkpoint.pooling import FloatArray
from foreword.request import SamplingParams
from foreword.server.api_errors import bad_request
from foreword.server.http import finished
from foreword.server.service import Caller, Service, TokenIds


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embeddings of one call."""

    vectors: Sequence[FloatArray]
    num_tokens: int
    num_cached_tokens: int

    @property
    def num_json_bytes(self) -> int:
        """The estimated bytes of the vectors as JSON."""
        return sum(16 * len(vector) for vector in self.vectors)


async def embed(
    service: Service, caller: Caller, response_id: str, inputs: Any, dimensions: int | None, *, truncates: bool = False
) -> Embedded:
    """Embed a text, a list of token ids, or several texts or lists. Raises APIError or InvalidRequestError.

    `truncates`: whether the ends of texts that are too long are cut off.
    """
    llm = service.llm
    llm.pooling.check(dimensions, llm.engine.limits.hidden_size)
    is_single = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    texts = [inputs] if is_single else inputs
    if not texts:
        return Embedded([], 0, 0)
    if not all(map(len, texts)):
        raise bad_request("input has an empty text; leave it out", param="input")

    def encode(text: Any) -> TokenIds:
        return service.tokenizer.encode(text) if isinstance(text, str) else np.array(text, np.int32)

    prompts = [
        Prompt(_beginning(token_ids, service) if truncates else token_ids)
        for token_ids in await service.encode_each(texts, encode, is_cut=truncates)
    ]
    answer = await service.start(caller, response_id, prompts, SamplingParams.for_embedding(), stream=False)
    await finished(answer)
    return Embedded(
        [llm.pooling.embedding(output.hidden_state, dimensions) for output in answer.outputs],
        sum(len(prompt.token_ids) for prompt in prompts),
        sum(output.num_cached_tokens for output in answer.outputs),
    )


def _beginning(token_ids: TokenIds, service: Service) -> TokenIds:
    """Cut the end off a text that is too long. The tokenizer's end token, if any, stays last: pooling needs it."""
    limit = service.max_prompt_len(1)
    if len(token_ids) <= limit:
        return token_ids
    ends = service.tokenizer.encode("")[-1:]
    if not len(ends) or ends[0] != token_ids[-1]:
        return token_ids[:limit]
    return np.concatenate((token_ids[: limit - 1], ends))

"""Embeddings of several texts, as all dialects ask for them.

Knows prompts, the service and the model's pooling; knows no dialect.
"""

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
from foreword.server.service import Caller, Service


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embeddings of one call."""

    vectors: Sequence[FloatArray]
    num_tokens: int
    num_cached_tokens: int


async def embed(
    service: Service, caller: Caller, response_id: str, inputs: Any, dimensions: int | None, *, truncates: bool = False
) -> Embedded:
    """Embed a text, a list of token ids, or several of either. Raises APIError or InvalidRequestError.

    `truncates`: whether texts that are too long keep their beginning.
    """
    service.llm.pooling.check(dimensions)
    one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    prompts = []
    for text in [inputs] if one else inputs:
        if not len(text):
            raise bad_request("input has an empty text; leave it out", param="input")
        token_ids = await service.encode(text) if isinstance(text, str) else np.array(text, np.int32)
        most = service.max_prompt_len(1)
        prompts.append(Prompt(token_ids[:most] if truncates else token_ids))
    if not prompts:
        return Embedded([], 0, 0)
    params = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)
    answer = await service.start(caller, response_id, prompts, params, stream=False)
    await finished(answer)
    states = [output.hidden_state for output in answer.outputs if output.hidden_state is not None]
    return Embedded(
        [service.llm.pooling.embedding(state, dimensions) for state in states],
        sum(len(prompt.token_ids) for prompt in prompts),
        sum(output.num_cached_tokens for output in answer.outputs),
    )

"""Log probabilities of a chat's tokens, in the form that OpenAI gave them and others took over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.request import TokenLogprobs
from foreword.text import Tokenizer

LOWEST = -9999.0
"""Stands for the log probability of an impossible token, which JSON cannot express."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """For each token its text, bytes and log probability, and those of the `num_top` likeliest."""
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

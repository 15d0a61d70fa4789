"""Generates seeded traffic for several replicas: agents, batches of few-shot questions, independent prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreword.replay.keys import as_content_ids, chain
from foreword.replay.trace import RecordedRequest

BLOCK_TOKENS = 512
SPAN_S = 600.0


class _Ids:
    """Content ids, each used once."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, number: int) -> list[int]:
        self._next += number
        return list(range(self._next - number, self._next))


def _request(at_s: float, ids: Sequence[int], num_tokens: int, num_output: int) -> RecordedRequest:
    return RecordedRequest(1000 * at_s, chain(as_content_ids(ids)), num_tokens, num_output, BLOCK_TOKENS)


def _in_order(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    return sorted(requests, key=lambda request: request.timestamp_ms or 0.0)


def agents(seed: int, conversations: int = 200, turns: int = 12, system_tokens: int = 1500) -> list[RecordedRequest]:
    """Conversations that call tools: one system prompt for all, a dozen turns each, 350 tokens and an answer a turn."""
    rng, ids, found = np.random.default_rng(seed), _Ids(), []
    shared = ids.take(system_tokens // BLOCK_TOKENS)
    for begins_s in np.sort(rng.uniform(0, SPAN_S, conversations)).tolist():
        at_s, own, num_tokens = begins_s, list[int](), system_tokens + 50 + int(rng.gamma(2, 200))
        for _ in range(max(2, int(rng.poisson(turns)))):
            own += ids.take(max(0, num_tokens // BLOCK_TOKENS - len(shared) - len(own)))
            tail = ids.take(1) if num_tokens % BLOCK_TOKENS else []
            num_output = 20 + int(rng.gamma(1, 130))
            found.append(_request(at_s, shared + own + tail, num_tokens, num_output))
            num_tokens += num_output + int(rng.gamma(2, 350))
            at_s += float(rng.exponential(20.0)) + 1
    return _in_order(found)


def few_shot(seed: int, num_requests: int = 3000, num_tasks: int = 20) -> list[RecordedRequest]:
    """Batches of 20 to 200 short questions within 20 s, after the examples of a task (2,000 to 6,000 tokens)."""
    rng, ids, found = np.random.default_rng(seed), _Ids(), list[RecordedRequest]()
    examples = [ids.take(int(rng.integers(2000, 6000)) // BLOCK_TOKENS) for _ in range(num_tasks)]
    popularity = 1 / np.arange(1, num_tasks + 1)
    popularity /= popularity.sum()
    while len(found) < num_requests:
        number = min(num_requests - len(found), int(rng.integers(20, 200)))
        task = examples[int(rng.choice(num_tasks, p=popularity))]
        begins_s = float(rng.uniform(0, SPAN_S))
        for _ in range(number):
            question = 50 + int(rng.gamma(2, 150))
            at_s, own = begins_s + float(rng.uniform(0, 20)), ids.take(-(-question // BLOCK_TOKENS))
            num_tokens = len(task) * BLOCK_TOKENS + question
            found.append(_request(at_s, task + own, num_tokens, 10 + int(rng.gamma(1, 40))))
    return _in_order(found)


def independent(seed: int, num_requests: int = 3000) -> list[RecordedRequest]:
    """Prompts that share nothing, 2,000 tokens on average."""
    rng, ids, found = np.random.default_rng(seed), _Ids(), []
    for at_s in np.sort(rng.uniform(0, SPAN_S, num_requests)).tolist():
        num_tokens = 50 + int(rng.gamma(1.2, 2000 / 1.2))
        found.append(_request(at_s, ids.take(-(-num_tokens // BLOCK_TOKENS)), num_tokens, 20 + int(rng.gamma(1, 200))))
    return found

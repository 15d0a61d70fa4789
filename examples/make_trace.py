"""Makes the sample trace `examples/conversations.jsonl`: conversations that grow by turns.

    python examples/make_trace.py --requests 240 --seed 0 > conversations.jsonl

It writes Mooncake's trace format: one JSON object per request, one id per block of 512 prompt tokens, equal ids for
equal beginnings. It needs the standard library only.

Users open a conversation every few seconds, with one of three system prompts (an assistant, a support desk and a
coding agent). Each turn sends the whole conversation so far and something new, so a request shares its system prompt
with other users, and its history with earlier turns. One request in ten shares nothing.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

BLOCK_TOKENS = 512
SYSTEM_PROMPT_TOKENS = {"assistant": 1024, "support desk": 3072, "coding agent": 8192}
WEIGHTS = (5, 3, 2)


@dataclass(order=True)
class Conversation:
    """One conversation; ordered by the time of its next turn."""

    next_ms: float
    number: int
    num_tokens: int = field(compare=False)
    block_ids: list[int] = field(compare=False)
    """Ids of the conversation's full blocks, which later turns do not change."""
    turns_left: int = field(compare=False)


def make_trace(num_requests: int, seed: int) -> Iterator[dict[str, object]]:
    """Requests in order of arrival."""
    rng = Random(seed)
    ids = count()
    system_prompts = {
        name: (num_tokens, [next(ids) for _ in range(num_tokens // BLOCK_TOKENS)])
        for name, num_tokens in SYSTEM_PROMPT_TOKENS.items()
    }
    waiting: list[Conversation] = []
    opened_ms = 0.0
    for number in range(num_requests):
        if not waiting or opened_ms < waiting[0].next_ms:
            if rng.random() < 0.1:
                length, shared, turns = 0, [], 1
            else:
                length, shared = system_prompts[rng.choices(list(system_prompts), WEIGHTS)[0]]
                turns = rng.randint(1, 8)
            turn = Conversation(opened_ms, number, length, list(shared), turns)
            opened_ms += rng.expovariate(1 / 6_000)
        else:
            turn = heapq.heappop(waiting)
        turn.num_tokens += rng.randint(40, 1500)
        while len(turn.block_ids) < turn.num_tokens // BLOCK_TOKENS:
            turn.block_ids.append(next(ids))
        last = [next(ids)] if turn.num_tokens % BLOCK_TOKENS else []  # a partial block, which the answer will fill
        num_answered = rng.randint(20, 400)
        yield {
            "timestamp": round(turn.next_ms),
            "input_length": turn.num_tokens,
            "output_length": num_answered,
            "hash_ids": turn.block_ids + last,
        }
        turn.num_tokens += num_answered
        turn.turns_left -= 1
        if turn.turns_left:
            turn.next_ms += rng.uniform(5_000, 60_000)
            heapq.heappush(waiting, turn)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a sample trace to standard output.")
    parser.add_argument("--requests", type=int, default=240, help="number of requests (default: 240)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal traces (default: 0)")
    options = parser.parse_args()
    for request in make_trace(options.requests, options.seed):
        print(json.dumps(request))


if __name__ == "__main__":
    main()

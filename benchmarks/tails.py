"""What tails (cached last blocks that are not full) gain and cost: the radix index with and without them.

Hits are counted, not timed, so they are the same on every machine:

- `short`      64 different prompts of 12 tokens, each asked ten times, answered in a word
- `chat`       200 conversations of 8 turns that take turns at random; a system prompt of 300 tokens for all of them
- `documents`  40 documents of 900 tokens, 25 questions about each
- `demo`       the conversations of `foreword demo`, on its embedded model (left out with --quick)

`chat` and `documents` run in a pool that holds everything, and in smaller pools. Drawn lengths end anywhere in a block
of 16. Requests run one at a time. Each answer is computed except its last token.

The cost is the microseconds of `KVCacheManager.free` per request, the median of alternating rounds.

    PYTHONPATH=src python benchmarks/tails.py [--quick]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from foreword.cache import KVCacheManager, RadixIndex, TokenSequence

BLOCK_SIZE = 16
Request = tuple[list[int], list[int]]
"""The tokens of a prompt and of its answer."""


def words(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(rng.randint(least, most))]


def short() -> Iterator[Request]:
    rng = random.Random(1)
    prompts = [words(rng, 12, 12) for _ in range(64)]
    for _ in range(10):
        for prompt in rng.sample(prompts, len(prompts)):
            yield prompt, words(rng, 1, 3)


def chat() -> Iterator[Request]:
    rng = random.Random(2)
    system = words(rng, 300, 300)
    histories = [list(system) for _ in range(200)]
    turns = [history for history in histories for _ in range(8)]
    rng.shuffle(turns)
    for history in turns:
        history += words(rng, 5, 80)
        answer = words(rng, 5, 200)
        yield list(history), answer
        history += answer


def documents() -> Iterator[Request]:
    rng = random.Random(3)
    texts = [words(rng, 850, 950) for _ in range(40)]
    asked = [text for text in texts for _ in range(25)]
    rng.shuffle(asked)
    for text in asked:
        yield text + words(rng, 5, 30), words(rng, 5, 60)


WORKLOADS = {"short": (short, (4096,)), "chat": (chat, (16384, 4096, 1024)), "documents": (documents, (8192, 1024))}


def replay(requests: Iterator[Request], num_blocks: int, policy: str, *, keep_tails: bool) -> dict[str, Any]:
    """Serves the requests one after the other. Returns the tokens found."""
    index = RadixIndex(num_blocks, BLOCK_SIZE, keep_tails=keep_tails)
    manager = KVCacheManager(num_blocks, block_size=BLOCK_SIZE, index=index, eviction_policy=policy)
    for prompt, answer in requests:
        sequence = TokenSequence("r", prompt, block_size=BLOCK_SIZE)
        manager.begin_step()
        admitted = manager.allocate_slots(sequence, len(prompt), manager.get_computed_blocks(sequence))
        assert admitted is not None
        manager.take_copies()
        handles = manager.handles(["r"])
        for token in answer[:-1]:
            manager.begin_step()
            sequence.append(token)
            assert manager.allocate_decode_slots(handles) == 1
        sequence.append(answer[-1])
        manager.free("r")
    stats = manager.stats
    return {
        "queried": stats.queries,
        "hit": stats.hits,
        "in_tails": stats.tail_hits,
        "evictions": stats.evictions,
        "tail_evictions": stats.tail_evictions,
    }


def demo() -> dict[str, Any]:
    """The tokens that the demo's conversations reuse, with and without tails."""
    from foreword import LLM
    from foreword.demo.run import EMBEDDED_KV_BYTES, embedded_model
    from foreword.demo.workloads import make_workloads, run_workload

    found: dict[str, Any] = {}
    for workload in make_workloads():
        rates = {}
        for keep_tails in (False, True):
            with embedded_model() as path, LLM(str(path), kv_cache_memory_bytes=EMBEDDED_KV_BYTES) as llm:
                llm.engine.manager._coordinator.index.keeps_tails = keep_tails  # type: ignore[attr-defined]
                turns = run_workload(llm, workload)
                prompts = sum(turn.num_prompt_tokens for turn in turns)
                rates[keep_tails] = sum(turn.num_cached_tokens for turn in turns) / prompts
        found[workload.name] = {"without": round(rates[False], 4), "with": round(rates[True], 4)}
    return found


def cost_of_free(rounds: int, num_requests: int = 2000) -> dict[str, float]:
    """Microseconds for one request of 200 tokens that differs from all others, freed while the cache is full."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        for keep_tails in (False, True) if number % 2 else (True, False):
            index = RadixIndex(8192, BLOCK_SIZE, keep_tails=keep_tails)
            manager = KVCacheManager(8192, block_size=BLOCK_SIZE, index=index)
            seconds = 0.0
            for tokens in rng.integers(0, 100_000, (num_requests, 200)):
                sequence = TokenSequence("r", tokens, block_size=BLOCK_SIZE)
                manager.begin_step()
                manager.allocate_slots(sequence, 200, manager.get_computed_blocks(sequence))
                start = time.thread_time()
                manager.free("r")
                seconds += time.thread_time() - start
            if number:
                samples[keep_tails].append(1e6 * seconds / num_requests)
    return {"without": statistics.median(samples[False]), "with": statistics.median(samples[True])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the embedded model, and time fewer rounds")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'':<12}{'blocks':>8}  {'policy':<8}{'without':>10}{'with':>10}{'in tails':>10}{'tails evicted':>15}")
    for name, (requests, pools) in WORKLOADS.items():
        for num_blocks in pools:
            for policy in ("lru", "value"):
                without, with_tails = (
                    replay(requests(), num_blocks, policy, keep_tails=keep_tails) for keep_tails in (False, True)
                )
                queried = without["queried"]
                rates = without["hit"] / queried, with_tails["hit"] / queried
                tails = with_tails["in_tails"] / queried
                evicted = with_tails["tail_evictions"]
                figures = f"{rates[0]:>10.2%}{rates[1]:>10.2%}{tails:>10.2%}{evicted:>15,}"
                print(f"{name:<12}{num_blocks:>8}  {policy:<8}{figures}", flush=True)
                results[f"{name} {num_blocks} {policy}"] = {"without": without, "with": with_tails}
    if not arguments.quick:
        results["demo"] = demo()
        for name, rates_of in results["demo"].items():
            print(f"demo: {name:<28}{rates_of['without']:>10.2%}{rates_of['with']:>10.2%}")
    results["free_us"] = cost_of_free(3 if arguments.quick else 9)
    print(f"free: {results['free_us']['without']:.1f} us without tails, {results['free_us']['with']:.1f} with")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

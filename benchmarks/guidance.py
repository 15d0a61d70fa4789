"""Figures for docs/guides/hit-rate.md: block sizes, low hit rates and their remedies, one-off prompts.

    python benchmarks/guidance.py [--requests N] [--json] [--seed N]

Made-up traffic, seeded, goes through the simulator of `foreword replay`. No model runs and nothing is timed, so every
machine prints the same figures. Hit rates are shares of the prompt tokens that whole cached blocks hold.

Traffic:

    short prompts   a system prompt of 120 tokens and 20 to 80 new ones
    chat            conversations with a system prompt of 200 tokens; each turn brings 20 to 80 tokens and an answer of
                    50 to 200; turns of many conversations alternate
    documents       one of 40 documents of 700 to 3,000 tokens, some more popular than others, and a question of 10 to
                    40

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from foreword.replay.capacity import Capacity
from foreword.replay.keys import chain, content_ids_of_tokens
from foreword.replay.simulator import Simulation
from foreword.replay.trace import RecordedRequest

Prompt = list[int]

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
POLICIES = ("lru", "value", "optimum")
BLOCK_TOKENS = 16
VOCABULARY = 32_000


# ------------------------------------------------------------------------------------------ traffic


def text(rng: Random, num_tokens: int) -> Prompt:
    """Random tokens, which no other text begins with."""
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def short_prompts(rng: Random, num_requests: int) -> list[Prompt]:
    system = text(rng, 120)
    return [system + text(rng, rng.randint(20, 80)) for _ in range(num_requests)]


def chat(rng: Random, num_requests: int, num_open: int = 40) -> list[Prompt]:
    """Prompts of conversations. Each turn belongs to a random open conversation, and ends it with probability 0.1."""
    system = text(rng, 200)
    open_ones: list[Prompt] = [list(system) for _ in range(num_open)]
    prompts = []
    for _ in range(num_requests):
        number = rng.randrange(num_open)
        history = open_ones[number] = open_ones[number] + text(rng, rng.randint(20, 80))
        prompts.append(history)
        open_ones[number] = list(system) if rng.random() < 0.1 else history + text(rng, rng.randint(50, 200))
    return prompts


def documents(rng: Random, num_requests: int, num_documents: int = 40, first: int = 0) -> list[Prompt]:
    """Questions about documents. `first` new tokens, such as the time of day, stand before each document."""
    shelf = [text(rng, rng.randint(700, 3000)) for _ in range(num_documents)]
    weights = [1 / (rank + 1) for rank in range(num_documents)]
    return [
        text(rng, first) + rng.choices(shelf, weights)[0] + text(rng, rng.randint(10, 40)) for _ in range(num_requests)
    ]


def examples(rng: Random, num_requests: int, *, shuffle: bool) -> list[Prompt]:
    """The same eight examples of 100 tokens stand before every question.

    With `shuffle`, each prompt has them in a random order.
    """
    shelf = [text(rng, 100) for _ in range(8)]
    prompts = []
    for _ in range(num_requests):
        order = rng.sample(shelf, len(shelf)) if shuffle else shelf
        prompts.append([token for example in order for token in example] + text(rng, 30))
    return prompts


def with_one_off(rng: Random, prompts: Sequence[Prompt], share: float) -> list[Prompt]:
    """Adds prompts of 3,000 tokens that never come again. They are a `share` of all requests."""
    mixed: list[Prompt] = []
    for prompt in prompts:
        while rng.random() < share:
            mixed.append(text(rng, 3000))
        mixed.append(prompt)
    return mixed


# ---------------------------------------------------------------------------------------- simulation


def hit_tokens(
    prompts: Sequence[Prompt],
    capacity_tokens: int,
    block_tokens: int = BLOCK_TOKENS,
    policies: Sequence[str] = ("value",),
) -> dict[str, int]:
    """Prompt tokens that a cache of this size finds, by policy; "unlimited" is a cache that keeps everything."""
    name = str(capacity_tokens)
    simulation = Simulation(policies, [Capacity(name, capacity_tokens // block_tokens)])
    for prompt in prompts:
        full = prompt[: len(prompt) // block_tokens * block_tokens]  # an engine keys whole blocks
        keys = chain(content_ids_of_tokens(full, block_tokens))
        simulation.admit(RecordedRequest(None, keys, len(prompt), 1, block_tokens))
    result = simulation.result()
    return {policy: result.hits[policy][name].tokens for policy in policies} | {"unlimited": result.unlimited.tokens}


def hit_rate(prompts: Sequence[Prompt], capacity_tokens: int, policy: str = "value") -> float:
    return hit_tokens(prompts, capacity_tokens, policies=(policy,))[policy] / num_tokens(prompts)


def num_tokens(prompts: Sequence[Prompt]) -> int:
    return sum(map(len, prompts))


def block_sizes(seed: int, num_requests: int) -> dict[str, dict[int, float]]:
    """Hit rates by traffic and block size, in 60,000 tokens of memory."""
    traffic = {"short prompts": short_prompts, "chat": chat, "documents": documents}
    return {
        name: {
            size: hit_tokens(prompts, 60_000, size)["value"] / num_tokens(prompts)
            for prompts in [make(Random(seed), num_requests)]
            for size in BLOCK_SIZES
        }
        for name, make in traffic.items()
    }


def low_hit_rates(seed: int, num_requests: int) -> list[dict[str, Any]]:
    """Hit rates of four causes of a low rate, before and after the remedy of each cause."""

    def case(name: str, remedy: str, before: float, after: float) -> dict[str, Any]:
        return {"case": name, "remedy": remedy, "before": before, "after": after}

    def made(first: int = 0) -> list[Prompt]:
        return documents(Random(seed), num_requests, first=first)

    def ordered(shuffle: bool) -> list[Prompt]:
        return examples(Random(seed), num_requests, shuffle=shuffle)

    unique = [text(Random(seed + number), 800) for number in range(num_requests)]
    many = documents(Random(seed), num_requests, num_documents=400)
    return [
        case("8 tokens of time and date before the document", "move them to the end", hit_rate(made(8), 60_000),
             hit_rate(made(), 60_000)),
        case("8 examples in random order", "always the same order", hit_rate(ordered(True), 60_000),
             hit_rate(ordered(False), 60_000)),
        case("400 documents in memory for 11", "four times the memory", hit_rate(many, 20_000), hit_rate(many, 80_000)),
        case("400 documents in memory for 11", "sixteen times the memory", hit_rate(many, 20_000),
             hit_rate(many, 320_000)),
        case("every prompt is new", "sixteen times the memory", hit_rate(unique, 20_000), hit_rate(unique, 320_000)),
    ]  # fmt: skip


def pollution(seed: int, num_requests: int) -> list[dict[str, Any]]:
    """Hit rates of a chat's own tokens, by the share of one-off requests beside the chat."""
    own = chat(Random(seed), num_requests)
    rows = []
    for share in (0.0, 0.1, 0.25, 0.5):
        found = hit_tokens(with_one_off(Random(seed), own, share), 60_000, policies=POLICIES)
        rates = {policy: tokens / num_tokens(own) for policy, tokens in found.items()}
        rows.append({"one_off_share": share, **rates})
    return rows


# -------------------------------------------------------------------------------------------- report


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table("traffic", *map(str, BLOCK_SIZES), title="Hit rate by tokens per block", title_justify="left")
    for name, rates in report["block_sizes"].items():
        table.add_row(name, *(f"{rate:.1%}" for rate in rates.values()))
    console.print(table)
    table = Table("case", "hit rate", "remedy", "then", title="Low hit rates", title_justify="left")
    for row in report["low_hit_rates"]:
        table.add_row(row["case"], f"{row['before']:.1%}", row["remedy"], f"{row['after']:.1%}")
    console.print(table)
    table = Table("one-off requests", *POLICIES, title="A chat's hit rate beside one-off prompts", title_justify="left")
    for row in report["pollution"]:
        table.add_row(f"{row['one_off_share']:.0%}", *(f"{row[policy]:.1%}" for policy in POLICIES))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="requests of each kind of traffic")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on standard output")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_requests = args.requests
    report = {
        "benchmark": "guidance",
        "seed": args.seed,
        "requests": num_requests,
        "block_sizes": block_sizes(args.seed, num_requests),
        "low_hit_rates": low_hit_rates(args.seed, num_requests),
        "pollution": pollution(args.seed, num_requests),
    }
    print_report(report, Console(stderr=args.json))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

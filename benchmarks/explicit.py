"""What a mark gains for a prefix under a flood of other prompts, what it costs these, and what marking itself costs.

    PYTHONPATH=src python benchmarks/explicit.py [--model DIR] [--rounds 8] [--pool 256] [--json]

One engine, the `value` policy, a pool of 256 blocks of 16 tokens. Each round is a flood of documents of 600 tokens,
each asked for twice, then one request that begins with the prefix (1,024 tokens) and ends with 32 tokens of its own.
The same seeded rounds run with and without the mark, alternately, on a fresh cache. The limit of the time to the first
token is that of 32 tokens without a prefix, because a whole hit leaves these 32 to compute.

The cost of marking is processor time to render and tokenize a conversation of 40 messages (about 30,000 characters)
with 4 marks, and without. It needs a tokenizer with a chat template; the embedded model has one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword import LLM, SamplingParams
from foreword.demo.run import embedded_model
from foreword.engine import BREAKPOINT, Keep, Mark, Prompt
from foreword.text.conversation import Place

PREFIX, OWN, DOCUMENT, FLOOD = 1024, 32, 600, 8


@dataclass
class Traffic:
    """Times and hits of the prefix's requests and of the flood's."""

    first_ms: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    flood_ms: list[float] = field(default_factory=list)
    flood_found: int = 0
    flood_asked: int = 0


class Rounds:
    """Seeded rounds on one engine."""

    def __init__(self, llm: LLM, num_rounds: int) -> None:
        self._llm, self._num_rounds, self._number = llm, num_rounds, 0

    def run(self, *, marked: bool) -> Traffic:
        rng, traffic = np.random.default_rng(7), Traffic()
        self._llm.reset_prefix_cache()
        vocab = self._llm.engine.limits.vocab_size
        prefix = rng.integers(0, vocab, PREFIX).astype(np.int32)
        marks = (Mark(PREFIX, Keep(3600.0, BREAKPOINT)),) if marked else ()
        for number in range(self._num_rounds + 1):
            own = rng.integers(0, vocab, OWN).astype(np.int32)
            ms, found = self._ask(Prompt(np.concatenate((prefix, own)), marks=marks))
            if number:  # the first one computes it
                traffic.first_ms.append(ms)
                traffic.found.append(found)
            documents = [rng.integers(0, vocab, DOCUMENT).astype(np.int32) for _ in range(FLOOD)]
            for document in (*documents, *documents):
                ms, found = self._ask(Prompt(document))
                traffic.flood_ms.append(ms)
                traffic.flood_found += found
                traffic.flood_asked += DOCUMENT
        return traffic

    def _ask(self, prompt: Prompt) -> tuple[float, int]:
        """Asks once. Returns milliseconds to the first token, and the number of tokens found."""
        self._number += 1
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, temperature=0.0)
        output = self._llm.engine.add_request(f"r{self._number}", prompt, params)
        while not output.finished:
            self._llm.engine.step()
        return 1e3 * (time.perf_counter() - began), output.num_cached_tokens

    def alone(self) -> float:
        """Milliseconds to the first token of a short prompt."""
        rng, vocab = np.random.default_rng(8), self._llm.engine.limits.vocab_size
        prompts = [rng.integers(0, vocab, OWN).astype(np.int32) for _ in range(16)]
        return statistics.median(self._ask(Prompt(prompt))[0] for prompt in prompts)


def marking_ms(llm: LLM) -> tuple[float, float]:
    """Processor milliseconds to render a conversation, without marks and with four."""
    from foreword.text import Tokenizer

    tokenizer = Tokenizer(llm.get_tokenizer())
    text = "The code of the amber falcon is 4821. " * 20
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}]
    for number in range(39):
        messages.append({"role": ("user", "assistant")[number % 2], "content": f"{number}: {text}"})
    places = [Place(0, len(text)), Place(20), Place(37), Place(39, len(messages[39]["content"]))]

    def measured(work: Any) -> float:
        times = []
        for _ in range(15):
            began = time.process_time()
            work()
            times.append(1e3 * (time.process_time() - began))
        return statistics.median(times)

    plain = measured(lambda: tokenizer.render_chat(messages))
    return plain, measured(lambda: tokenizer.render_places(messages, places))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder; the embedded model unless given")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pool", type=int, default=256, help="blocks of 16 tokens in the pool")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    args = parser.parse_args()
    with embedded_model() as embedded, LLM(args.model or str(embedded), num_gpu_blocks_override=args.pool) as llm:
        rounds = Rounds(llm, args.rounds)
        rounds.run(marked=False)  # pays what happens only once
        plain, marked = rounds.run(marked=False), rounds.run(marked=True)
        limit = rounds.alone()
        render_ms, marked_ms = marking_ms(llm)
    figures = {
        "first_token_ms_unmarked": round(statistics.median(plain.first_ms), 2),
        "first_token_ms_marked": round(statistics.median(marked.first_ms), 2),
        "first_token_ms_limit": round(limit, 2),
        "first_token_ratio": round(statistics.median(plain.first_ms) / statistics.median(marked.first_ms), 2),
        "hit_rate_unmarked": round(sum(plain.found) / (len(plain.found) * (PREFIX + OWN)), 4),
        "hit_rate_marked": round(sum(marked.found) / (len(marked.found) * (PREFIX + OWN)), 4),
        "flood_hit_rate_unmarked": round(plain.flood_found / plain.flood_asked, 4),
        "flood_hit_rate_marked": round(marked.flood_found / marked.flood_asked, 4),
        "flood_mean_ms_ratio": round(statistics.mean(marked.flood_ms) / statistics.mean(plain.flood_ms), 3),
        "render_cpu_ms": round(render_ms, 2),
        "render_cpu_ms_with_4_marks": round(marked_ms, 2),
    }
    if not args.json:
        for name, value in figures.items():
            print(f"{name:30} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

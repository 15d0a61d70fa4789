"""How `engine.py` talks to an engine in a process of its own: JSON lines over standard input and output.

Knows only the standard library, so that it runs under any engine's interpreter. An engine that waits for a
line uses no processor time.

    -> {"model": FOLDER, "num_threads": N, "kv_bytes": N, "max_model_len": N, "max_num_seqs": N}
    <- {"version": "..."}
    -> {"do": "generate", "prompts": [[5, 17, ...], ...], "num_tokens": 64, "sampling": {}}
    <- {"seconds": 1.25, "processor_seconds": 2.1, "token_ids": [[...], ...]}
    -> {"do": "reset"}            forget all cached prefixes
    <- {}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Options:
    model: str
    """Folder of the Hugging Face checkpoint."""
    num_threads: int
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    drafts: bool | None = None
    """Whether the engine drafts several tokens per step from the text and checks them; None: the engine's default."""
    weights: str = "bfloat16"
    """Also "float32" for foreword and vLLM, "auto" and "int8" (integers) for foreword, and "Q4_0" for llama.cpp."""
    kv: str = "auto"
    """How KV is stored; also "int8" for foreword, and "q8_0" for llama.cpp."""


class Driver(Protocol):
    """An engine as the benchmark uses it."""

    version: str

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        """Continuations of exactly `num_tokens` tokens for all prompts, which run together.

        `sampling`: temperature, and perhaps top_p or top_k; greedy if there is none.
        """
        ...

    def reset(self) -> None: ...


def serve(make_driver: Callable[[Options], Driver]) -> None:
    """Answer requests until standard input ends. What the engine itself prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    driver = make_driver(Options(**json.loads(sys.stdin.readline())))
    answer({"version": driver.version})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "reset":
            driver.reset()
            answer({})
        else:
            started, processor = time.perf_counter(), time.process_time()
            token_ids = driver.generate(request["prompts"], request["num_tokens"], request.get("sampling"))
            seconds, processor = time.perf_counter() - started, time.process_time() - processor
            answer({"seconds": seconds, "processor_seconds": processor, "token_ids": token_ids})

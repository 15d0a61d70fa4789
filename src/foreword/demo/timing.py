"""The same workload shapes at a realistic size: real text, and a model that is large enough to time.

The embedded model is so small that a prompt costs hardly any time. Here a model with random weights reads the sources
of Python's standard library, one token per byte. Its words mean nothing, but its times do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foreword import LLM, RequestOutput, SamplingParams

SOURCES = ("argparse", "ast", "dataclasses", "difflib", "doctest", "inspect", "subprocess", "typing")
"""Modules whose source files serve as long documents."""
ANSWER_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class TimedShape:
    """A workload shape: the shared bytes, the requests that share them, and the bytes of each request alone."""

    name: str
    num_shared_tokens: int
    num_fresh_tokens: int
    num_requests: int
    grows: bool = False
    """Whether each request continues the one before it, as in a chat, instead of only sharing the beginning."""
    together: bool = False


SHAPES = (
    TimedShape("long document", 2048, 32, 5),
    TimedShape("multi-turn chat", 768, 128, 6, grows=True),
    TimedShape("many users", 768, 32, 6, together=True),
)


@dataclass(frozen=True, slots=True)
class TimingReport:
    """Median times to first token of one shape."""

    name: str
    num_prompt_tokens: int
    num_computed_tokens: int
    ttft_cold_ms: float
    """Without the cache."""
    ttft_warm_ms: float
    """With the cache, for the requests that hit."""
    num_requests: int
    num_identical: int
    """Requests whose tokens are the same with and without the cache."""


def time_shapes(cached: LLM, uncached: LLM) -> Iterator[TimingReport]:
    """Run every shape on two engines of the same model; only one of them caches prefixes."""
    warm_up = [{"prompt_token_ids": list(b"warm-up")}]
    for llm in (cached, uncached):
        llm.generate(warm_up, PARAMS)
    for number, shape in enumerate(SHAPES):
        text = read_source(SOURCES[number])
        cold = _run(uncached, shape, text)
        warm = _run(cached, shape, text)
        yield TimingReport(
            name=shape.name,
            num_prompt_tokens=sum(len(output.prompt_token_ids) for output in warm),
            num_computed_tokens=sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in warm),
            ttft_cold_ms=median(_ttft_ms(output) for output in cold),
            ttft_warm_ms=median(_ttft_ms(output) for output in warm if output.num_cached_tokens),
            num_requests=len(warm),
            num_identical=sum(
                a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(cold, warm, strict=True)
            ),
        )


def read_source(module: str) -> bytes:
    """Source file of a standard library module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


def _run(llm: LLM, shape: TimedShape, text: bytes) -> list[RequestOutput]:
    shared, rest = text[: shape.num_shared_tokens], text[shape.num_shared_tokens :]
    prompts: list[list[int]] = []
    for number in range(shape.num_requests):
        fresh = rest[number * shape.num_fresh_tokens : (number + 1) * shape.num_fresh_tokens]
        prompts.append(list(shared + fresh))
    if shape.together:
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    outputs: list[RequestOutput] = []
    for number, prompt in enumerate(prompts):
        if shape.grows and number:
            before = outputs[-1]
            prompt = before.prompt_token_ids + before.outputs[0].token_ids + prompt[shape.num_shared_tokens :]
        outputs += llm.generate({"prompt_token_ids": prompt}, PARAMS)
    return outputs


def _ttft_ms(output: RequestOutput) -> float:
    return output.metrics.time_to_first_token_ms or 0.0

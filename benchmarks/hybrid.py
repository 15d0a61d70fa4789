"""Models whose layers remember in different ways: their memory per sequence, their hit rate, and the gain of a hit.

Four models of 0.3 to 0.5 billion random parameters in bfloat16, in the shapes of gemma3 (a window of 512 in five
layers of six), gpt_oss (a window of 128 in every other layer, sinks, experts), qwen3_next (a recurrent state in three
layers of four, experts) and mamba2 (recurrent states alone). Their words mean nothing, their times do.

Memory is counted, not measured: the bytes of the blocks that one sequence holds, from the code that allocates them. The
rival is a layout in which every layer keeps the keys and values of all positions (a recurrent layer counts like one of
the model's attention layers; mamba2 has none). Times to the first token come in pairs, as in workloads.py. The cache is
reset, a prompt runs (the miss), then a prompt with the same beginning and another end (the hit). Over all pairs each
prompt is a miss once and a hit once, and its two answers must be the same tokens. The hit rate is that of six turns of
a conversation, in which each prompt holds all turns before it; the limit is the rate if hits could end at any token.

Without a mark, the cache saves a state at the point where two prompts differ only when a third prompt comes. So the
script marks the shared beginning as a message, as chat() marks the system prompt.

    python benchmarks/hybrid.py [--repeats N] [--quick] [--json] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import foreword
from foreword import LLM, RequestOutput, SamplingParams
from foreword.cache import KVCacheManager
from foreword.engine import Prompt
from foreword.model.layout import CacheLayout, LayoutOptions, plan_layout

VOCAB_SIZE = 32_000
SHARED_TOKENS, FRESH_TOKENS, ANSWER_TOKENS = 1024, 16, 8
TURNS, TURN_TOKENS, SYSTEM_TOKENS = 6, 48, 256
HELD_TOKENS = (8_192, 32_768)
STEP_TOKENS = 2_048
GIB = 2**30

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 6,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 48,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
        },
    ),
}
QUICK: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 48, "head_dim": 16},
    "qwen3_next": {"hidden_size": 64, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    | {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 16, "state_size": 16},
}
"""Settings that make the models tiny, for a run that only shows that the script works."""


def save_model(name: str, folder: Path, *, quick: bool, seed: int) -> int:
    """Writes a random checkpoint. Returns its number of parameters."""
    kind, options = MODELS[name]
    sizes = {**options, **(QUICK[name] if quick else {})}
    config = AutoConfig.for_model(
        kind, vocab_size=512 if quick else VOCAB_SIZE, max_position_embeddings=max(HELD_TOKENS), pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] > 8:  # variance 1 / inputs keeps activations at their size
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Held:
    """The memory that one running sequence holds."""

    num_tokens: int
    bytes_per_token: float
    tokens_per_gib: int
    all_full_tokens_per_gib: int | None
    """Tokens per GiB if every layer kept all keys and values; None if no layer has keys and values."""
    ratio: float | None


def tokens_per_gib(layout: CacheLayout, num_tokens: int) -> int:
    num_blocks = KVCacheManager(1, groups=layout.specs).max_num_blocks(num_tokens, STEP_TOKENS)
    return int(GIB * num_tokens / (num_blocks * layout.bytes_per_block))


def measure_memory(llm: LLM) -> list[Held]:
    storage = llm.engine._runner._storage  # type: ignore[attr-defined]
    layout: CacheLayout = storage.layout
    full = None
    if layout.attention:
        example = next(iter(layout.attention.values()))
        layers = dict.fromkeys(range(len(layout.attention) + len(layout.states)), example)
        full = plan_layout(layers, {}, layout.kv_format, LayoutOptions(keep_all=True))
    held = []
    for num_tokens in HELD_TOKENS:
        ours = tokens_per_gib(layout, num_tokens)
        theirs = None if full is None else tokens_per_gib(full, num_tokens)
        held.append(Held(num_tokens, GIB / ours, ours, theirs, None if theirs is None else ours / theirs))
    return held


# -------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class FirstToken:
    """Median times to the first token over pairs of a miss and a hit."""

    miss_ms: float
    hit_ms: float
    ratio: float
    hit_tokens: int
    answers_identical: bool


def run(llm: LLM, token_ids: list[int], num_generated: int, message_ends: tuple[int, ...] = ()) -> RequestOutput:
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=num_generated, ignore_eos=True)
    prompt = Prompt(np.array(token_ids, np.int32), message_ends=message_ends)
    output = engine.add_request(f"{time.monotonic_ns()}", prompt, params)
    while not output.finished:
        engine.step()
    return output


def measure_first_token(llm: LLM, repeats: int, vocab_size: int, seed: int) -> FirstToken:
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, SHARED_TOKENS).tolist()
    prompts = [[*shared, 3 + n, *rng.integers(3, vocab_size, FRESH_TOKENS - 1).tolist()] for n in range(repeats)]
    misses, hits = [], []
    run(llm, prompts[0][::-1], 1)  # warms up
    for number in range(repeats):
        llm.reset_prefix_cache()
        misses.append(run(llm, prompts[number], ANSWER_TOKENS, (SHARED_TOKENS,)))
        hits.append(run(llm, prompts[(number + 1) % repeats], ANSWER_TOKENS, (SHARED_TOKENS,)))

    def median_ms(outputs: list[RequestOutput]) -> float:
        return statistics.median(output.metrics.time_to_first_token_ms or 0.0 for output in outputs)

    answers = [[output.outputs[0].token_ids for output in outputs] for outputs in (misses, hits)]
    miss_ms, hit_ms = median_ms(misses), median_ms(hits)
    return FirstToken(
        miss_ms, hit_ms, miss_ms / hit_ms, hits[0].num_cached_tokens, answers[1] == answers[0][1:] + answers[0][:1]
    )


# ---------------------------------------------------------------------------------------- hit rate


@dataclass(frozen=True)
class HitRate:
    """The hit rate of a conversation's prompts."""

    hit_rate: float
    token_exact_hit_rate: float
    hit_granularity: int
    state_interval: int | None


def measure_hit_rate(llm: LLM, vocab_size: int, seed: int) -> HitRate:
    rng = np.random.default_rng((seed, 1))
    llm.reset_prefix_cache()
    history = rng.integers(3, vocab_size, SYSTEM_TOKENS).tolist()
    message_ends = [SYSTEM_TOKENS]
    num_known, queried, possible = 0, 0, 0
    for _ in range(TURNS):
        history += rng.integers(3, vocab_size, TURN_TOKENS).tolist()
        queried, possible = queried + len(history), possible + num_known
        output = run(llm, history, ANSWER_TOKENS, tuple(message_ends))
        num_known = len(history) + ANSWER_TOKENS - 1
        history = history + output.outputs[0].token_ids
        message_ends += [len(history)]
    report = llm.get_prefix_cache_stats()
    assert report.queried_tokens == queried
    return HitRate(report.hit_rate, possible / queried, report.hit_granularity, report.state_interval)


# ---------------------------------------------------------------------------------------------- all


def measure(name: str, folder: Path, repeats: int, *, quick: bool, seed: int) -> dict[str, Any]:
    num_parameters = save_model(name, folder, quick=quick, seed=seed)
    with LLM(str(folder), dtype="bfloat16", kv_cache_memory_bytes=GIB // (16 if quick else 1)) as llm:
        vocab_size = llm.engine.limits.vocab_size
        return {
            "parameters": num_parameters,
            "memory": [asdict(held) for held in measure_memory(llm)],
            "first_token": asdict(measure_first_token(llm, repeats, vocab_size, seed)),
            "conversation": asdict(measure_hit_rate(llm, vocab_size, seed)),
            "bit_exact": llm.inexactness is None,
        }


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "model",
        "parameters",
        "tokens per GiB",
        "all full",
        "",
        "miss ms",
        "hit ms",
        "",
        "hit rate",
        "exact",
    ):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for name, result in results.items():
        held, first, talk = result["memory"][-1], result["first_token"], result["conversation"]
        full, ratio = held["all_full_tokens_per_gib"], held["ratio"]
        shown.add_row(
            name,
            f"{result['parameters'] / 1e6:,.0f}M",
            f"{held['tokens_per_gib']:,}",
            "-" if full is None else f"{full:,}",
            "-" if ratio is None else f"{ratio:.1f}x",
            f"{first['miss_ms']:,.0f}",
            f"{first['hit_ms']:,.0f}",
            f"{first['ratio']:.1f}x",
            f"{talk['hit_rate']:.1%}",
            f"{talk['token_exact_hit_rate']:.1%}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny models: only shows that the script works")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(stderr=options.json)
    results = {}
    for name in MODELS:
        with TemporaryDirectory() as folder:
            repeats = 2 if options.quick else max(2, options.repeats)
            results[name] = measure(name, Path(folder), repeats, quick=options.quick, seed=options.seed)
            console.log(f"{name}: {results[name]['first_token']}")
    console.print(table(results))
    console.print(
        f"tokens per GiB: of one running sequence of {HELD_TOKENS[-1]:,}; first token: {SHARED_TOKENS:,} shared tokens "
        f"and {FRESH_TOKENS} new; hit rate: {TURNS} turns of a conversation; exact: if hits could end anywhere"
    )
    system = {
        "foreword": foreword.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(
        json.dumps(
            {"benchmark": "hybrid", "quick": options.quick, "seed": options.seed, "system": system, "models": results}
        )
    )
    if not all(result["first_token"]["answers_identical"] for result in results.values()):
        sys.exit("answers with and without a hit differ")


if __name__ == "__main__":
    main()

"""`foreword bench calibrate`: measures this machine's rates for `foreword replay --flops --bandwidth`.

Replay's cost model predicts the time of a step from two rates. This command measures steps, and solves for the rates.
The command assumes that arithmetic limits prefill and that memory limits the decoding of one request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
from rich.console import Console

from foreword import SamplingParams
from foreword.config import Dtype
from foreword.errors import ConfigError
from foreword.replay.capacity import read_model_config
from foreword.replay.timing import StepCost

if TYPE_CHECKING:
    from foreword import LLM

DECODE_STEPS = 32
DECODE_CONTEXT = 32


@dataclass(frozen=True, slots=True)
class Calibration:
    """The rates of one machine with one model, and the times from which they are computed."""

    flops_per_s: float
    bytes_per_s: float
    prefill_tokens: int
    prefill_s: float
    """Median seconds to the first token after `prefill_tokens` tokens, with nothing cached."""
    decode_step_s: float
    """Median seconds of a step that decodes one request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword bench calibrate`."""
    parser.add_argument("model", metavar="MODEL", help="folder of the model that is served")
    parser.add_argument(
        "--prefill-tokens", type=int, default=1024, metavar="N", help="length of the prompts (default: 1024)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="measurements of which the median counts (default: 3)"
    )
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="auto", help="precision of weights and KV (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments."""
    from foreword import LLM

    config = read_model_config(args.model, args.dtype)
    with LLM(args.model, dtype=args.dtype) as llm:
        rates = calibrate(llm, config, prefill_tokens=args.prefill_tokens, repeats=args.repeats)
    if args.json:
        print(json.dumps({name: getattr(rates, name) for name in Calibration.__slots__}))
        return 0
    console = Console(highlight=False)
    console.print(
        f"prefill of {rates.prefill_tokens:,} tokens: {1e3 * rates.prefill_s:,.0f} ms, "
        f"{rates.flops_per_s / 1e9:,.0f} GFLOP/s; one decoding step: {1e3 * rates.decode_step_s:,.1f} ms, "
        f"{rates.bytes_per_s / 1e9:,.1f} GB/s"
    )
    console.print(
        f"foreword replay TRACE --model {args.model} --flops {rates.flops_per_s:.3g} "
        f"--bandwidth {rates.bytes_per_s / 1e9:.3f}GB",
        soft_wrap=True,
    )
    return 0


def calibrate(
    llm: LLM, config: dict[str, object], *, prefill_tokens: int = 1024, repeats: int = 3, seed: int = 0
) -> Calibration:
    """Measure an open LLM whose configuration (config.json) is `config`. Raises InvalidRequestError, ModelLoadError."""
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} measures nothing; use 1 or more")
    if prefill_tokens < 0:
        raise ConfigError(f"prefill_tokens={prefill_tokens} is no length of a prompt; use 1 or more")
    rng = np.random.default_rng(seed)

    def seconds(num_tokens: int, num_new: int) -> float:
        """Seconds of one request from its start to its last token, with nothing cached."""
        limits = llm.engine.limits
        drawn = limits.without_pictures(rng.integers(0, limits.vocab_size, num_tokens).astype(np.int32))
        prompt = {"prompt_token_ids": drawn.tolist()}
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, skip_reading_prefix_cache=True)
        start = time.perf_counter()
        llm.generate(prompt, params, show_progress=False)
        return time.perf_counter() - start

    seconds(prefill_tokens, 2)  # compiles, and touches the memory
    prefill = statistics.median(seconds(prefill_tokens, 1) for _ in range(repeats))
    steps = [
        (seconds(DECODE_CONTEXT, 1 + DECODE_STEPS) - seconds(DECODE_CONTEXT, 1)) / DECODE_STEPS for _ in range(repeats)
    ]
    decode = max(statistics.median(steps), 1e-6)
    cost = StepCost.of_model(dict(config), flops_per_s=1.0, bytes_per_s=1.0)
    pairs = prefill_tokens * (prefill_tokens + 1) / 2
    flops = prefill_tokens * cost.flops_per_token + pairs * cost.flops_per_pair
    num_bytes = cost.weight_bytes + (DECODE_CONTEXT + DECODE_STEPS / 2) * cost.kv_bytes_per_token
    # Measured times include the cost model's constant per step. It is subtracted, but at most half of a measured time.
    return Calibration(
        flops_per_s=flops / max(prefill - cost.overhead_s, prefill / 2),
        bytes_per_s=num_bytes / max(decode - cost.overhead_s, decode / 2),
        prefill_tokens=prefill_tokens,
        prefill_s=prefill,
        decode_step_s=decode,
    )

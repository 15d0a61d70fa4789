"""An engine on a fake device, work for it, and its answers to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fake_device import FakeDevice
from foreword.engine import Engine
from foreword.model.gpu.runner import DeviceRunner, RunnerLimits
from foreword.model.loader import LoadedModel
from foreword.model.storage import KVStorage
from foreword.request import SamplingParams
from tiny_models import add, build_engine, drain, random_tokens

SIZES = (16, 32)
"""Of recorded decoding steps."""
MAX_TOKENS = 200


class Setup:
    """An engine on a fake device."""

    def __init__(self, model: LoadedModel, *, sizes: Sequence[int] = SIZES, **options: Any) -> None:
        self.device = FakeDevice()
        limits = RunnerLimits(MAX_TOKENS, 64, tuple(sizes))
        pass_rows = options.pop("pass_rows", None)

        def make(model: LoadedModel, storage: KVStorage) -> DeviceRunner:
            self.storage = storage
            self.runner = DeviceRunner(model, storage, self.device, limits, pass_rows=pass_rows)
            return self.runner

        self.engine = build_engine(model, runner_class=make, **{"block_size": 4, "num_blocks": 256, **options})

    @property
    def num_replays(self) -> int:
        return 0 if self.runner.graphs is None else self.runner.graphs.num_replays


def random_work(seed: int, num_requests: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that partly share their beginnings, and parameters that use everything that sampling can."""
    rng = np.random.default_rng(seed)
    common = random_tokens(rng, 40)
    work = []
    for number in range(num_requests):
        own = random_tokens(rng, int(rng.integers(1, 30)))
        prompt = common[: int(rng.integers(0, 41))] + own
        options: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
            {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.4, "frequency_penalty": 0.2},
            {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0, "logit_bias": {5: 1.5}},
            {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": (7, 8, 9), "logprobs": 5},
            {"temperature": 0.0, "prompt_logprobs": 2},
            {"temperature": 1.2, "allowed_token_ids": (5, 6, 7, 9, 300), "min_tokens": 4, "stop_token_ids": (7,)},
        ]
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 12)), seed=number, ignore_eos=True, **options[number % len(options)]
        )
        work.append((prompt, params))
    return work


def answers(engine: Engine, work: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Tokens and log probabilities, to the last bit."""
    outputs = [add(engine, str(number), prompt, params) for number, (prompt, params) in enumerate(work)]
    drain(engine)
    return [
        (out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs, out.outputs[0].finish_reason)
        for out in outputs
    ]

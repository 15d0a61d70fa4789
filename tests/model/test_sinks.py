"""Tokens before every prompt, in blocks that are computed once and never evicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, UnsupportedModelError
from tiny_models import RECIPES, Recipe, TinyModels, random_tokens, save_model

SINKS = random_tokens(np.random.default_rng(0), 8)


def open_llm(tiny_models: TinyModels, family: str = "llama", **options: object) -> LLM:
    folder = str(tiny_models.folder(family))
    return LLM(folder, dtype="float32", block_size=4, device=tiny_models.device, **options)


@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
def test_every_prompt_is_answered_as_if_it_began_with_the_sinks(tiny_models: TinyModels, prefix_index: str) -> None:
    rng = np.random.default_rng(1)
    shared = random_tokens(rng, 21)
    prompts = [shared, shared + random_tokens(rng, 9), random_tokens(rng, 1), shared]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    # 1,536 bytes a token: 2 sink blocks and 24 others, so that prompts evict each other
    with open_llm(
        tiny_models,
        sink_token_ids=SINKS,
        prefix_index=prefix_index,
        max_model_len=60,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=26 * 4 * 768,
    ) as llm:
        sinks = llm.engine.manager.sink_block_ids().tolist()
        assert len(sinks) == 2
        for _ in range(3):
            outputs = [
                llm.generate([{"prompt_token_ids": prompt}], params)[0] for prompt in [*prompts, random_tokens(rng, 50)]
            ]
            for output in outputs:
                expected = tiny_models.oracle("llama").greedy([*SINKS, *output.prompt_token_ids], 8)
                assert output.outputs[0].token_ids == expected
            assert outputs[3].num_cached_tokens >= 20
        assert llm.engine.manager.sink_block_ids().tolist() == sinks
        assert llm.engine.manager.stats.evictions > 0
        llm.engine.check_integrity()


def test_sinks_that_do_not_fill_blocks_or_are_no_tokens_are_refused(tiny_models: TinyModels) -> None:
    with pytest.raises(ConfigError, match="do not fill whole blocks of 4 tokens"):
        open_llm(tiny_models, sink_token_ids=SINKS[:7])
    with pytest.raises(ConfigError, match="token 99999 in sink_token_ids"):
        open_llm(tiny_models, sink_token_ids=(1, 2, 3, 99999))


def test_sinks_need_full_attention_in_every_layer(tiny_models: TinyModels) -> None:
    for family in ("gemma3_text", "mamba2", "qwen3_next"):
        with pytest.raises(ConfigError, match="layers all see every position"):
            open_llm(tiny_models, family, sink_token_ids=SINKS)


REFUSED = {
    "glm4": "foreword's decoder does not know model_type='glm4'",
    "bloom": "foreword's decoder does not know model_type='bloom'",
    "mamba2": "foreword's decoder does not know model_type='mamba2'",
    "mistral": "layer 0 attends to a sliding window of 24 tokens",
    "gemma3_text": "layer 0 attends to a sliding window of 8 tokens",
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_linked_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        LLM(str(save_model(tmp_path, RECIPES.get(name, Recipe(name)))), **options)


@pytest.mark.usefixtures("on_cpu")
def test_a_window_that_no_request_can_leave_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path, Recipe("mistral", {"head_dim": 32, "sliding_window": 256}))
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with LLM(str(folder), max_model_len=200, **options) as llm:
        assert llm.engine.limits.allows_links

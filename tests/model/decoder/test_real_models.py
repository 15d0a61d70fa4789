"""Real checkpoints answer as transformers does, cold and warm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreword import LLM, SamplingParams
from real_models import real_model

TEXTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Liebe Kolleginnen und Kollegen, ich möchte",
    "SELECT name, COUNT(*) FROM visits WHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "天気がいいから、",
    "x",
    "The sun rises in the east. " * 12,
    "The list of numbers: " + ", ".join(map(str, range(250))) + ",",
]
"""The last one goes beyond the window of Gemma 3's layers."""
NUM_TOKENS = 12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [("smollm2", "llama"), ("gemma3", "gemma3_text")])
def test_a_real_model_answers_as_transformers_does(name: str, family: str) -> None:
    folder: Path = real_model(name)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    with LLM(str(folder), dtype="float32", max_model_len=2048, kv_cache_memory_bytes=512 << 20) as llm:
        assert llm.cache_identity.facts["model"]["code"] == {"family": family}
        cold = llm.generate(TEXTS, params)
        warm = llm.generate(TEXTS, params)
    for first, second in zip(cold, warm, strict=True):
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        assert second.outputs[0].logprobs == first.outputs[0].logprobs
    assert sum(output.num_cached_tokens for output in warm) > 0
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for output in cold:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = plain(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == list(answer)


@pytest.mark.slow
def test_links_are_allowed_in_float32_with_two_threads() -> None:
    """A written family knows how its keys turn; nobody has to find it out from rows that are padded otherwise."""
    folder = real_model("smollm2")
    with LLM(str(folder), dtype="float32", allow_links=True, self_check=False, kv_cache_memory_bytes=2**26) as llm:
        assert llm.engine is not None

"""transformers with a DynamicCache that is kept from call to call, as its documentation advises.

The driver keeps the cache of the last call. If the next call's prompts begin like its rows, the driver crops the cache
to the shared tokens and computes the rest. If the kept cache has a single row and several prompts share it, each prompt
gets a copy.
"""

from __future__ import annotations

import copy
from itertools import takewhile

import torch
import transformers
from protocol import Options, serve
from transformers import AutoModelForCausalLM, DynamicCache


class TransformersDriver:
    version = transformers.__version__

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self._model.generation_config.pad_token_id = 0
        self.reset()

    def reset(self) -> None:
        self._kept: list[list[int]] = []
        self._cache = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        assert len({len(prompt) for prompt in prompts}) == 1, "prompts of one call are equally long, so none is padded"
        cache = self._reuse(prompts)
        token_ids = torch.tensor(prompts)
        output = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            past_key_values=cache,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            **({"do_sample": True, "top_k": 0, **sampling} if sampling else {"do_sample": False}),
        )
        rows: list[list[int]] = output.tolist()
        self._cache, self._kept = cache, [row[: cache.get_seq_length()] for row in rows]
        return [row[len(prompts[0]) :] for row in rows]

    def _reuse(self, prompts: list[list[int]]) -> DynamicCache:
        kept = self._kept * len(prompts) if len(self._kept) == 1 else self._kept
        if len(kept) != len(prompts):
            return DynamicCache(config=self._model.config)
        shared = min(shared_length(old, new) for old, new in zip(kept, prompts, strict=True))
        shared = min(shared, len(prompts[0]) - 1)
        if not shared:
            return DynamicCache(config=self._model.config)
        repeats = len(prompts) // len(self._kept)
        cache = copy.deepcopy(self._cache) if repeats > 1 else self._cache
        if cache.get_seq_length() > shared:
            cache.crop(shared - cache.get_seq_length())
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        return cache


def shared_length(left: list[int], right: list[int]) -> int:
    """The number of tokens that two sequences share at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


if __name__ == "__main__":
    serve(TransformersDriver)

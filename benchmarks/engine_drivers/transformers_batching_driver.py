"""transformers' continuous batching, whose paged cache shares the blocks of equal prefixes."""

from __future__ import annotations

import torch
import transformers
from protocol import Options, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

PAGE_SIZE = 64
"""Tokens per page. It divides the lengths that workloads share; the default, 256, would share less of conversations."""
BATCH_TOKENS = 2048


class BatchingDriver:
    version = transformers.__version__

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        # The attention mask has a column for every token of the cache, so the cache is only as large as a workload
        # needs.
        self._num_blocks = options.max_num_seqs * (options.max_model_len // PAGE_SIZE + 1)
        self._max_requests = options.max_num_seqs
        self._sampling: dict[str, float] | None = None
        self._manager = self._start()

    def _start(self) -> ContinuousBatchingManager:
        chosen = {"do_sample": True, "top_k": 0, **self._sampling} if self._sampling else {"do_sample": False}
        manager = self._model.init_continuous_batching(
            GenerationConfig(eos_token_id=-1, pad_token_id=0, **chosen),
            ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=self._num_blocks,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=self._max_requests,
            ),
        )
        manager.start()
        return manager

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        if sampling != self._sampling:
            self._sampling = sampling
            self.reset()
        request_ids = self._manager.add_requests(prompts, max_new_tokens=num_tokens)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(prompts):
            output = self._manager.get_result(timeout=1)
            if output is not None:
                assert output.error is None, output.error
                answers[output.request_id] = list(output.generated_tokens)
            elif not self._manager.is_running():
                raise RuntimeError("continuous batching has stopped")
        return [answers[request_id] for request_id in request_ids]

    def reset(self) -> None:
        """Makes a new cache, because transformers has no call that only forgets cached prefixes."""
        self._manager.stop(block=True)
        self._manager.destroy()
        self._manager = self._start()


if __name__ == "__main__":
    serve(BatchingDriver)

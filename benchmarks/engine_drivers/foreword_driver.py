"""foreword, in a process of its own."""

from __future__ import annotations

from protocol import Options, serve

import foreword
from foreword import LLM, SamplingParams


class ForewordDriver:
    version = foreword.__version__

    def __init__(self, options: Options) -> None:
        self._llm = LLM(
            options.model,
            dtype=options.weights if options.weights in ("bfloat16", "float32") else "auto",
            kv_cache_memory_bytes=options.kv_bytes,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            draft_tokens=0 if options.drafts is False else "auto",
            kv_cache_dtype=options.kv,
            weight_arithmetic="int8" if options.weights == "int8" else "exact",
        )

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        params = SamplingParams(**(sampling or {"temperature": 0.0}), max_tokens=num_tokens, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()


if __name__ == "__main__":
    serve(ForewordDriver)

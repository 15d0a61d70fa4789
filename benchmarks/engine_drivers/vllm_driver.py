"""vLLM for CPU, in a process of its own; runs under the interpreter of its own environment."""

from __future__ import annotations

import os

from protocol import Options, serve

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class VllmDriver:
    def __init__(self, options: Options) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which sleeps when idle
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.num_threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, options.kv_bytes // 2**30))
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            options.model,
            skip_tokenizer_init=True,
            dtype=options.weights,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            enable_prefix_caching=True,
            speculative_config=NGRAM if options.drafts else None,
        )

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        chosen = sampling or {"temperature": 0.0}
        params = self._params(**chosen, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()


if __name__ == "__main__":
    serve(VllmDriver)

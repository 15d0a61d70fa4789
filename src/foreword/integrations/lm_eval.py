"""The model "foreword" of lm-eval: evaluations in this process, whose likelihoods read shared contexts from the cache.

Import this module before lm-eval looks for the model:

    python -c "import foreword.integrations.lm_eval, lm_eval.__main__ as cli; cli.cli_evaluate()" run \\
        --model foreword --model_args pretrained=path/to/model --tasks arc_easy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from foreword import LLM, SamplingParams

MAX_GENERATED = 256
"""Default limit of an answer, in tokens."""

Scored = tuple[Any, Sequence[int], Sequence[int]]
"""A key of lm-eval, the tokens of a context, and the tokens of its continuation."""


@register_model("foreword")
class ForewordLM(TemplateLM):  # type: ignore[misc]
    """A model that foreword runs. Its options are the options of `LLM`, and `pretrained`, the model's folder.

    With `use_cache=False` every prompt is computed whole; the results are the same.
    """

    def __init__(
        self, pretrained: str, *, use_cache: bool = True, batch_size: Any = None, device: Any = None, **options: Any
    ) -> None:
        """`batch_size` is an option of lm-eval. It has no effect, because the engine makes its own batches."""
        super().__init__()
        device_options = {} if device is None else {"device": device}
        options.pop("max_batch_size", None)
        self.llm = LLM(pretrained, **{**device_options, **options})
        self.tokenizer = self.llm.get_tokenizer()
        self._skips = not use_cache

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos_token_id = self.tokenizer.bos_token_id
        return self.eot_token_id if bos_token_id is None else int(bos_token_id)

    @property
    def max_length(self) -> int:
        """Limit of a prompt and its answer together, in tokens."""
        return self.llm.engine.limits.max_model_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        has_bos = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
        special = not has_bos if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        prompts, params = [], []
        for _key, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length - 1) :]
            at = max(1, len(tokens) - len(continuation))
            prompts.append({"prompt_token_ids": tokens})
            params.append(
                SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    prompt_logprobs=1,
                    score_from=at,
                    skip_reading_prefix_cache=self._skips,
                )
            )
        likelihoods = []
        for prompt, sampling, output in zip(prompts, params, self.llm.generate(prompts, params), strict=True):
            scored = zip(prompt["prompt_token_ids"], output.prompt_logprobs or (), strict=True)
            logprobs = [table[token] for token, table in list(scored)[sampling.score_from :] if table is not None]
            likelihood = sum(logprob.logprob for logprob in logprobs)
            likelihoods.append((likelihood, all(logprob.rank == 1 for logprob in logprobs)))
        return likelihoods

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 2, 1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, wishes = request.args
            until = wishes.get("until") or ()
            max_tokens = int(wishes.get("max_gen_toks", MAX_GENERATED))
            prompts.append({"prompt_token_ids": self.tok_encode(context)[-max(1, self.max_length - max_tokens) :]})
            params.append(
                SamplingParams(
                    max_tokens=max_tokens,
                    stop=(until,) if isinstance(until, str) else tuple(until),
                    temperature=float(wishes.get("temperature", 0.0)) if wishes.get("do_sample") else 0.0,
                    seed=0,
                    skip_reading_prefix_cache=self._skips,
                )
            )
        return [output.outputs[0].text for output in self.llm.generate(prompts, params)]

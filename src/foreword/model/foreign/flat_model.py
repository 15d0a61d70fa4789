"""A model of transformers, called with a flattened batch: the tokens of all requests in one row."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foreword.model.checkpoint.weights_digest import digest_sources
from foreword.model.foreign.attention import EXPERTS_NAME
from foreword.model.foreign.modules import PackedLinear, ProductPart
from foreword.model.foreign.recurrent import RecurrentForward, StepCache
from foreword.model.step import Step


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A model and the facts needed to call it."""

    module: PreTrainedModel
    cache_argument: str | None
    """The name under which the model takes its cache; None if it takes no cache."""
    device: torch.device

    def __call__(self, token_ids: Tensor, positions: Tensor, keep: Tensor, context: Any, cache: Any) -> Tensor:
        """Compute logits [len(keep), vocab] of the rows `keep`, from token ids and positions [1, tokens].

        `context` and `cache` are a `Step` and its `StepCache`, or stand-ins.
        """
        arguments = {
            "input_ids": token_ids,
            "position_ids": positions,
            "use_cache": False,
            "logits_to_keep": keep,
            "forward_context": context,
            **({} if self.cache_argument is None else {self.cache_argument: cache}),
        }
        logits: Tensor = self.module(**arguments).logits[0]
        return logits

    def compute(self, step: Step) -> Tensor:
        """Write the step's KV; return logits [num_kept, vocab]."""
        return self(step.token_ids[None], step.positions[None], step.keep, step, StepCache(step))[: step.num_kept]

    @property
    def code(self) -> dict[str, str]:
        """The class of the model, and a digest of the modelling code that came with its checkpoint."""
        model_class = type(self.module)
        if not model_class.__module__.startswith("transformers_modules."):
            return {"class": f"{model_class.__module__}.{model_class.__qualname__}"}
        return {"class": model_class.__qualname__, "source": digest_sources(Path(inspect.getfile(model_class)).parent)}

    @property
    def reads_experts(self) -> bool:
        """Whether the host reads which experts each row chose. Then decode steps cannot be recorded."""
        return getattr(self.module.config, "_experts_implementation", None) == EXPERTS_NAME

    @property
    def is_packed(self) -> bool:
        lookups = {id(child.weight) for child in self.module.modules() if isinstance(child, nn.Embedding)}
        matrices = (p for p in self.module.parameters() if p.dim() == 2)  # not experts', whose rows are padded
        return all(id(matrix) in lookups for matrix in matrices)

    def parts(self) -> Counter[str]:
        return Counter(part.linear.format for part in self.module.modules() if isinstance(part, PackedLinear))

    def widths(self) -> set[int]:
        """Widths of the rows that products take and return."""
        recurrent = {  # recurrent layers run in cells of fixed lengths
            m for layer in self.module.modules() if isinstance(layer.forward, RecurrentForward) for m in layer.modules()
        }
        kinds = (nn.Linear, PackedLinear, ProductPart)
        layers = [m for m in self.module.modules() if isinstance(m, kinds) and m not in recurrent]
        linear = {n for layer in layers for n in (layer.in_features, layer.out_features)}
        return linear | {n for p in self.module.parameters() if p.dim() == 3 for n in p.shape[1:]}  # experts

    def run_two_tokens(self, context: Any, cache: Any) -> None:
        """Run the model on two arbitrary tokens, with stand-ins for a step's context and cache."""
        positions = torch.arange(2, device=self.device)[None]
        with torch.inference_mode():
            self(torch.zeros_like(positions), positions, positions[0, :1], context, cache)

"""A model of transformers, called with a flattened batch: the tokens of all requests in one row.

Knows the arguments of a model's `forward`; knows neither blocks nor the code that runs inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A model and the facts needed to call it."""

    module: PreTrainedModel
    cache_argument: str | None
    """The name under which the model takes its cache; None if it takes none."""
    device: torch.device

    def __call__(self, token_ids: Tensor, positions: Tensor, keep: Tensor, context: Any, cache: Any) -> Tensor:
        """Compute logits [len(keep), vocab] of the rows `keep`, from token ids and positions [1, tokens].

        `context` and `cache` are a step's `ForwardContext` and `StepCache`, or stand-ins.
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

    def run_two_tokens(self, context: Any, cache: Any) -> None:
        """Run the model on two arbitrary tokens, with stand-ins for a step's context and cache."""
        positions = torch.arange(2, device=self.device)[None]
        with torch.inference_mode():
            self(torch.zeros_like(positions), positions, positions[0, :1], context, cache)

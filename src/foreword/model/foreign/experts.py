"""Mixture-of-experts layers whose result for a token does not depend on the other tokens.

Importing this module registers experts_implementation="foreword".

The library's own implementations multiply as many rows as an expert happens to get, and on a CPU float32 products of
few rows round differently. Here an expert's rows are padded to a fixed multiple, and a token's experts are added up
in the order of its own routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_NAME = "foreword"
ROW_MULTIPLE = 64
"""Enough rows for equal bits, and for whole vectors with any width."""


def foreword_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Mix the chosen experts of each token.

    hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k]; returns [tokens, hidden].
    """
    num_tokens, num_choices = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    results = hidden_states.new_zeros(num_tokens * num_choices, hidden_states.shape[-1])
    for expert in torch.unique(chosen).tolist():
        if expert >= module.num_experts:
            continue  # a routing sentinel that means "no expert"
        pairs = torch.nonzero(chosen == expert).flatten()
        rows = nn.functional.pad(hidden_states[pairs // num_choices], (0, 0, 0, -len(pairs) % ROW_MULTIPLE))
        # On a GPU the libraries choose by the number of rows how to multiply.
        parts = torch.split(rows, ROW_MULTIPLE if rows.is_cuda else len(rows))
        results[pairs] = torch.cat([_expert(module, expert, part) for part in parts])[: len(pairs)]
    weighted = results.view(num_tokens, num_choices, -1) * top_k_weights[..., None].to(results.dtype)
    total = weighted[:, 0].float()
    for choice in range(1, num_choices):
        total = total + weighted[:, choice]
    return total.to(hidden_states.dtype)


def _expert(module: Any, expert: int, rows: Tensor) -> Tensor:
    """Run one expert's feed-forward network, [rows, hidden] -> [rows, hidden]."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, first, expert, rows)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = _linear(module, "down_proj", expert, inner)
    return module.post_expert_norm(result) if module.has_post_expert_norm else result


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return nn.functional.linear(rows, weight.T if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, foreword_experts)

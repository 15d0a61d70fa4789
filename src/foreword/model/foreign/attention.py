"""The functions for attention and experts that Hugging Face models call; importing this module registers them.

attn_implementation="foreword" has no mask function, so models build no mask. A query's position determines what the
query sees. `probe.py` checks at load that models hide nothing else.

With experts_implementation="foreword", a token's result does not depend on other tokens. The library's own
implementations multiply the rows that an expert happens to get, and on a CPU float32 products of few rows round
differently. Here an expert's rows are padded to a fixed multiple, and a token's experts are added up in the order of
its own routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from foreword.kernels.reference import AttentionOptions
from foreword.model.step import Step

ATTENTION_NAME = "foreword"


HONOURED = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "alibi_slopes"))
"""Names of the arguments that a layer may pass to attention to change the result."""
WITHOUT_EFFECT = frozenset(
    ("dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits", "deterministic")
)
"""Names of arguments that change no result: nothing is trained here, `probe.py` checks causality, and positions are
known anyway. A layer that passes any other argument is refused with the argument's name, because the argument would be
ignored."""


def attention_options(
    query: Tensor,
    local_chunk: int | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_: Any,
) -> AttentionOptions:
    """The options that a layer passes to attention, in the kernels' terms; query [1, heads, tokens, dim]."""
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        local_chunk=local_chunk,
        slopes=alibi_slopes,
    )


def foreword_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: Step,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Write this step's KV into its slots, then attend over everything in the block tables.

    query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim]; returns [1, tokens, heads, value_dim].
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    storage = forward_context.storage
    step = forward_context.group(layer)
    slots = step.slots
    num_tokens = len(slots)
    storage.write(layer, slots, key[0].transpose(0, 1)[:num_tokens], value[0].transpose(0, 1)[:num_tokens])
    options = attention_options(query, storage.layout.attention[layer].local_chunk, **arguments)
    output = step.kernel.attend(query[0].transpose(0, 1), storage.blocks[layer], step.plan, options)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, foreword_attention)


EXPERTS_NAME = "foreword"
ROW_MULTIPLE = 64
"""An expert's rows are padded to a multiple of this number. Then a row's bits do not depend on the number of rows, and
the rows fill whole SIMD vectors of any width."""


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
        # On a GPU, the way in which the libraries multiply depends on the number of rows.
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

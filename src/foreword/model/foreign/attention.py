"""The attention function that Hugging Face models call.

Knows the calling convention of `transformers.AttentionInterface`; knows no model by name. Importing this module
registers the function as attn_implementation="foreword". No mask function has that name, so models build no mask: a
query's position determines what it sees. `probe.py` checks at load that models hide nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from foreword.kernels.reference import AttentionOptions
from foreword.model.step import Step

ATTENTION_NAME = "foreword"


HONOURED = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "alibi_slopes"))
"""Names of what a layer may pass to attention to change the result."""
WITHOUT_EFFECT = frozenset(
    ("dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_router_logits", "deterministic")
)
"""Names that change no result: nothing is trained here, `probe.py` checks causality, and positions are known anyway.
A layer that passes anything else is refused by its name, because it would be ignored."""


def attention_options(
    query: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    local_chunk: int | None = None,
) -> AttentionOptions:
    """What a layer asks attention for, in the kernels' terms; query [1, heads, tokens, dim]."""
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        local_chunk=local_chunk,
        slopes=alibi_slopes,
    )


def foreword_attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_: Any,
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
    options = attention_options(
        query,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
        alibi_slopes=alibi_slopes,
        local_chunk=storage.layout.attention[layer].local_chunk,
    )
    output = step.kernel.attend(query[0].transpose(0, 1), storage.blocks[layer], step.plan, options)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, foreword_attention)

"""Attention over prompts with linked parts, for training and evaluation. It gives the same results as the engine.

Each part is computed right after the head, and sees only the head and itself. Tokens after the parts see all tokens,
with keys rotated to their positions in the prompt and values unchanged. So one pass over the whole prompt computes what
linking computes, and gradients flow through this pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import rotate_half

HEAD, TAIL = 0, 1_000
"""The part numbers of tokens before the document's parts, and of tokens after them, which see all tokens."""


@dataclass(frozen=True, slots=True)
class Linked:
    """How prompts are linked, `[rows, length]` tokens."""

    positions: Tensor
    """The position at which each token is computed, `[rows, length]`."""
    mask: Tensor
    """The tokens that each token sees, `[rows, 1, length, length]`, except in the tail."""
    turns: tuple[Tensor, Tensor]
    """Cosine and sine that rotate each key to its position in the prompt, `[rows, 1, length, head dim]`."""
    in_tail: Tensor
    """Whether each token is in the tail, `[rows, 1, length, 1]`."""


def linked(model: Qwen3ForCausalLM, parts: Tensor, positions: Tensor, *, is_turned: bool = True) -> Linked:
    """How linking treats prompts, given parts and positions `[rows, length]`. Keys are rotated only if `is_turned`."""
    shifts = torch.zeros_like(positions)
    for row in range(len(parts)):
        first = positions[row][parts[row] == HEAD][-1] + 1
        for part in parts[row].unique().tolist():
            if part not in (HEAD, TAIL):
                own = parts[row] == part
                shifts[row, own] = positions[row][own][0] - first
    seen, seeing = parts[:, None, None, :], parts[:, None, :, None]
    causal = torch.ones(parts.shape[1], parts.shape[1], dtype=torch.bool).tril()
    mask = causal & ((seen == HEAD) | (seen == seeing))
    cosine, sine = model.model.rotary_emb(model.lm_head.weight, shifts if is_turned else torch.zeros_like(shifts))
    return Linked(positions - shifts, mask, (cosine[:, None], sine[:, None]), seeing == TAIL)


def use_linked_attention(model: Qwen3ForCausalLM) -> None:
    """Lets the layers of `model` take the argument `linked`: a `Linked`, or None for plain causal attention."""
    model.set_attn_implementation("linked")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    linked: Linked | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers: `[rows, heads, length, head dim]` in, `[rows, length, heads, head dim]` out."""
    if linked is None:
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return attended.transpose(1, 2), None
    cosine, sine = linked.turns
    turned = key * cosine + rotate_half(key) * sine
    in_parts = scaled_dot_product_attention(query, key, value, attn_mask=linked.mask, scale=scaling)
    in_tail = scaled_dot_product_attention(query, turned, value, is_causal=True, scale=scaling)
    return torch.where(linked.in_tail, in_tail, in_parts).transpose(1, 2), None


AttentionInterface.register("linked", _attention)

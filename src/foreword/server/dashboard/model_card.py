"""The card about the model, its layers, and its pool.

Knows an LLM's configuration and layout; draws them once, because they do not change.
"""

from __future__ import annotations

from html import escape

from foreword.server.dashboard import drawings as draw
from foreword.server.service import Service


def model_card(service: Service, num_blocks: int) -> str:
    """The card's facts, for a pool of `num_blocks` blocks."""
    llm = service.llm
    layout, block_size = llm.layout, llm.layout.block_size
    facts = {
        "model": service.model_name,
        "dtype": layout.kv_format.name,
        "layers": ", ".join(f"{number} {kind}" for kind, number in layout.layers_by_kind().items()),
        "context": draw.tokens(service.max_model_len),
        "pool": f"{draw.size(num_blocks * llm.kv_block_bytes)}, {draw.tokens(layout.tokens_in(num_blocks))}",
        "blocks": f"{draw.count(num_blocks)} of {block_size} tokens",
        "eviction": llm.config.cache.eviction_policy,
        "index": llm.config.cache.prefix_index or "radix",
    }
    return "".join(f"<div><span>{name}</span><b>{escape(str(value))}</b></div>" for name, value in facts.items())

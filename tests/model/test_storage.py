"""Writing and copying KV by Triton's kernels (interpreted, without a GPU) does what plain torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreword.model.layout import LayoutOptions
from foreword.model.storage import KVStorage
from tiny_models import TinyModels

pytest.importorskip("triton")


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "mqa_llama"])
def test_compiled_writes_and_copies_leave_the_bytes_of_plain_ones(tiny_models: TinyModels, family: str) -> None:
    """Layers without gaps between blocks and with them, blocks that are a source and a target at once."""
    model = tiny_models.loaded(family)
    layout = model.plan_layout(LayoutOptions(4))
    rng = np.random.default_rng(0)
    pools = [KVStorage(layout, 12, model.device, compiled=compiled) for compiled in (False, True)]
    for pool in pools:
        for pages in pool.pages():
            pages.zero_()
    for layer, shape in layout.attention.items():
        num_slots = 12 * pools[0].block_sizes[pools[0].group_of[layer]]
        slots = torch.from_numpy(rng.permutation(num_slots)[:17]).to(model.device)
        keys = torch.randn(17, shape.num_kv_heads, shape.key_dim).to(model.device, layout.kv_format.dtype)
        values = torch.randn(17, shape.num_kv_heads, shape.value_dim).to(model.device, layout.kv_format.dtype)
        for pool in pools:
            pool.write(layer, slots, keys, values)
    copies = torch.tensor([[0, 5], [5, 6], [6, 0], [2, 9]], dtype=torch.int32).to(model.device)
    for pool in pools:
        pool.copy_blocks(copies)
        pool.copy_blocks(copies[:0])
    assert any(bool(pages.any()) for pages in pools[0].pages())
    for plain, compiled in zip(pools[0].pages(), pools[1].pages(), strict=True):
        assert torch.equal(plain, compiled)

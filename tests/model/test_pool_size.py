"""What a pool holds: the tokens of text for all groups of layers, found by filling a real cache."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.cache import KVCacheManager, TokenSequence
from foreword.model.layout import LayoutOptions
from tiny_models import TinyModels


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "llama4_text", "mistral"])
def test_a_pool_holds_the_tokens_that_it_says(tiny_models: TinyModels, name: str) -> None:
    """Short prompts fill the pool: none of their blocks is beyond a window, so no group can do without one."""
    layout = tiny_models.loaded(name).plan_layout(LayoutOptions(4))
    num_blocks = 60 * len(layout.groups)
    manager = KVCacheManager(num_blocks, block_size=layout.block_size, groups=layout.specs)
    length, num_held = layout.hit_granularity, 0
    while manager.get_num_free_blocks() >= layout.blocks_of(length):
        request_id = str(num_held)
        tokens = np.full(length, num_held, np.int32)
        sequence = TokenSequence(request_id, tokens, block_size=layout.block_size)
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, length, hit) is not None
        num_held += 1
    told = layout.tokens_in(num_blocks)
    assert num_held * length <= told
    assert told - num_held * length <= 2 * length * len(layout.groups)


@pytest.mark.parametrize(("name", "num_groups"), [("qwen2", 1), ("gemma3_text", None)])
def test_groups_of_layers_share_the_pool(tiny_models: TinyModels, name: str, num_groups: int | None) -> None:
    layout = tiny_models.loaded(name).plan_layout(LayoutOptions(16))
    assert num_groups in (None, len(layout.groups))
    assert layout.tokens_in(1000) == 1000 * 16 // len(layout.groups)
    assert layout.blocks_of(17) == 2 * len(layout.groups)

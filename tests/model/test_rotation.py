"""Written families know how their keys turn; other models, and layers with windows, are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreword import LLM
from foreword.errors import UnsupportedModelError
from tiny_models import RECIPES, Recipe, save_model

REFUSED = {
    "glm4": "nobody has written down model_type='glm4'",
    "bloom": "nobody has written down model_type='bloom'",
    "mamba2": "nobody has written down model_type='mamba2'",
    "mistral": "layer 0 attends to a sliding window of 24 tokens",
    "gemma3_text": "layer 0 attends to a sliding window of 8 tokens",
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_linked_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        LLM(str(save_model(tmp_path, RECIPES.get(name, Recipe(name)))), **options)


@pytest.mark.usefixtures("on_cpu")
def test_a_window_that_no_request_can_leave_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path, Recipe("mistral", {"head_dim": 32, "sliding_window": 256}))
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with LLM(str(folder), max_model_len=200, **options) as llm:
        assert llm.engine.limits.allows_links

"""Fixtures that several test files share; whatever is expensive is made once per session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Checkpoints, loaded models and oracles by recipe name."""
    import torch  # here, so that only tests that need a model pay for it

    from tiny_models import TinyModels

    torch.set_num_threads(1)  # models this small spend more time waking threads than computing
    return TinyModels(tmp_path_factory.mktemp("tiny_models"))


@pytest.fixture(scope="session")
def chat_model(tiny_models: TinyModels) -> Path:
    """Folder of a tiny Llama with a tokenizer and a chat template."""
    return tiny_models.folder_with_tokenizer("llama")

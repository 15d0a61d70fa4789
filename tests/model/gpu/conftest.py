"""Models as they are loaded for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreword.config import ModelConfig
from foreword.model.checkpoint.read import read_checkpoint
from foreword.model.loader import LoadedModel, load_plain
from tiny_models import TinyModels


@pytest.fixture(scope="session")
def plain_model(tiny_models: TinyModels) -> Callable[[str], LoadedModel]:
    """Models by family, neither packed nor fused for this processor, each loaded once."""
    known: dict[str, LoadedModel] = {}

    def load(family: str) -> LoadedModel:
        if family not in known:
            options = ModelConfig(str(tiny_models.folder(family)), dtype="float32", attention_kernel="reference")
            known[family] = load_plain(read_checkpoint(options), options)
        return known[family]

    return load

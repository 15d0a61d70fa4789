"""No old name of transformers is used when a model loads and runs; CI runs this on its newest version."""

from __future__ import annotations

import logging
import warnings

import pytest

from foreword import LLM, SamplingParams
from tiny_models import TinyModels


class Warnings(logging.Handler):
    """What a library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "mamba2"])
def test_a_model_loads_and_runs_by_no_old_name(tiny_models: TinyModels, name: str) -> None:
    handler, logger = Warnings(), logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm = LLM(str(tiny_models.folder(name)), dtype="bfloat16", max_model_len=64)
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2))
            llm.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = [*handler.texts, *(str(one.message) for one in caught)]
    assert [text for text in said if "deprecated" in text] == []

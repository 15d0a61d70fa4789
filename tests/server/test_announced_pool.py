"""What the server says of its pool at the start, and where else the same figure stands."""

from __future__ import annotations

import logging

import pytest

from foreword import LLM
from foreword.server.observe.log import log_model
from foreword.server.observe.metrics import infos_of
from tiny_models import TinyModels


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_the_pools_tokens_are_those_of_all_groups(
    tiny_models: TinyModels, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with (
        LLM(str(tiny_models.folder(name)), num_gpu_blocks_override=600, self_check=False) as llm,
        caplog.at_level(logging.INFO, "foreword.server.observe.log"),
    ):
        log_model(llm, "tiny")
        told = infos_of(llm, llm.engine.snapshot())["config_info"]
        num_groups = len(llm.layout.groups)
    assert (num_groups > 1) == (name == "gemma3_text")
    [record] = [record for record in caplog.records if "pool:" in record.message]
    assert record.fields["tokens"] == told["pool_tokens"] == 600 * 16 // num_groups  # type: ignore[attr-defined]
    assert f"for {600 * 16 // num_groups:,} tokens of text; it may grow to" in record.message

"""`foreword bench kv-format`: distributions with KV in eight bits, compared with those of the model's own KV."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from foreword.bench.kv_format import add_arguments, run
from foreword.errors import ConfigError
from tiny_models import TinyModels

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_command_measures_a_users_texts(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_models.folder_with_tokenizer("qwen2"))
    texts = [tmp_path / "one", tmp_path / "two", tmp_path / "empty"]
    for path, text in zip(texts, ("The prefix that two requests share " * 20, "is computed once", ""), strict=True):
        path.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [model, *map(str, texts), "--dtype", "float32", "--max-tokens", "60"]
    assert run(parser.parse_args([*words, "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_texts"] == 2
    assert 60 < found["num_tokens"] <= 120
    assert 0 < found["mean_divergence"] <= found["largest_divergence"] < 1
    assert found["tokens_a_gigabyte"]["int8"] > 3.5 * found["tokens_a_gigabyte"]["own"]
    assert run(parser.parse_args(words)) == 0
    assert "in int8" in capsys.readouterr().out
    for wrong, message in (
        ([model, str(tmp_path / "none")], "cannot be read as text"),
        ([model, str(texts[2])], "all texts are empty"),
        ([model, str(texts[0]), "--max-tokens", "0"], "max_tokens=0 is too small"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(parser.parse_args(wrong))

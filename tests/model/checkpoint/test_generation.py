"""What a checkpoint's generation_config.json recommends, and what it may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.model.checkpoint.generation import FILE_NAME, differences, recommended_sampling
from foreword.request import SamplingParams

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def write(path: Path, fields: Any) -> Path:
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def test_a_checkpoint_recommends_what_its_file_says(tmp_path: Path) -> None:
    others = {"do_sample": True, "eos_token_id": [1, 2], "min_p": None, "max_length": 20, "transformers_version": "5"}
    write(tmp_path / FILE_NAME, RECOMMENDED | others)
    params = recommended_sampling(ModelConfig(str(tmp_path)))
    assert params == SamplingParams(**RECOMMENDED)
    assert differences(params) == RECOMMENDED


def test_a_checkpoint_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(ModelConfig(str(tmp_path))) == SamplingParams()


def test_the_option_takes_another_file_a_folder_or_none(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model / FILE_NAME, RECOMMENDED)
    path = write(other / FILE_NAME, {"temperature": 0.0})
    for wanted in (str(path), str(other)):
        found = recommended_sampling(ModelConfig(str(model), generation_config=wanted))
        assert differences(found) == {"temperature": 0.0}
    for wanted in ("none", "vllm"):
        assert recommended_sampling(ModelConfig(str(model), generation_config=wanted)) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": "warm"}, "temperature='warm' is not a number"),
        ({"temperature": True}, "temperature=True is not a number"),
        ({"top_k": 2.5}, r"top_k=2\.5 is not a number"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature"),
        ([1], "it holds a list"),
        ("{", "cannot be used"),
    ],
    ids=str,
)
def test_a_file_that_no_request_could_say_is_refused_with_its_name(tmp_path: Path, fields: Any, complaint: str) -> None:
    path = write(tmp_path / FILE_NAME, fields)
    with pytest.raises(ConfigError, match=complaint) as caught:
        recommended_sampling(ModelConfig(str(tmp_path)))
    assert str(path) in str(caught.value)
    assert "generation_config='none'" in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        recommended_sampling(ModelConfig(str(tmp_path), generation_config=str(tmp_path / "nowhere.json")))

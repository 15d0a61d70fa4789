"""`foreword bench calibrate`: rates that give back the times from which they were measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.calibrate import Calibration, add_arguments, calibrate, run
from foreword.errors import ConfigError, InvalidRequestError, ModelLoadError
from foreword.replay.capacity import read_model_config
from foreword.replay.timing import StepCost


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_cost_model_gives_back_what_was_measured(chat_model: Path) -> None:
    config = read_model_config(str(chat_model))
    with LLM(str(chat_model), kv_cache_memory_bytes=4 << 20) as llm:
        found = calibrate(llm, config, prefill_tokens=200, repeats=1)
        assert llm.get_prefix_cache_stats().hit_tokens == 0, "what is cached would not be measured"
    cost = StepCost.of_model(config, flops_per_s=found.flops_per_s, bytes_per_s=found.bytes_per_s)
    flops = 200 * cost.flops_per_token + 200 * 201 / 2 * cost.flops_per_pair
    explained = flops / found.flops_per_s
    assert explained == pytest.approx(max(found.prefill_s - cost.overhead_s, found.prefill_s / 2))
    assert found.bytes_per_s * found.decode_step_s > cost.weight_bytes


def test_the_command_ends_with_what_to_give_to_replay(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(str(chat_model), "--prefill-tokens", "64", "--repeats", "1")) == 0
    assert f"foreword replay TRACE --model {chat_model} --flops" in capsys.readouterr().out
    assert run(arguments(str(chat_model), "--prefill-tokens", "64", "--repeats", "1", "--json")) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(Calibration.__slots__)


def test_what_cannot_be_measured_is_refused(chat_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        run(arguments(str(chat_model), "--prefill-tokens", "0"))
    with pytest.raises(ConfigError, match="prefill_tokens=-1"):
        run(arguments(str(chat_model), "--prefill-tokens", "-1"))
    with pytest.raises(ConfigError, match="repeats=0"):
        run(arguments(str(chat_model), "--repeats", "0"))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        run(arguments(str(tmp_path)))

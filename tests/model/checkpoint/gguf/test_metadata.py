"""Metadata from strangers: a value of another kind than it should be is a clear error, and none is believed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from foreword.errors import ConfigError, ModelLoadError
from foreword.model.checkpoint.gguf.architectures import config_fields, weights_of
from foreword.model.checkpoint.gguf.file import GgufFile
from foreword.model.checkpoint.gguf.tokenizer import end_tokens, tokenizer_files
from gguf_writer import write_gguf
from tiny_models import RECIPES, Recipe, save_model

WRONG: list[Any] = [
    0, -1, 2**40, 1.5, float("nan"), float("inf"), "x", "", True, [], ["a"], [[]],
    np.array([], np.float32), np.array([1, 2]), np.array([np.nan] * 5, np.float32), np.zeros(400, np.int32),
]  # fmt: skip
PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256))]
BYTES = ["<|end|>", "a", "b", "Ġ", "ab", "Ġab"]


def sentence_pieces() -> dict[str, Any]:
    kinds = [2, 3, 3, *[1] * 6, *[6] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": np.array([0, 0, 0, *range(-1, -7, -1), *[0] * 256], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def byte_level() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": BYTES,
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.token_type": np.array([3, 1, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    made = Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))
    tokens: list[str] = made.encode(text).tokens
    return tokens


def test_pieces_merge_by_their_scores_and_other_bytes_become_pieces() -> None:
    assert tokens_of(sentence_pieces(), "ab aé") == ["<s>", "▁ab", "▁a", "<0xC3>", "<0xA9>"]
    plain = sentence_pieces() | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    assert tokens_of(plain, "ab ab") == ["ab", "▁ab"]
    assert tokens_of(plain | {"tokenizer.ggml.add_eos_token": True}, "ab") == ["ab", "</s>"]


def test_ends_are_those_that_the_file_names_and_those_that_are_known() -> None:
    said = byte_level() | {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 2**32 - 1}
    assert end_tokens(said, 6) == [0, 3]
    assert end_tokens(said, 6, own_tokenizer=False) == [3]


def test_bytes_merge_in_the_order_of_the_file() -> None:
    assert tokens_of(byte_level(), "ab ab") == ["<|end|>", "ab", "Ġab"]
    assert end_tokens(byte_level(), 6) == [0]
    config = tokenizer_files(byte_level() | {"tokenizer.chat_template.tool_use": "T"})["tokenizer_config.json"]
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "T"},
    ]


@pytest.mark.parametrize("sound", [sentence_pieces, byte_level])
def test_a_wrong_value_of_a_tokenizer_is_refused_or_left_out(sound: Any) -> None:
    for key in sound():
        for value in [*WRONG, ["a" * 600], PIECES[:-1], [*BYTES[:-1], 7]]:
            changed = sound() | {key: value}
            with contextlib.suppress(ModelLoadError):
                tokens_of(changed, "ab ab é")
                assert all(0 <= number < 6 for number in end_tokens(changed, 6))


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPES["llama"],
        RECIPES["phi3"],
        RECIPES["granite"],
        RECIPES["gemma2"],
        Recipe("gemma3_text", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    ],
    ids=lambda recipe: recipe.model_type,
)
def test_a_wrong_value_of_a_model_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    write_gguf(save_model(tmp_path / "plain", recipe), tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    config_fields(file.metadata, file.tensors)
    refused = 0
    for key in file.metadata:
        for value in WRONG:
            changed = {**file.metadata, key: value}
            try:
                json.dumps(config_fields(changed, file.tensors), allow_nan=False)
                weights_of(changed, file.tensors.values())
            except (ModelLoadError, ConfigError):
                refused += 1
    assert refused > 50


def test_factors_of_angles_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32))

    write_gguf(save_model(tmp_path / "plain", RECIPES["llama"]), tmp_path / "model.gguf", change=change)
    file = GgufFile(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        config_fields(file.metadata, file.tensors)

"""Files from strangers: what is damaged, or lies about its sizes, is an error in a moment, and costs no memory."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from foreword.errors import ConfigError, ModelLoadError
from foreword.model.checkpoint.gguf.architectures import config_fields, weights_of
from foreword.model.checkpoint.gguf.file import BLOCKS, GgufFile, open_gguf
from foreword.model.checkpoint.gguf.tokenizer import end_tokens, tokenizer_files
from gguf_writer import write_gguf
from tiny_models import RECIPES, Recipe, save_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "déf", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.ones((3, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_what_a_sound_file_has(tmp_path: Path, sound: bytes) -> None:
    file = opened(tmp_path, sound)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "bc", "déf", ""]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.tensors["one"].values().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensors["one"].values(1, 2).tolist() == [[3, 4, 5]]
    assert (file.tensors["two"].shape, file.tensors["two"].blocks.name) == ((3, 32), "Q8_0")
    assert file.tensors["two"].rows(0, 3).shape == (3, 34)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_any_kind_is_a_clear_error_or_none(tmp_path: Path, sound: bytes, data: st.DataObject) -> None:
    """Cut, and with 1, 4 or 8 bytes overwritten by extremes."""
    content = bytearray(sound[: data.draw(st.integers(0, len(sound)))] if data.draw(st.booleans()) else sound)
    extremes = (0, 1, 2**7 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    for _ in range(data.draw(st.integers(0, 2))):
        width = data.draw(st.sampled_from((1, 4, 8)))
        at, value = data.draw(st.integers(0, len(sound))), data.draw(st.sampled_from(extremes))
        content[at : at + width] = (value % 256**width).to_bytes(width, "little")
    tracemalloc.start()
    try:
        file = opened(tmp_path, bytes(content))
        for tensor in file.tensors.values():
            tensor.values()
    except ModelLoadError as error:
        message = str(error)
    else:
        message = "file.gguf"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "file.gguf" in message
    assert peak < 4 << 20


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "less than 24 bytes"),
        (b"PK" * 50, "does not begin with 'GGUF'"),
        (header(0, 0, 1), "version 1"),
        (header(0, 0, 3 << 24), "other order of bytes"),
        (header(2**63, 0), "do not fit"),
        (header(0, 2**63), "do not fit"),
        (header(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2**63) + b"\0" * 99, "reaches beyond the end"),
        (header(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**62) + b"\0" * 99, "reaches beyond the end"),
        (header(0, 1) + text("a") + struct.pack("<I", 99) + b"\0" * 99, "unknown type 99"),
        (
            header(0, 1) + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20 + b"\0" * 200,
            "unknown type 9",
        ),
        (header(0, 2) + (text("a") + struct.pack("<IB", 0, 1)) * 2 + b"\0" * 99, "two keys 'a'"),
        (header(1, 0) + tensor("a", (2**62, 4), 0, 0) + b"\0" * 99, "beyond the end"),
        (header(1, 0) + tensor("a", (0, 4), 0, 0) + b"\0" * 99, "is empty"),
        (header(1, 0) + tensor("a", (4,) * 5, 0, 0) + b"\0" * 99, "5 dimensions"),
        (header(1, 0) + tensor("a", (33,), 2, 0) + b"\0" * 99, "no multiple of 32"),
        (header(1, 0) + tensor("a", (4,), 0, 7) + b"\0" * 99, "not aligned"),
        (header(2, 0) + tensor("a", (4,), 0, 0) + tensor("b", (4,), 0, 0) + b"\0" * 99, "lies upon another"),
        (header(2, 0) + tensor("a", (4,), 0, 0) + tensor("a", (4,), 0, 32) + b"\0" * 99, "two tensors 'a'"),
        (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + b"\0" * 99, "general.alignment is 0"),
        (header(1, 0) + tensor("a", (4,), 77, 0) + b"\0" * 99, "ggml's type 77"),
    ],
)
def test_lies_are_found(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        opened(tmp_path, content)


def split_of(tmp_path: Path, numbers: list[tuple[int, int]]) -> Path:
    """A split model of two files whose headers say these (split.no, split.count)."""
    for at, (number, count) in enumerate(numbers):
        path = tmp_path / f"m-{at + 1:05}-of-{len(numbers):05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_tensor(f"t{at}", np.zeros(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tmp_path / f"m-00001-of-{len(numbers):05}.gguf"


def test_split_models_are_whole_or_refused(tmp_path: Path) -> None:
    path = split_of(tmp_path, [(0, 2), (1, 2)])
    assert [list(file.tensors) for file in open_gguf(path)] == [["t0"], ["t1"]]
    path.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf is not beside it"):
        open_gguf(path)
    with pytest.raises(ModelLoadError, match="says that it is another one"):
        open_gguf(split_of(tmp_path, [(0, 2), (0, 2)]))
    with pytest.raises(ModelLoadError, match="is one of 3 files"):
        open_gguf(split_of(tmp_path, [(0, 3), (1, 3)]))


@pytest.mark.parametrize("value", [struct.pack("<IIQ2I", 9, 4, 2, 1, 2), struct.pack("<I", 8) + text("two")])
@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_a_count_of_a_split_model_is_a_number(tmp_path: Path, key: str, value: bytes) -> None:
    """An array, which is neither equal to a number nor different from it, or a text."""
    for number in (0, 1):
        counts = {"split.count": 2, "split.no": number, "split.tensors.count": 0}
        keys = {name: struct.pack("<II", 4, count) for name, count in counts.items()} | {key: value}
        content = header(0, 3) + b"".join(text(name) + packed for name, packed in keys.items())
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"has {key}=.*not a count"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_gguf_py(kind: int) -> None:
    blocks, rng = BLOCKS[kind], np.random.default_rng(kind)
    assert blocks.name == gguf.GGMLQuantizationType(kind).name
    assert (blocks.num_values, blocks.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    raw = rng.integers(0, 256, (256, blocks.num_bytes * 2), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
        found = blocks.expand(raw.reshape(-1, blocks.num_bytes)).reshape(256, -1)
    both_are_none = np.isnan(expected) & np.isnan(found)
    assert ((expected.view(np.uint32) == found.view(np.uint32)) | both_are_none).all()
    assert not both_are_none.all()


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


def test_texts_of_a_file_that_was_cut_since_it_was_opened_are_an_error(tmp_path: Path, sound: bytes) -> None:
    file = opened(tmp_path, sound)
    file.path.write_bytes(sound[:64])
    with pytest.raises(OSError, match="ended early"):
        file.metadata["tokenizer.ggml.tokens"]

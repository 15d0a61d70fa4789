"""The head start: how much memory it touches, for whom, and that nothing about a checkpoint stops it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from foreword import LLM
from foreword.config import ModelConfig
from foreword.kernels.products.weights12 import WEIGHTS
from foreword.model.cpu.head_start import MOST_BYTES, head_start
from foreword.model.cpu.product import can_multiply
from tiny_models import TinyModels

pytestmark = pytest.mark.skipif(not can_multiply(), reason="weights are not packed on this processor")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were touched ahead."""
    found: list[int] = []

    @contextmanager
    def touched_ahead(num_bytes: int) -> Iterator[None]:
        found.append(num_bytes)
        yield

    monkeypatch.setattr(WEIGHTS, "touched_ahead", touched_ahead)
    return found


def save(path: Path, rows: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
    weights = {"weight": (rows, 32), "norm": (rows,), "layers.0.mlp.experts.3.up_proj.weight": (rows, 64)}
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in weights.items()}, path)


def test_twelve_bits_for_each_weight_of_all_files(tmp_path: Path, touched: list[int]) -> None:
    save(tmp_path / "model-1.safetensors")
    save(tmp_path / "model-2.safetensors", rows=128)
    with head_start(ModelConfig(str(tmp_path))):
        pass
    assert touched == [192 * 32 * 12 // 8]


def test_a_model_that_is_loaded_gets_one(tiny_models: TinyModels, tmp_path: Path, touched: list[int]) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_models.folder("llama")).bfloat16().save_pretrained(tmp_path)
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**20, self_check=False):
        pass
    assert len(touched) == 1


def test_no_more_than_can_be_touched_in_the_time(tmp_path: Path, touched: list[int]) -> None:
    header = b'{"w":{"dtype":"BF16","shape":[1000000,100000],"data_offsets":[0,0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with head_start(ModelConfig(str(tmp_path))):
        pass
    assert touched == [MOST_BYTES]


def test_models_that_are_not_packed_get_none(tmp_path: Path, touched: list[int]) -> None:
    save(tmp_path / "model.safetensors")
    for options in (
        ModelConfig(str(tmp_path), dtype="float32"),
        ModelConfig(str(tmp_path), device="cuda"),
        ModelConfig("someone/on-the-hub"),
        ModelConfig(str(tmp_path / "missing")),
    ):
        with head_start(options):
            pass
    save(tmp_path / "model.safetensors", dtype=torch.float32)
    with head_start(ModelConfig(str(tmp_path))):
        pass
    assert touched == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 8,
        b"\xff" * 9,
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        *(
            len(header).to_bytes(8, "little") + header
            for sizes in ("-8, 32", '"8", "x"', "Infinity, 1", "0.5, 1", "8")
            for header in [b'{"w":{"dtype":"BF16","shape":[%s]}}' % sizes.encode()]
        ),
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
    ],
)
def test_a_broken_file_is_left_to_the_loader(tmp_path: Path, touched: list[int], content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with head_start(ModelConfig(str(tmp_path))):
        pass
    assert touched == []


def test_an_error_of_the_load_passes_through(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors")
    with pytest.raises(ZeroDivisionError), head_start(ModelConfig(str(tmp_path))):
        1 / 0  # noqa: B018

"""The head start: memory for packed weights is there before they are, for models that pack them, whatever the files."""

from __future__ import annotations

import mmap
import threading
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
from foreword.model.cpu import head_start as head_start_module
from foreword.model.cpu.head_start import head_start
from foreword.model.cpu.product import can_multiply
from tiny_models import TinyModels

pytestmark = pytest.mark.skipif(not can_multiply(), reason="weights are not packed on this processor")
MIB = 2**20


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def touchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "touch-memory"]


def touched_bytes(options: ModelConfig) -> int:
    """How much memory a head start gets, to the next 4 MiB; all of it is given back."""
    before = resident_bytes()
    with head_start(options):
        for thread in touchers():
            thread.join(60)
        touched = resident_bytes() - before
    assert resident_bytes() - before < 4 * MIB
    return round(touched / (4 * MIB)) * 4 * MIB


def describe(path: Path, *tensors: str) -> None:
    """A checkpoint's file with its header alone, which is all that a head start reads; `tensors`: name, type, shape."""
    entries = ('"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[0,0]}}'.format(*one.split(" ", 2)) for one in tensors)
    header = "{{{}}}".format(",".join(entries)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_memory_for_the_packed_weights_of_all_files_is_there_ahead(tmp_path: Path) -> None:
    """Twelve bits for each number of a matrix; experts stay plain, and so do norms."""
    describe(tmp_path / "model-1.safetensors", "q_proj BF16 4096,4096", "norm BF16 99999999", "bias F32 9999,9999")
    describe(tmp_path / "model-2.safetensors", "up_proj BF16 8192,4096", "layers.0.experts.3.up_proj BF16 9999,9999")
    assert touched_bytes(ModelConfig(str(tmp_path))) == 3 * 16 * MIB * 12 // 8


def test_weights_are_packed_into_memory_that_was_touched(tmp_path: Path) -> None:
    describe(tmp_path / "model.safetensors", "q_proj BF16 8192,4096")
    with head_start(ModelConfig(str(tmp_path))):
        for thread in touchers():
            thread.join(60)
        before = resident_bytes()
        WEIGHTS.allocate(40 * MIB)[:] = 1
        assert resident_bytes() - before < 4 * MIB


def test_memory_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start_module, "MOST_BYTES", 64 * MIB)
    describe(tmp_path / "model.safetensors", "q_proj BF16 1000000,100000")
    assert touched_bytes(ModelConfig(str(tmp_path))) == 64 * MIB


def test_a_model_that_is_loaded_gets_a_head_start(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_models.folder("llama")).bfloat16().save_pretrained(tmp_path)
    touch, asked = WEIGHTS.touched_ahead, []

    @contextmanager
    def touched_ahead(num_bytes: int) -> Iterator[None]:
        asked.append(num_bytes)
        with touch(num_bytes):
            yield

    monkeypatch.setattr(WEIGHTS, "touched_ahead", touched_ahead)
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**20, self_check=False) as llm:
        assert llm.generate({"prompt_token_ids": [5, 6]})
    assert len(asked) == 1
    assert not touchers()


def test_models_that_are_not_packed_get_none(tmp_path: Path) -> None:
    describe(tmp_path / "model.safetensors", "q_proj BF16 8192,4096")
    assert touched_bytes(ModelConfig(str(tmp_path))) > 0
    for options in (
        ModelConfig(str(tmp_path), dtype="float32"),
        ModelConfig(str(tmp_path), device="cuda"),
        ModelConfig("someone/on-the-hub"),
        ModelConfig(str(tmp_path / "missing")),
    ):
        assert touched_bytes(options) == 0
    save_file({"weight": torch.zeros(4096, 1024)}, tmp_path / "model.safetensors")
    assert touched_bytes(ModelConfig(str(tmp_path))) == 0


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
            for sizes in ("-8, 9000000", '"8", "x"', "Infinity, 1", "0.5, 1", "9000000")
            for header in [b'{"w":{"dtype":"BF16","shape":[%s]}}' % sizes.encode()]
        ),
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
    ],
)
def test_a_broken_file_is_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with head_start(ModelConfig(str(tmp_path))):
        assert not touchers()

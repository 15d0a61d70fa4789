"""The weights of a GGUF model, each expanded when it is asked for.

Knows blocks, order and types; knows no architecture. Values are computed in float32 and rounded once.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foreword.model.checkpoint.gguf.architectures import Weight, weights_of
from foreword.model.checkpoint.gguf.file import open_gguf

CHUNK_VALUES = 1 << 20
"""Values that are expanded at once: 4 MB in float32."""


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Where a weight lies in a GGUF file."""

    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.weight.tensor.shape

    def read(self, dtype: torch.dtype) -> Tensor:
        """The weight in memory of its own. The file's pages are given back."""
        tensor, weight = self.weight.tensor, self.weight
        output = torch.empty(tensor.shape, dtype=dtype)
        rows, flat = tensor.rows(), output.view(-1, tensor.shape[-1])
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, len(rows), step):
            chosen = slice(start, start + step) if weight.order is None else weight.order[start : start + step]
            packed = rows[chosen].reshape(-1, tensor.blocks.num_bytes)
            values = tensor.blocks.expand(np.ascontiguousarray(packed)).reshape(-1, tensor.shape[-1])
            flat[start : start + step] = torch.from_numpy(values - np.float32(weight.minus))
        _give_back(tensor.data)
        return output


def gguf_places(files: list[Path]) -> dict[str, GgufPlace]:
    """The weights of a model by their names. Raises UnsoundGgufError, ModelLoadError or UnsupportedModelError."""
    opened = open_gguf(files[0].resolve())
    tensors = [tensor for file in opened for tensor in file.tensors.values()]
    return {name: GgufPlace(weight) for name, weight in weights_of(opened[0].metadata, tensors).items()}


def _give_back(data: memoryview) -> None:
    """Let the system drop the pages of mapped bytes: they were read once."""
    whole = data.obj
    assert isinstance(whole, mmap.mmap)
    start = int(np.frombuffer(data, np.uint8).ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    whole.madvise(mmap.MADV_DONTNEED, first, start + len(data) - first)

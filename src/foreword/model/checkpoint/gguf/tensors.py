"""The weights of a GGUF model, each expanded when it is asked for.

Knows blocks, order and types; knows no architecture. Values are computed in float32 and rounded once.
"""

from __future__ import annotations

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
        """The weight in memory of its own. Raises OSError."""
        tensor, weight = self.weight.tensor, self.weight
        output = torch.empty(tensor.shape, dtype=dtype)
        flat = output.view(-1, tensor.shape[-1])
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, len(flat), step):
            values = tensor.values(start, min(start + step, len(flat))) - np.float32(weight.minus)
            flat[start : start + step] = torch.from_numpy(values)
        return output if weight.order is None else output[torch.from_numpy(weight.order)]


def gguf_places(files: list[Path]) -> dict[str, GgufPlace]:
    """The weights of a model by their names. Raises UnsoundGgufError, ModelLoadError or UnsupportedModelError."""
    opened = open_gguf(files[0])
    tensors = [tensor for file in opened for tensor in file.tensors.values()]
    return {name: GgufPlace(weight) for name, weight in weights_of(opened[0].metadata, tensors).items()}

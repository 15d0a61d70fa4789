"""The weights of a GGUF model. Weights whose codes linear layers can multiply stay in their codes; other weights are
expanded when they are read.

Values are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from foreword.kernels.products.coded import Codes
from foreword.model.checkpoint.gguf.architectures import Weight as GgufWeight
from foreword.model.checkpoint.gguf.architectures import weights_of
from foreword.model.checkpoint.gguf.file import open_gguf
from foreword.model.cpu.coded_product import CodedProduct, CodedRows, Weight


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """The place of a weight in a GGUF file."""

    weight: GgufWeight
    keeps_codes: bool
    """Whether weights of linear layers stay in their codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.weight.shape

    def read(self, dtype: torch.dtype) -> Weight:
        """Read the weight, as codes or as a tensor in memory of its own. Raises OSError."""
        tensor, minus, order = self.weight.tensor, self.weight.minus, self.weight.order
        if tensor.blocks.name == "F32" or minus or len(self.shape) != 2:
            whole = len(self.shape) < 2  # then the order is of values, not of rows
            raw = self.weight.rows(0, math.prod(self.shape[:-1]), in_order=not whole)
            values = tensor.blocks.expand(raw.reshape(-1, tensor.blocks.num_bytes)).reshape(self.shape)
            values = values[order] if whole and order is not None else values
            return torch.from_numpy(values - np.float32(minus) if minus else values).to(dtype)
        rows = CodedRows(tensor.blocks.kind, (self.shape[0], self.shape[1]), self._codes)
        return rows if self.keeps_codes and CodedProduct.can_take(rows) else rows.plain(dtype)

    def _codes(self, first: int, end: int) -> Codes:
        return self.weight.tensor.blocks.codes(self.weight.rows(first, end))


def gguf_places(files: list[Path], *, keeps_codes: bool) -> dict[str, GgufPlace]:
    """The weights of a model by their names. Raises UnsoundGgufError, ModelLoadError or UnsupportedModelError."""
    opened = open_gguf(files[0])
    tensors = [tensor for file in opened for tensor in file.tensors.values()]
    weights = weights_of(opened[0].metadata, tensors)
    return {name: GgufPlace(weight, keeps_codes) for name, weight in weights.items()}

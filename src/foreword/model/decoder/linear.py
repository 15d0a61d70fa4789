"""Linear layers that own their weights, in the format that this processor multiplies fastest.

Knows tensors, and three formats: 12 bits a weight (`cpu/product.py`), oneDNN's packed order, and plain tensors; knows
no model. Every product of few rows reorders a plain weight again, or reads it in strides. It reads a packed one as a
stream: decoding becomes up to twice as fast. With packed weights, a row's bits do not depend on the number of rows, not
even on whether the row is alone (docs/decisions/0009-packed-weights.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.config import keep_onednn_to_vectors
from foreword.model.cpu.product import CompactProduct
from foreword.model.cpu.row_functions import RowKernels
from foreword.model.spec import ActivationName, GateClamp

keep_onednn_to_vectors()

ROWS_HINT = 16
"""The number of rows for which oneDNN chooses its layout; other numbers changed neither bits nor times."""


class Linear:
    """Rows [..., in_features] to [..., out_features], of one type."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Join `weights` [any, in_features], whose outputs follow each other; `bias` [out_features]."""
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        self.bias = None if bias is None else bias.detach()
        self.compact = CompactProduct(weights, bias) if CompactProduct.can_take(weights[0]) else None
        """The product in 12 bits, if this processor has instructions for it."""
        self._packed: Tensor | None = None
        self._plain: Tensor | None = None
        if self.compact is None:
            weight = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).detach()
            if can_pack(weight.dtype, weight.device):
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
            else:
                self._plain = weight

    @property
    def format(self) -> str:
        """The weight's format: "12 bits", "packed" or "plain"."""
        return "12 bits" if self.compact is not None else "plain" if self._packed is None else "packed"

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access of a packed weight."""
        if self.compact is not None:
            return self.compact.weight
        plain: Tensor | None = self._plain if self._packed is None else self._packed.to_dense()
        assert plain is not None
        return plain

    def __call__(self, rows: Tensor) -> Tensor:
        if self.compact is not None:
            return self.compact(rows)
        if self._packed is None:
            assert self._plain is not None
            return torch.nn.functional.linear(rows, self._plain, self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class GatedLinear:
    """activation(gate(rows)) * up(rows) as one product: rows [..., in_features] to [..., out_features / 2]."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        kernels: RowKernels,
        activation: ActivationName = "silu",
        clamp: GateClamp | None = None,
    ) -> None:
        """`weights` and `bias`: all outputs of the gate, then all of up."""
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        self._width = self.out_features // 2
        self._activation, self._clamp, self._kernels = activation, clamp, kernels
        is_silu = activation == "silu" and clamp is None
        self.compact: CompactProduct | None = None
        """Gate, up and the multiplication as one operation, if this processor has instructions for it."""
        self.product: Linear | None = None
        if is_silu and CompactProduct.can_take(weights[0]):
            self.compact = CompactProduct(weights, bias, gated=True)
        else:
            self.product = Linear(weights, bias)
        on_cpu = weights[0].device.type == "cpu"
        self._has_kernel = is_silu and on_cpu and RowKernels.can_take(self._width, weights[0].dtype)

    @property
    def format(self) -> str:
        return "12 bits" if self.product is None else self.product.format

    def __call__(self, rows: Tensor) -> Tensor:
        if self.product is None:
            assert self.compact is not None
            return self.compact(rows)
        both = self.product(rows)
        if self._has_kernel:
            return self._kernels.silu_gate(both)
        # Contiguous, so that a row's bits do not depend on its place: see `row_padding.py`.
        gate, up = both[..., : self._width].contiguous(), both[..., self._width :]
        if self._clamp is not None:
            limit = self._clamp.limit
            gate = gate.clamp(max=limit)
            return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * self._clamp.slope))
        return _ACTIVATIONS[self._activation](gate) * up


_ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"),
}


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has packed products for such weights on this machine."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not (available and torch.backends.mkldnn.enabled):
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))

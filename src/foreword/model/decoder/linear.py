"""Linear layers that own their weights, in the format that this processor multiplies fastest.

Formats are 12 bits a weight (`cpu/product.py`), the codes of a file (`cpu/coded_product.py`), oneDNN's packed order,
and plain tensors. Every product of few rows reorders a plain weight again, or reads it in strides. A packed weight is
read as a stream: decoding becomes up to twice as fast. With packed weights, a row's bits do not depend on the number of
rows, not even on whether the row is alone (docs/decisions/0009-packed-weights.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from foreword.config import keep_onednn_to_vectors
from foreword.kernels.llvm.tiles import PRODUCT_PANEL
from foreword.model.adapters.weights import Deltas
from foreword.model.cpu.coded_product import CodedLinear, CodedProduct, CodedRows, Weight
from foreword.model.cpu.layer_program import RowProduct
from foreword.model.cpu.product import CompactProduct
from foreword.model.cpu.row_functions import Gate, RowKernels
from foreword.model.spec import ActivationName, GateClamp

keep_onednn_to_vectors()

ROWS_HINT = 16
"""The number of rows for which oneDNN chooses its layout; other numbers changed neither bits nor times."""


class Product(Protocol):
    """A weight in one format, and how rows are multiplied by it."""

    @property
    def format(self) -> str:
        """The format's name. Only in "plain" may a row's bits depend on the number of rows."""

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: the plain weight; some formats make a copy on every access."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [..., in_features] and add the bias; return [..., out_features]."""


class Linear:
    """A product of rows [..., in_features]; the results [..., out_features] have the same type."""

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None) -> None:
        """Join `weights` [any, in_features] to one product, with outputs end to end; `bias` [out_features]."""
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        self._product = _product_of(weights, bias)

    @property
    def in_program(self) -> RowProduct | None:
        """The product; None if a program cannot run it."""
        product = self._product
        if isinstance(product, CodedLinear):
            return product if product.in_program else None
        return product if isinstance(product, CompactProduct) else None

    @property
    def coded(self) -> CodedLinear | None:
        """The product with a file's codes; None if the weight has no codes."""
        return self._product if isinstance(self._product, CodedLinear) else None

    @property
    def format(self) -> str:
        return self._product.format

    @property
    def weight(self) -> Tensor:
        return self._product.weight

    def some(self, rows: Tensor, outputs: Tensor) -> Tensor:
        """Columns `outputs` [n] int64 of the result without adapters, [..., n], with the same bits as in the whole
        result.

        Products that compute each panel separately multiply only the panels of these outputs. In oneDNN, the order of
        addition depends on the sizes of both sides, so weights in oneDNN's order are multiplied whole.
        """
        if isinstance(self._product, CompactProduct | CodedLinear):
            return self._product.some(rows, outputs.numpy())
        return self._product(rows)[..., outputs]

    def __call__(self, rows: Tensor, deltas: Deltas | None = None) -> Tensor:
        """`deltas`: the terms that adapters add. The bits of a row without an adapter do not depend on `deltas`."""
        result = self._product(rows)
        return result if deltas is None else deltas.add(rows, result)


def _product_of(weights: Sequence[Weight], bias: Tensor | None) -> Product:
    """Make the product that suits these weights and this processor best."""
    coded = [weight for weight in weights if isinstance(weight, CodedRows) and CodedProduct.can_take(weight)]
    if len(coded) == len(weights) and all(weight.has_order_of(coded[0]) for weight in coded):
        return CodedLinear(coded, bias)
    plain = plain_weights(weights)
    if CompactProduct.can_take(plain[0]):
        return CompactProduct(plain, bias)
    weight = (plain[0] if len(plain) == 1 else torch.cat(plain)).detach()
    return (PackedProduct if can_pack(weight.dtype, weight.device) else PlainProduct)(weight, bias)


def plain_weights(weights: Sequence[Weight]) -> list[Tensor]:
    """The weights as tensors of one type."""
    dtypes = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    dtype = dtypes[0] if dtypes else torch.float32
    return [weight if isinstance(weight, Tensor) else weight.plain(dtype) for weight in weights]


class PlainProduct:
    """A product with a plain tensor."""

    format = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, None if bias is None else bias.detach()

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, self.weight, self._bias)


class PackedProduct:
    """A product with a weight in oneDNN's packed order."""

    format = "packed"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain

    def __call__(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output


class HeadLinear:
    """A product for each head: rows [rows, heads, in_features] to [rows, heads, out_features]."""

    def __init__(self, weights: Tensor) -> None:
        """`weights` [heads, out_features, in_features]."""
        num_heads, size, _ = weights.shape
        self._together: CompactProduct | None = None
        self._apart: list[Linear] = []
        if CompactProduct.can_take(weights[0]) and size % PRODUCT_PANEL == 0:
            self._together = CompactProduct([weights.flatten(0, 1)], None, num_heads=num_heads)
        else:
            self._apart = [Linear([weight.contiguous()], None) for weight in weights]

    @property
    def format(self) -> str:
        return self._apart[0].format if self._together is None else self._together.format

    def __call__(self, rows: Tensor, target: Tensor) -> None:
        """Write the result to `target` [rows, heads, out_features], which may have gaps between heads and rows."""
        if self._together is not None:
            self._together.of_heads(rows, target)
        for head, product in enumerate(self._apart):
            target[:, head] = product(rows[:, head].contiguous())


class GatedLinear:
    """activation(gate(rows)) * up(rows) as one product: rows [..., in_features] to [..., out_features / 2]."""

    def __init__(
        self,
        weights: Sequence[Weight],
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
        """Gate, up and the multiplication as one operation; None if this processor or these weights do not allow it."""
        self.product: Linear | None = None
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        if is_silu and len(plain) == len(weights) and CompactProduct.can_take(plain[0]):
            self.compact = CompactProduct(plain, bias, gated=True)
        else:
            self.product = Linear(weights, bias)
        takes = clamp is None and (not plain or plain[0].device.type == "cpu")
        self._gate: Gate | None = activation if takes else None

    @property
    def gate(self) -> Gate | None:
        """The operation after the product; None if the product includes it or no compiled operation does it."""
        return None if self.product is None else self._gate

    @property
    def in_program(self) -> RowProduct | None:
        """The product; None if a program cannot run both the product and the gate."""
        if self.product is None:
            return self.compact
        product = self.product.in_program
        has_gate = product is not None and self.gate is not None and RowKernels.can_take(self._width, product.dtype)
        return product if has_gate else None

    @property
    def format(self) -> str:
        return "12 bits" if self.product is None else self.product.format

    def __call__(self, rows: Tensor, deltas: Deltas | None = None) -> Tensor:
        """`deltas`: the terms that adapters add to gate and up; rows without an adapter keep their bits."""
        if self.product is not None:
            return self._gated(self.product(rows, deltas))
        assert self.compact is not None
        result = self.compact(rows)
        if deltas is not None:
            changed = deltas.rows.changed()
            inputs = rows[changed]
            result[changed] = self._gated(deltas.of(changed).add(inputs, self.compact.before_gate(inputs)))
        return result

    def _gated(self, both: Tensor) -> Tensor:
        """Return activation(gate) * up; `both`: rows with gate and up end to end."""
        if self._gate is not None and RowKernels.can_take(self._width, both.dtype):
            return self._kernels.gate(self._gate, both)
        # Contiguous, so that a row's bits do not depend on its place: see `passes.py`.
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


class Embedding:
    """Looks up rows of a table by number. A table in codes stays in codes; a head with the same table shares them."""

    def __init__(self, table: Weight, head: Linear | None, dtype: torch.dtype) -> None:
        """`head`: the output head, if it multiplies by the same table, else None; `dtype`: the type of the rows."""
        self._dtype, self._coded, self._plain = dtype, None, None
        if isinstance(table, CodedRows) and CodedProduct.can_take(table):
            self._coded = CodedLinear([table], None) if head is None else head.coded
        else:
            self._plain = table if isinstance(table, Tensor) else table.plain(dtype)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the table's rows [rows, width] with these numbers [rows]."""
        if self._coded is not None:
            return self._coded.rows(numbers).to(self._dtype)
        assert self._plain is not None
        return torch.nn.functional.embedding(numbers, self._plain)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has packed products for weights of type `dtype` on this machine."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not (available and torch.backends.mkldnn.enabled):
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))

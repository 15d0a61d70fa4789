"""Linear layers whose weights lie in memory in the order in which a CPU's matrix product reads them.

Knows `nn.Linear` and oneDNN's prepacked products, as torch.compile's freezing uses them; knows no model by name.

Every product of few rows reorders a plain weight again, or reads it in strides. It reads a packed one as a stream:
decoding becomes up to twice as fast. With packed weights, a row's bits do not depend on the number of rows, not even
on whether the row is alone (docs/decisions/0009-packed-weights.md has the measurements).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreword.config import keep_onednn_to_vectors
from foreword.model.cpu.product import CompactProduct

logger = logging.getLogger(__name__)

keep_onednn_to_vectors()

ROWS_HINT = 16
"""The number of rows for which oneDNN chooses its layout; other numbers changed neither bits nor times."""


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed copy of its weight, so that the plain weight can be freed.

    `forward` takes [..., in_features] and returns [..., out_features] in the same dtype.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Join `weights` [any, in_features], whose outputs follow each other; `bias` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        self.compact = CompactProduct(weights, bias) if CompactProduct.can_take(weights[0]) else None
        """The product, if this processor has instructions for it."""
        if self.compact is None:
            # Neither parameter nor buffer: an opaque tensor can be neither moved nor cast.
            weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def stack(cls, linears: Sequence[nn.Linear]) -> PackedLinear:
        """Join layers that read the same input, and of which all have a bias or none."""
        return cls(*stacked(linears))

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access, for models that compute with it."""
        plain: Tensor = self._packed.to_dense() if self.compact is None else self.compact.weight
        return plain

    def forward(self, input: Tensor) -> Tensor:
        if self.compact is not None:
            return self.compact(input)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def stacked(linears: Sequence[nn.Linear]) -> tuple[list[Tensor], Tensor | None]:
    """The weights of layers and their joined bias, if they have one."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return [linear.weight.detach() for linear in linears], torch.cat(biases) if biases else None


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has packed products for such weights on this machine."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not (available and torch.backends.mkldnn.enabled):
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))


def pack_linears(module: nn.Module) -> int:
    """Replace every plain `nn.Linear` in `module` by a packed one, if this machine can; returns their number.

    Plain weights that nothing else holds are freed. An embedding that shares its weight with the output head keeps
    the weight for lookups. It stays in the memory-mapped checkpoint, and the system loads only the rows in use.
    """
    packed: dict[int, PackedLinear] = {}
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if type(child) is not nn.Linear or not can_pack(child.weight.dtype, child.weight.device):
            continue
        if id(child) not in packed:
            packed[id(child)] = PackedLinear.stack([child])
        module.set_submodule(path, packed[id(child)])
    logger.debug("%d linear layers packed", len(packed))
    return len(packed)


def has_unpacked_products(module: nn.Module) -> bool:
    """Whether the library multiplies any plain matrix, in a way in which a row's bits depend on the others.

    Experts' matrices (three-dimensional) do not count, because experts pad their rows themselves.
    """
    lookups = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return any(parameter.dim() == 2 and id(parameter) not in lookups for parameter in module.parameters())

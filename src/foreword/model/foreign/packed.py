"""Linear layers of transformers' modules, replaced by ones that own a packed weight.

Knows `nn.Linear`; `decoder/linear.py` has the products. Knows no model by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreword.model.cpu.product import CompactProduct
from foreword.model.decoder.linear import Linear, can_pack

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed copy of its weight, so that the plain weight can be freed.

    `forward` takes [..., in_features] and returns [..., out_features] in the same dtype.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Join `weights` [any, in_features], whose outputs follow each other; `bias` [out_features]."""
        super().__init__()
        self.linear = Linear(weights, bias)
        self.out_features, self.in_features = self.linear.out_features, self.linear.in_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def compact(self) -> CompactProduct | None:
        """The product in 12 bits, if this processor has instructions for it."""
        return self.linear.compact

    @classmethod
    def stack(cls, linears: Sequence[nn.Linear]) -> PackedLinear:
        """Join layers that read the same input, and of which all have a bias or none."""
        return cls(*stacked(linears))

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access, for models that compute with it."""
        return self.linear.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def stacked(linears: Sequence[nn.Linear]) -> tuple[list[Tensor], Tensor | None]:
    """The weights of layers and their joined bias, if they have one."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return [linear.weight.detach() for linear in linears], torch.cat(biases) if biases else None


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

"""Replaces modules of a loaded model by faster modules that compute the same.

A trial decides: a module is replaced only if a known formula gives the module's exact bits. Other modules stay.

    norm(x) * weight                      seven operations become one           (`RowKernels.rms_norm`)
    down(silu(gate(x)) * up(x))           two products become one, and the gate one operation
    query(x), key(x), value(x)            three products become one
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreword.kernels.llvm.norms import ADD_ONE, ROUND_NORM
from foreword.model.cpu.row_functions import Norm, RowKernels
from foreword.model.decoder.linear import GatedLinear, Linear, can_pack
from foreword.model.foreign.trial import NUM_ROWS, RandomInputs, attempt, same_bits, settings

logger = logging.getLogger(__name__)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Names of linear layers that usually read the same input."""


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed copy of its weight, so that the plain weight can be freed.

    `forward` takes [..., in_features] and returns [..., out_features] in the same dtype.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Join `weights` [any, in_features] to one product, with outputs end to end; `bias` [out_features]."""
        super().__init__()
        self.linear = Linear(weights, bias)
        self.out_features, self.in_features = self.linear.out_features, self.linear.in_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def stack(cls, linears: Sequence[nn.Linear]) -> PackedLinear:
        """Join layers that read the same input; either all layers have a bias, or no layer has one."""
        return cls(*stacked(linears))

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access, for models that compute with it."""
        return self.linear.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input)


def stacked(linears: Sequence[nn.Linear]) -> tuple[list[Tensor], Tensor | None]:
    """Return the weights of `linears`, and the joined bias; None if the layers have no bias."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return [linear.weight.detach() for linear in linears], torch.cat(biases) if biases else None


def pack_linears(module: nn.Module) -> int:
    """Replace every plain `nn.Linear` in `module` by a packed one, if this machine can; return their number.

    Plain weights that nothing else holds are freed. If an embedding shares its weight with the output head, the plain
    weight is kept for lookups: it stays in the memory-mapped checkpoint, of which the system loads only the rows in
    use.
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


def fuse(module: nn.Module) -> None:
    """Replace parts of `module` where possible. Call it before its linear layers are packed."""
    kernels = RowKernels()
    fusion = _Fusion(kernels)
    for path, child in list(module.named_modules()):
        replacement = fusion.replacement(child) if path else None
        if replacement is not None:
            module.set_submodule(path, replacement)
    for parent in list(module.modules()):
        if not isinstance(parent, FusedGate):
            _merge_siblings(parent)


class FusedNorm(nn.Module):
    """A root-mean-square norm in one pass, in which a row's bits do not depend on other rows.

    The plain module computes rows of another type than the weight's, because some models keep norms in float32.
    """

    def __init__(self, plain: nn.Module, weight: Tensor, epsilon: float, form: int, kernels: RowKernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._plain: Callable[[Tensor], Tensor] = plain.forward
        self.norm = Norm(self.weight, epsilon, form)
        self._kernels = kernels

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return self._plain(hidden_states)
        return self._kernels.rms_norm(hidden_states, self.norm)


class FusedGate(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, kernels: RowKernels) -> None:
        super().__init__()
        self._gated = GatedLinear(*stacked([gate, up]), kernels)
        self.down = PackedLinear.stack([down])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self._gated(x))
        return output


class SharedProduct:
    """One product for several linear layers, computed when the first of them runs."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.packed = PackedLinear.stack(linears)
        self.sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def part(self, number: int, x: Tensor) -> Tensor:
        if x is not self._input or number not in self._waiting:
            self._input = x
            self._waiting = dict(enumerate(torch.split(self.packed(x), self.sizes, -1)))
        output = self._waiting.pop(number)
        if not self._waiting:
            self._input = None
        return output.contiguous()


class ProductPart(nn.Module):
    """One linear layer as a part of a product that its siblings share."""

    def __init__(self, linear: nn.Linear, product: SharedProduct, number: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.product = product
        self._number = number

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access."""
        return torch.split(self.product.packed.weight, self.product.sizes)[self._number]

    @property
    def bias(self) -> Tensor | None:
        bias = self.product.packed.bias
        return None if bias is None else torch.split(bias, self.product.sizes)[self._number]

    def forward(self, input: Tensor) -> Tensor:
        return self.product.part(self._number, input)


# ------------------------------------------------------------------------------------------- trials


class _Fusion:
    """Decides which module may replace another; one verdict serves all modules of the same type and sizes."""

    def __init__(self, kernels: RowKernels) -> None:
        self._kernels = kernels
        self._verdicts: dict[tuple[Any, ...], Any] = {}

    def replacement(self, module: nn.Module) -> nn.Module | None:
        if _has_hooks(module) or len(inspect.signature(module.forward).parameters) != 1:
            return None  # such as a gated norm, which may take a second tensor
        parameters, children = dict(module.named_parameters()), dict(module.named_children())
        if not children and list(parameters) == ["weight"] and parameters["weight"].dim() == 1:
            return self._norm(module, parameters["weight"].detach())
        linears = [child for child in children.values() if type(child) is nn.Linear]
        if len(linears) == 3 and len(children) in (3, 4):
            return self._gate(module, linears)
        return None

    def _norm(self, module: nn.Module, weight: Tensor) -> nn.Module | None:
        if not self._kernels.can_take(len(weight), weight.dtype) or weight.device.type != "cpu":
            return None
        epsilons = [value for value in vars(module).values() if type(value) is float and 0 < value < 1e-2]
        if len(epsilons) != 1:
            return None
        key = (type(module), settings(module), weight.dtype, len(weight))
        if key not in self._verdicts:
            self._verdicts[key] = _norm_form(module, weight, epsilons[0])
        form = self._verdicts[key]
        return None if form is None else FusedNorm(module, weight, epsilons[0], form, self._kernels)

    def _gate(self, module: nn.Module, linears: list[nn.Linear]) -> nn.Module | None:
        first = linears[0].weight
        sizes = [(linear.in_features, linear.out_features) for linear in linears]
        if sizes[0] != sizes[1] or sizes[2] != sizes[0][::-1] or not can_pack(first.dtype, first.device):
            return None
        same = len({(linear.bias is None, linear.weight.dtype) for linear in linears[:2]}) == 1
        if not same or not self._kernels.can_take(sizes[0][1], first.dtype):
            return None
        key = (type(module), settings(module), *(type(child) for child in module.children()), first.dtype, *sizes)
        if key not in self._verdicts:
            self._verdicts[key] = _gate_order(module, linears)
        order = self._verdicts[key]
        if order is None:
            return None
        return FusedGate(linears[order[0]], linears[order[1]], linears[2], self._kernels)


def _norm_form(module: nn.Module, weight: Tensor, epsilon: float) -> int | None:
    """The form of a root-mean-square norm: how it rounds and scales; None if the module is no such norm.

    During the trial the module's weight is random, because with a weight of ones all formulas agree.
    """
    inputs = RandomInputs()
    x, original = inputs.rows(NUM_ROWS, len(weight), dtype=weight.dtype), weight.clone()
    with torch.no_grad():
        weight.copy_(inputs.rows(len(weight)))
        try:
            output = attempt(lambda: module(x), "a module with one weight takes other arguments than rows")
            wide = x.float()
            norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
            formulas = {
                ROUND_NORM: (weight * norm.to(x.dtype)).to(x.dtype),
                0: (weight.float() * norm).to(x.dtype),
                ADD_ONE: ((1.0 + weight.float()) * norm).to(x.dtype),
            }
        finally:
            weight.copy_(original)
    return next((form for form, expected in formulas.items() if same_bits(output, expected)), None)


def _gate_order(module: nn.Module, linears: list[nn.Linear]) -> tuple[int, int] | None:
    """Which of the first two linear layers is the gate; None if the module computes something else."""
    x = RandomInputs().rows(NUM_ROWS, linears[0].in_features, dtype=linears[0].weight.dtype)
    with torch.no_grad():
        output = attempt(lambda: module(x), "a module of three linear layers takes other arguments than rows")
        for gate, up in ((0, 1), (1, 0)):
            if same_bits(output, linears[2](nn.functional.silu(linears[gate](x)) * linears[up](x))):
                return gate, up
    return None


def _merge_siblings(parent: nn.Module) -> None:
    """Let the linear layers of `parent` that read the same input share one product.

    Only running the model would show which layers these are, so the names of usual projections decide. A wrong guess
    costs time only: a layer that gets another tensor than its siblings computes the product again.
    """
    children = [getattr(parent, name, None) for name in PROJECTIONS]
    linears = [child for child in children if type(child) is nn.Linear and not _has_hooks(child)]
    if len(linears) < len(children):
        return
    first = linears[0].weight
    alike = {(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}
    if len(alike) > 1 or not can_pack(first.dtype, first.device):
        return
    product = SharedProduct(linears)
    for number, (name, linear) in enumerate(zip(PROJECTIONS, linears, strict=True)):
        setattr(parent, name, ProductPart(linear, product, number))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)

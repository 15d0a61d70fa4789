"""A layer's feed-forward network: one for all rows, or experts, some of which a router chooses for each row.

An expert multiplies the rows that chose it by its matrices. The bits of a row's product do not depend on the other
rows, or on their number. The results of a row's experts are added in the order of choice, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor

from foreword.model.adapters.weights import NO_DELTAS, LayerDeltas
from foreword.model.cpu.coded_product import Weight
from foreword.model.cpu.row_functions import Gate, RowKernels
from foreword.model.decoder.linear import GatedLinear, Linear, plain_weights
from foreword.model.passes import RowPadding
from foreword.model.spec import DecoderSpec, NetworkNames

Take = Callable[..., tuple[list[Weight], Tensor | None]]
"""Returns the weights of the products that it is given by name, and their joined bias."""


class Network:
    """down(activation(gate(rows)) * up(rows))."""

    def __init__(self, names: NetworkNames, spec: DecoderSpec, take: Take, kernels: RowKernels) -> None:
        self._gate = GatedLinear(*take(*names.gate_up), kernels, spec.activation, spec.clamp)
        self._down = Linear(*take(names.down))

    @property
    def gate(self) -> Gate | None:
        """The operation after the product with gate and up; None if there is no such operation."""
        return self._gate.gate

    @property
    def products(self) -> tuple[Linear | GatedLinear, ...]:
        return self._gate, self._down

    def __call__(self, rows: Tensor, count: int, deltas: LayerDeltas = NO_DELTAS) -> Tensor:
        """Return results of rows [rows, width], same shape. Rows from `count` on are padding, which is computed too."""
        return self._down(self._gate(rows, deltas.gate), deltas.down)


class Experts:
    """The sum of the networks that a router chooses for a row, and of a shared network if the model has one."""

    def __init__(
        self, spec: DecoderSpec, take: Take, kernels: RowKernels, plain: Callable[[str], Tensor], dtype: torch.dtype
    ) -> None:
        """`plain`: returns a tensor that no product multiplies, by its name; `dtype`: the type of rows."""
        assert spec.experts is not None
        self._spec, experts = spec.experts, spec.experts
        router, bias = take(experts.router)
        if experts.routes_in_float32:
            router = [weight.float() for weight in plain_weights(router)]
        self._router = Linear(router, bias)
        self._correction = None if experts.correction is None else plain(experts.correction)
        self._experts = [Network(experts.network(number), spec, take, kernels) for number in range(experts.count)]
        self._shared = None if experts.shared is None else Network(experts.shared, spec, take, kernels)
        self._shared_gate = None if experts.shared_gate is None else Linear(*take(experts.shared_gate))
        is_packed = all(part.format != "plain" for part in self.products)
        self._padded = RowPadding.for_model([experts.width], dtype, torch.get_num_threads(), packed=is_packed)

    @property
    def products(self) -> tuple[Linear | GatedLinear, ...]:
        networks = self._experts if self._shared is None else [*self._experts, self._shared]
        gates = [self._router] if self._shared_gate is None else [self._router, self._shared_gate]
        return (*(part for network in networks for part in network.products), *gates)

    def __call__(self, rows: Tensor, count: int, deltas: LayerDeltas = NO_DELTAS) -> Tensor:
        """Return results of rows [rows, width], same shape. Rows from `count` on are padding, which no expert computes.

        `deltas` has nothing for experts: no adapter changes them.
        """
        weights, chosen = self._route(rows)
        pairs, choices = chosen[:count].flatten(), self._spec.chosen
        results = rows.new_zeros(len(pairs), rows.shape[1])
        for expert in torch.unique(pairs).tolist():
            places = torch.nonzero(pairs == expert).flatten()
            part = rows[places // choices]
            padding = (0, 0, 0, self._padded(len(part)) - len(part))
            results[places] = self._experts[expert](torch.nn.functional.pad(part, padding), len(part))[: len(part)]
        weighted = results.view(count, choices, -1) * weights[:count, :, None].to(rows.dtype)
        mixed = torch.zeros_like(rows)
        mixed[:count] = _sum_in_order(weighted.float()).to(rows.dtype)
        if self._shared is None:
            return mixed
        if self._shared_gate is None:
            return mixed + self._shared(rows, count)
        # The gate becomes as wide as rows, because a column would not fill vectors: see `passes.py`.
        gate = self._shared_gate(rows).expand(rows.shape).contiguous()
        return mixed + torch.sigmoid(gate) * self._shared(rows, count)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each row's experts and the experts' numbers, both [rows, chosen], the best first."""
        spec = self._spec
        scores = self._router(rows.float() if spec.routes_in_float32 else rows).float()
        if spec.weights == "softmax of chosen":
            best = scores.topk(spec.chosen)
            return best.values.softmax(-1), best.indices
        weights = scores.sigmoid() if spec.weights == "sigmoid" else scores.softmax(-1)
        ranks = weights if self._correction is None else weights + self._correction
        chosen = (ranks if spec.groups == 1 else self._of_best_groups(ranks)).topk(spec.chosen).indices
        weights = weights.gather(1, chosen)
        if spec.normalised:
            weights = weights / (_sum_in_order(weights)[:, None] + 1e-20)
        return weights if spec.scale == 1.0 else weights * spec.scale, chosen

    def _of_best_groups(self, ranks: Tensor) -> Tensor:
        """Return `ranks` [rows, experts], with minus infinity for experts of groups that may not be chosen."""
        spec, groups = self._spec, ranks.view(len(ranks), self._spec.groups, -1)
        of_groups = _sum_in_order(groups.topk(spec.group_best).values.transpose(1, 2))
        chosen = of_groups.topk(spec.chosen_groups).indices
        hidden = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, chosen, value=False)
        return groups.masked_fill(hidden[..., None], -torch.inf).flatten(1)


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum of parts [rows, n, ...] over n, from the first to the last."""
    total = parts[:, 0]
    for number in range(1, parts.shape[1]):
        total = total + parts[:, number]
    return total


def unstack(spec: DecoderSpec, weights: MutableMapping[str, Weight], place: str) -> None:
    """Replace the tensors that hold all experts of a layer, if there are such tensors, by tensors of each expert."""
    facts = spec.experts
    if facts is None or facts.stack is None:
        return
    for suffix, end in (("", "weight"), ("_bias", "bias")):
        gate_up, down = (weights.pop(f"{place}{facts.stack}.{name}{suffix}") for name in ("gate_up_proj", "down_proj"))
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        for number in range(facts.count):
            names = facts.network(number)
            parts = gate_up[number][..., ::2], gate_up[number][..., 1::2], down[number]
            for name, part in zip(names.products, parts, strict=True):
                weights[f"{place}{name}.{end}"] = part.T.contiguous() if end == "weight" else part.contiguous()


def experts_apart(weights: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Name weights of transformers' modules as in files, and split the experts that transformers joins."""
    if family == "gpt_oss":
        return dict(weights)  # the file joins experts, too
    mixtral, stored = family == "mixtral", dict[str, Tensor]()
    network, parts = (
        ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    for name, tensor in weights.items():
        layer, _, last = name.partition(".mlp.experts.")
        if last not in ("gate_up_proj", "down_proj"):
            stored[name.replace(".mlp.", f".{network}.")] = tensor
            continue
        names = parts[:2] if last == "gate_up_proj" else parts[2:]
        for number, expert in enumerate(tensor):
            for part, weight in zip(names, expert.chunk(len(names)), strict=True):
                stored[f"{layer}.{network}.experts.{number}.{part}.weight"] = weight
    return stored

"""Decoder: computes all families that have a spec, by one formula, from the spec and the weights.

With weights in 12 bits or in the codes of a file, the layers of usual families are one program
(`cpu/layer_program.py`). Otherwise Python calls one operation after the other, with the same bits. In every operation,
a row's bits depend on that row alone.

In the last layer, rows whose logits are not needed are computed only up to attention.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import replace

import torch
from torch import Tensor

from foreword.kernels.llvm.norms import ADD_ONE, ROUND_NORM
from foreword.kernels.reference import AttentionOptions
from foreword.model.adapters.weights import NO_DELTAS, LayerDeltas
from foreword.model.cpu.coded_product import Weight
from foreword.model.cpu.layer_program import LayerChain, LayerOperations, LayerParts
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.cpu.row_functions import Norm, RowKernels
from foreword.model.decoder.linear import Embedding, GatedLinear, HeadLinear, Linear, plain_weights
from foreword.model.decoder.network import Experts, Network, Take, unstack
from foreword.model.decoder.rotary import Rotary, Turns
from foreword.model.layout import LayerLayout
from foreword.model.spec import DecoderSpec, NormSpec
from foreword.model.step import GivenRows, Step

_FORMS = {"rounded": ROUND_NORM, "in float32": 0, "one more": ADD_ONE}


class RowNorm:
    """A norm of rows [..., width]; the result has the same shape and type. A row's bits do not depend on other rows."""

    def __init__(self, weight: Tensor, spec: NormSpec, kernels: RowKernels) -> None:
        self.weight, self._spec, self.kernels = weight.detach(), spec, kernels
        takes = not spec.centred and weight.device.type == "cpu" and kernels.can_take(len(weight), weight.dtype)
        self.norm = Norm(self.weight, spec.epsilon, _FORMS[spec.scales]) if takes else None
        """The compiled norm; None if no kernel takes this norm."""

    def __call__(self, rows: Tensor) -> Tensor:
        if self.norm is not None:
            return self.kernels.rms_norm(rows, self.norm)
        wide = rows.float()
        if self._spec.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._spec.epsilon)
        if self._spec.scales == "rounded":
            return self.weight * normed.to(rows.dtype)
        scales = self.weight.float() + 1.0 if self._spec.scales == "one more" else self.weight.float()
        return (scales * normed).to(rows.dtype)


class Decoder:
    """A model of a family that has a spec. One thread at a time may call it; other threads may call `run` meanwhile."""

    def __init__(self, spec: DecoderSpec, weights: MutableMapping[str, Weight]) -> None:
        """Pack `weights`, named as in checkpoints of the family, and empty the mapping to free plain copies."""
        self.spec, kernels = spec, RowKernels()
        norm = weights.pop("model.norm.weight")
        assert isinstance(norm, Tensor)
        self.dtype, self.device = norm.dtype, norm.device
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)
        self.rotaries = [Rotary(rotary, self.device) for rotary in spec.rotaries]
        self.layers = [
            DecoderLayer(number, spec, weights, kernels, self.rotaries, norm) for number in range(len(spec.layers))
        ]
        self._norm = RowNorm(norm, spec.norm, kernels)
        embedding = weights.pop("model.embed_tokens.weight")
        self._head = Linear([embedding if spec.tied else weights.pop("lm_head.weight")], None)
        self._embedding = Embedding(embedding, self._head if spec.tied else None, self.dtype)
        self.chain = self._make_chain()
        """The program of all layers; None: Python calls the operations one by one."""
        self._last_normed: Tensor | None = None
        self._keep = torch.empty(0, dtype=torch.int64)

    def embed(self, step: Step) -> Tensor:
        """The rows that enter the first layer, [rows, width]."""
        rows = self._embedding(step.token_ids)
        rows = rows if self.spec.embedding_scale == 1.0 else rows * self._embedding_scale
        return rows if step.given is None else rows.index_copy(0, step.given.places, step.given.values)

    def __call__(self, step: Step) -> Tensor:
        """Write the step's keys and values; return logits [num_kept, vocab or columns] of the rows `keep`."""
        rows = self.embed(step)
        turns = [rotary.turns(step.positions, self.dtype) for rotary in self.rotaries]
        self._keep, self._last_normed = step.keep[: step.num_kept], None
        if self.chain is not None and (step.given is None or not step.given.added):
            if step.columns is not None and step.num_kept:
                if self.chain.run_layers(rows, turns, step):
                    return self._logits(self.hidden_rows(), step.columns)
            elif (logits := self.chain.logits(rows, turns, step)) is not None:
                return self._scaled(logits)
        normed = _normed(rows, self.layers[0].before_attention)
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            mixed = layer.attend(normed, turns, step)
            deltas = step.deltas(layer.number)
            rows, normed = layer.add(rows, normed, mixed, following.before_attention, step.num_tokens, deltas)
            if step.given is not None and layer.number < len(step.given.added):
                _add_given(step.given, layer.number, rows, normed, following.before_attention)
        last = self.layers[-1]
        mixed = last.attend(normed, turns, step)
        if not step.num_kept:
            return rows.new_empty(0, self._head.out_features)
        keep = step.keep  # with padding, like all rows
        deltas = NO_DELTAS if step.adapted is None else step.adapted.of(keep).layer(last.number)
        _, normed = last.add(rows[keep], normed[keep], mixed[keep], self._norm, step.num_kept, deltas)
        self._last_normed = normed
        return self._logits(normed, step.columns)[: step.num_kept]  # computed for padding too: see `passes.py`

    def _logits(self, normed: Tensor, columns: Tensor | None) -> Tensor:
        """Return logits of normed rows [rows, width], for the tokens `columns`; None: for all tokens."""
        if columns is None:
            return self._scaled(self._head(normed))
        if self.spec.logit_cap is not None:  # the bits of tanh may depend on an element's place
            return self._scaled(self._head(normed))[:, columns]
        return self._scaled(self._head.some(normed, columns))

    def hidden_rows(self) -> Tensor:
        """The normed rows that gave the logits of the last call, [num_kept, width]."""
        if self._last_normed is not None:
            return self._last_normed[: len(self._keep)]
        assert self.chain is not None
        return self.chain.normed_rows(self._keep, self.spec.hidden_size)

    def run(self, step: Step, *, until: int) -> None:
        """Write the keys and values of the first `until` layers. Any thread may call this."""
        turns = [rotary.turns(step.positions, self.dtype) for rotary in self.rotaries]
        rows = self.embed(step)
        normed = _normed(rows, self.layers[0].before_attention)
        for layer, following in zip(self.layers[: until - 1], self.layers[1:until], strict=True):
            mixed = layer.attend(normed, turns, step)
            rows, normed = layer.add(rows, normed, mixed, following.before_attention, step.num_tokens)
        self.layers[until - 1].write(normed, turns, step)

    def _scaled(self, logits: Tensor) -> Tensor:
        spec = self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        return logits if spec.logit_cap is None else (logits / spec.logit_cap).tanh() * spec.logit_cap

    def _make_chain(self) -> LayerChain | None:
        """Join all layers, the last norm and the head into one program; None if a program cannot run a part."""
        all_parts, head, norm = [layer.parts() for layer in self.layers], self._head.in_program, self._norm.norm
        parts = [part for part in all_parts if part is not None]
        if len(parts) < len(all_parts) or norm is None or head is None or head.dtype != self.dtype:
            return None
        operations = [
            LayerOperations(layer.number, part, layer.attention) for layer, part in zip(self.layers, parts, strict=True)
        ]
        return LayerChain(operations, norm, head)

    @property
    def layouts(self) -> dict[int, LayerLayout]:
        """The KV that each layer stores."""
        spec = self.spec
        value_dim = spec.head_dim if spec.latent is None else spec.latent.size
        return {
            number: LayerLayout(spec.num_kv_heads, spec.head_dim, value_dim, layer.window)
            for number, layer in enumerate(spec.layers)
        }

    @property
    def options(self) -> list[AttentionOptions]:
        """The attention options of each layer."""
        return [layer.attention for layer in self.layers]

    @property
    def activation_widths(self) -> list[int]:
        """The widths (last dimensions) of the activations that pass through elementwise functions."""
        spec = self.spec
        widths = {spec.hidden_size, spec.intermediate_size, *spec.widths, spec.head_dim}
        widths |= {rotary.turned for rotary in spec.rotaries}
        if spec.experts is not None and spec.experts.shared_width is not None:
            widths.add(spec.experts.shared_width)
        if spec.experts is not None and spec.experts.weights == "sigmoid":
            widths.add(spec.experts.count)
        return sorted(widths if spec.logit_cap is None else widths | {spec.vocab_size})

    @property
    def is_packed(self) -> bool:
        """Whether a row of every matrix product has the same bits, however many rows there are."""
        return "plain" not in self.parts()

    def parts(self) -> Counter[str]:
        """Count the matrix products in each format of weights, and the layers that run as one program."""
        counts = Counter(part.format for layer in self.layers for part in layer.products)
        counts[self._head.format] += 1
        counts["in one program"] = 0 if self.chain is None else len(self.layers)
        return counts


class DecoderLayer:
    """One layer: its products, its norms, and how it attends."""

    def __init__(
        self,
        number: int,
        spec: DecoderSpec,
        weights: MutableMapping[str, Weight],
        kernels: RowKernels,
        rotaries: list[Rotary],
        like: Tensor,
    ) -> None:
        """`like`: a tensor with the type and the device of all others."""
        self.number, self._spec = number, spec
        self._layer, names = spec.layers[number], spec.names
        place = f"model.layers.{number}."

        def norm(name: str | None) -> RowNorm | None:
            return None if name is None else RowNorm(plain(f"{name}.weight"), spec.norm, kernels)

        def own_norm(name: str, epsilon: float) -> RowNorm:
            return RowNorm(plain(f"{name}.weight"), replace(spec.norm, epsilon=epsilon), kernels)

        def plain(name: str) -> Tensor:
            tensor = weights.pop(f"{place}{name}")
            assert isinstance(tensor, Tensor), "only products have codes"
            return tensor

        def take(*products: str) -> tuple[list[Weight], Tensor | None]:
            tensors = [weights.pop(f"{place}{name}.weight") for name in products]
            has_bias = [f"{place}{name}.bias" in weights for name in products]
            if not any(has_bias):
                return tensors, None
            parts = zip(products, tensors, has_bias, strict=True)
            biases = [plain(f"{name}.bias") if has else like.new_zeros(len(w)) for name, w, has in parts]
            return tensors, torch.cat(biases)

        self.before_attention, self._after_attention = norm(names.before_attention), norm(names.after_attention)
        self._before_network, self._after_network = norm(names.before_network), norm(names.after_network)
        self._head_norms = norm(names.query_norm), norm(names.key_norm)
        self._project, self._output = Linear(*take(*names.project)), Linear(*take(names.output))
        self._network: Network | Experts
        if self._layer.has_experts:
            unstack(spec, weights, place)
            self._network = Experts(spec, take, kernels, plain, like.dtype)
        else:
            self._network = Network(names.network, spec, take, kernels)
        self._latent = None
        if spec.latent is not None:
            up = plain_weights([weights.pop(f"{place}{spec.latent.up}.weight")])[0].to(like.dtype)
            self._latent = LatentHeads(spec, up, take, own_norm)
        sinks = None if names.sinks is None else plain(names.sinks)
        self.attention = AttentionOptions(spec.score_scale, self._layer.window, spec.score_cap, sinks)
        self._rotary = None if self._layer.rotary is None else rotaries[self._layer.rotary]
        self._heads = self._rotary_kernel(like.dtype) if like.device.type == "cpu" else None

    @property
    def products(self) -> tuple[Linear | GatedLinear | HeadLinear, ...]:
        latent = () if self._latent is None else self._latent.products
        return self._project, self._output, *self._network.products, *latent

    def attend(self, normed: Tensor, turns: list[Turns], step: Step) -> Tensor:
        """Write keys and values of rows [rows, width], and attend. Return mixed values [rows, spec.mixed_width]."""
        queries, group = self.write(normed, turns, step), step.group(self.number)
        mixed = group.kernel.attend(queries, step.storage.blocks[self.number], group.plan, self.attention)
        return (mixed if self._latent is None else self._latent.values(mixed)).flatten(1)

    def write(self, normed: Tensor, turns: list[Turns], step: Step) -> Tensor:
        """Write keys and values of rows [rows, width]; return queries [rows, heads, head_dim]."""
        group, blocks = step.group(self.number), step.storage.blocks[self.number]
        projected = self._project(normed, step.deltas(self.number).project)
        if self._spec.head_norm == "all heads":
            query, key, value = torch.split(projected, list(self._spec.widths), -1)
            query_norm, key_norm = self._head_norms
            projected = torch.cat((_normed(query, query_norm), _normed(key, key_norm), value), -1)
        if self._heads is not None and self._heads.can_write(blocks, projected.dtype):
            return self._heads(projected, turns[self._layer.rotary or 0], group.slots, blocks)
        queries, keys, values = self._split(projected, turns)
        count = len(group.slots)
        step.storage.write(self.number, group.slots, keys[:count], values[:count])
        return queries

    def _split(self, projected: Tensor, turns: list[Turns]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [rows, heads, head_dim], normalised and rotated.

        With latent KV, the vectors [rows, 1, width] are both the keys and the values.
        """
        if self._latent is not None:
            assert self._rotary is not None
            assert self._layer.rotary is not None
            turn = functools.partial(self._rotary.turn, turns=turns[self._layer.rotary])
            queries, vectors = self._latent.split(projected, turn)
            return queries, vectors, vectors
        parts = torch.split(projected, list(self._spec.widths), -1)
        query, key, value = (part.reshape(len(part), -1, self._spec.head_dim) for part in parts)
        if self._spec.head_norm == "each head":
            query, key = _normed(query, self._head_norms[0]), _normed(key, self._head_norms[1])
        if self._rotary is not None:
            assert self._layer.rotary is not None
            angles = turns[self._layer.rotary]
            query, key = self._rotary.turn(query, angles), self._rotary.turn(key, angles)
        return query.contiguous(), key, value

    def add(
        self,
        rows: Tensor,
        normed: Tensor,
        mixed: Tensor,
        following: RowNorm | None,
        count: int,
        deltas: LayerDeltas = NO_DELTAS,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's result, and the result normed by `following`, from the layer's rows, normed rows and mixed
        values.

        `count`: the number of rows before padding; `deltas`: the terms that adapters add to the products' results.
        """
        added = _normed(self._output(mixed, deltas.output), self._after_attention)
        scale = self._spec.residual_scale
        if self._spec.parallel:
            rows, _ = _sum(rows, added, None, scale)
        else:
            rows, normed = _sum(rows, added, self._before_network, scale)
        added = _normed(self._network(normed, count, deltas), self._after_network)
        return _sum(rows, added, following, scale)

    def _rotary_kernel(self, dtype: torch.dtype) -> RotaryKernel | None:
        """Return the kernel that prepares heads in one pass; None if it does not compute this layer's formula."""
        spec, rotary = self._spec, self._rotary
        if spec.latent is not None:
            return None
        turned = 0 if rotary is None else rotary.spec.turned
        if rotary is not None and (rotary.spec.interleaved or (rotary.spec.in_float32 and dtype != torch.float32)):
            return None
        if dtype not in (torch.bfloat16, torch.float32) or not spec.rotaries:
            return None
        norms = self._head_norms if spec.head_norm == "each head" else (None, None)
        if any(norm is not None and norm.norm is None for norm in norms):
            return None
        shapes = HeadShapes(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim, turned)
        if not shapes.can_take():
            return None
        query, key = (None if norm is None else norm.norm for norm in norms)
        return RotaryKernel(shapes, query, key)

    def parts(self) -> LayerParts | None:
        """Return this layer's parts, for a program; None if programs lack the layer's formula or cannot run a part."""
        spec, heads, network = self._spec, self._heads, self._network
        has_own_norms = spec.head_norm == "all heads" and any(self._head_norms)
        if heads is None or has_own_norms or spec.parallel or isinstance(network, Experts):
            return None
        norms = self.before_attention, self._after_attention, self._before_network, self._after_network
        if norms[0] is None or norms[2] is None or any(norm is not None and norm.norm is None for norm in norms):
            return None
        compiled = [norm and norm.norm for norm in norms]
        products = [part.in_program for part in (self._project, self._output, *network.products)]
        if any(product is None or product.dtype != norms[0].weight.dtype for product in products):
            return None
        last = network.gate, spec.residual_scale, heads, self._layer.rotary or 0
        return LayerParts(*compiled, *products, *last)  # type: ignore[arg-type, call-arg]


def _normed(rows: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
    return rows if norm is None else norm(rows)


def _add_given(given: GivenRows, layer: int, rows: Tensor, normed: Tensor, norm: RowNorm | None) -> None:
    """Add to the pictures' rows the terms that they have for this layer, in place; other rows keep their bits."""
    values = rows[given.places] + given.added[layer]
    rows[given.places] = values
    normed[given.places] = _normed(values, norm)


def _sum(x: Tensor, y: Tensor, norm: RowNorm | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return x + scale * y, rounded after each operation, and the norm of this sum; without a norm, the sum twice."""
    if norm is not None and norm.norm is not None:
        return norm.kernels.add_norm(x, y, norm.norm, scale)
    total = x + (y if scale == 1.0 else y * scale)
    return total, _normed(total, norm)


RowFunction = Callable[[Tensor], Tensor]


class LatentHeads:
    """Attention over one vector per token, which stands for the keys and values of all heads (arXiv 2405.04434).

    No key or value is made from the vector. A head's query is multiplied by the transposed product that would make the
    head's keys, so that scores need the vector alone. The mixture of vectors is multiplied by the product that would
    make the head's values:
        query . (up_key latent, turned)  =  (up_key^T query, turned query) . (latent, turned)
        sum of weight * (up_value latent)  =  up_value (sum of weight * latent)

    So attention sees one KV head, whose values are the first elements of its keys. Prompts and single tokens are
    computed alike: a row's bits depend on no other row, as everywhere (docs/decisions/0057-latent-kv.md).
    """

    def __init__(self, spec: DecoderSpec, up: Tensor, take: Take, norm: Callable[[str, float], RowFunction]) -> None:
        """`up`: the weight `LatentSpec.up`; `norm`: makes a norm from a name and an epsilon."""
        assert spec.latent is not None
        latent = self._spec = spec.latent
        self._norm, self._query_norm, self._query_up = norm(latent.norm, latent.epsilon), None, None
        if latent.query_rank is not None:
            self._query_norm, self._query_up = norm(latent.query_norm, latent.epsilon), Linear(*take(latent.query_up))
        keys, values = torch.split(up.view(spec.num_heads, -1, latent.size), [latent.plain, latent.value], 1)
        self._to_vectors, self._to_values = HeadLinear(keys.transpose(1, 2)), HeadLinear(values)

    @property
    def products(self) -> tuple[Linear | HeadLinear, ...]:
        queries = () if self._query_up is None else (self._query_up,)
        return *queries, self._to_vectors, self._to_values

    def split(self, projected: Tensor, turn: RowFunction) -> tuple[Tensor, Tensor]:
        """Split projections into queries [rows, heads, width] and vectors [rows, 1, width]; `turn`: rotates heads."""
        spec = self._spec
        sizes = [projected.shape[1] - spec.width, spec.size, spec.turned]
        queries, latent, key_end = torch.split(projected, sizes, 1)
        if self._query_up is not None:
            assert self._query_norm is not None
            queries = self._query_up(self._query_norm(queries.contiguous()))
        heads = torch.unflatten(queries, 1, (-1, spec.plain + spec.turned))
        plain, query_ends = torch.split(heads, [spec.plain, spec.turned], -1)
        ends = turn(torch.cat((query_ends, key_end[:, None]), 1))
        output = projected.new_empty(*plain.shape[:2], spec.width)
        self._to_vectors(plain, output[..., : spec.size])
        output[..., spec.size :] = ends[:, :-1]
        return output, torch.cat((self._norm(latent.contiguous())[:, None], ends[:, -1:]), -1)

    def values(self, mixed: Tensor) -> Tensor:
        """Return mixtures of values [rows, heads, value], made from mixtures of vectors [rows, heads, size]."""
        output = mixed.new_empty(*mixed.shape[:2], self._spec.value)
        self._to_values(mixed, output)
        return output

"""DecoderSpec: what a decoder computes, as facts that can be checked against a paper.

`decoder/families.py` fills it in and `decoder/decoder.py` runs it. The formula of one layer follows. A family that
lacks a part has None or 1 in the part's place:

    x = x + residual_scale * after_attention(output(attention(turn(head_norm(project(before_attention(x)))))))
    x = x + residual_scale * after_network(down(gate(before_network(x)) * up(before_network(x))))

A family with latent KV stores one vector per token for all heads (arXiv 2405.04434). A head's keys and values are
products of the vector. Instead of the vector, the query and the result are multiplied, so only the vector is stored:

    query     = up_query(norm(down_query(x)))                        or one product of x
    latent    = norm(down(x)[: latent]), turn(down(x)[latent :])
    score     = query . (up_key(latent), turned)                     = (up_key^T query, turned query) . latent
    attention = sum of weight * up_value(latent)                     = up_value(sum of weight * latent)

In a layer with experts the network is the sum of the experts that a router chooses, each times its weight:

    network(x) = sum of weight(expert) * down(gate(x) * up(x)) + sigmoid(shared_gate(x)) * shared(x)

Experts may form groups. Then only experts of the groups with the best scores can be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ActivationName = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The formula of all norms of a model."""

    epsilon: float
    scales: Literal["rounded", "in float32", "one more"] = "rounded"
    """The factors of the normalised row. "rounded": the weight, after the row was rounded to the model's type; "in
    float32": the weight in float32; "one more": the weight plus one in float32."""
    centred: bool = False
    """Whether the row's mean is subtracted first."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One kind of rotary embeddings (arXiv 2104.09864). They rotate pairs of a head's elements by angles."""

    theta: float
    turned: int
    """The number of elements that rotate, at the beginning of each head."""
    kind: str = "default"
    """`rope_type` in configs: default, linear, dynamic, llama3, yarn, longrope."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of this kind, by their names in configs."""
    max_positions: int = 0
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 make a pair, instead of i and i + turned / 2."""
    in_float32: bool = False
    """Whether heads are rotated in float32 and then rounded; else they are rotated in the model's type."""
    rounded_tables: bool = False
    """Whether cosines and sines are rounded to the model's type before heads are rotated."""
    axes: tuple[int, ...] | None = None
    """None: a position is one number. Else a position is three numbers (time, row and column, arXiv 2409.12191; equal
    in text), and `axes` has, for each pair, the index of the number that rotates the pair.
    """


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The facts that differ from layer to layer."""

    window: int | None = None
    """A query at position p sees positions p - window + 1 to p; None: it sees all positions up to p."""
    rotary: int | None = 0
    """Index into `DecoderSpec.rotaries`; None: heads are not rotated."""
    has_experts: bool = False
    """Whether its network is `DecoderSpec.experts`."""


@dataclass(frozen=True, slots=True)
class GateClamp:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(slope * gate), where gate <= limit and -limit <= up <= limit."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class NetworkNames:
    """Names of a feed-forward network's weights."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    @property
    def products(self) -> tuple[str, ...]:
        return (*self.gate_up, self.down)

    def shapes(self, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
        """The shapes [out, in] of the products of a network with this intermediate size."""
        outputs = inner if len(self.gate_up) > 1 else 2 * inner
        return {**dict.fromkeys(self.gate_up, (outputs, hidden)), self.down: (hidden, inner)}


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Networks, some of which a router chooses for each row (arXiv 1701.06538)."""

    count: int
    chosen: int
    """The number of experts that are chosen for each row."""
    width: int
    """The intermediate size of one expert."""
    weights: Literal["softmax of all", "softmax of chosen", "sigmoid"] = "softmax of all"
    """The function that turns the router's scores into weights."""
    normalised: bool = False
    """Whether the weights of chosen experts are then divided by their sum."""
    scale: float = 1.0
    """Weights are multiplied by this number last."""
    groups: int = 1
    """The number of groups of equal size. Experts of a group follow each other."""
    chosen_groups: int = 1
    """The number of groups whose experts may be chosen."""
    group_best: int = 1
    """A group's score is the sum of the best weights in the group; this is the number of the weights that are added."""
    correction: str | None = None
    """Name of a tensor with one number per expert, added to weights only for the choice of experts (arXiv
    2408.15664)."""
    routes_in_float32: bool = False
    """Whether the router multiplies in float32."""
    shared_width: int | None = None
    """The intermediate size of the shared network, which every row passes; None: there is no shared network."""
    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    """Name of an expert's product, with {} for the expert's number, as in `up` and `down`."""
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: NetworkNames | None = None
    shared_gate: str | None = None
    """Name of the product that weighs the shared network's result; None: the result is added as it is."""
    stack: str | None = None
    """Beginning of the names of tensors [experts, in, out] that hold all experts; the outputs of gate and up alternate
    in them. None: each expert has its own tensors.
    """

    def network(self, expert: int) -> NetworkNames:
        return NetworkNames((self.gate.format(expert), self.up.format(expert)), self.down.format(expert))

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """The shapes [out, in] of all products, except those of experts that one tensor holds."""
        shapes = {self.router: (self.count, hidden)}
        if self.shared is not None and self.shared_width is not None:
            shapes |= self.shared.shapes(hidden, self.shared_width)
            shapes |= {} if self.shared_gate is None else {self.shared_gate: (1, hidden)}
        for expert in range(self.count if self.stack is None else 0):
            shapes |= self.network(expert).shapes(hidden, self.width)
        return shapes

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that no product has: the correction, and the tensors that hold all experts."""
        shapes: dict[str, tuple[int, ...]] = {} if self.correction is None else {self.correction: (self.count,)}
        if self.stack is not None:
            shapes[f"{self.stack}.gate_up_proj"] = self.count, hidden, 2 * self.width
            shapes[f"{self.stack}.gate_up_proj_bias"] = self.count, 2 * self.width
            shapes[f"{self.stack}.down_proj"] = self.count, self.width, hidden
            shapes[f"{self.stack}.down_proj_bias"] = self.count, hidden
        return shapes


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One vector per token in place of all heads' keys and values; see the top of this module."""

    size: int
    """The number of the vector's elements that are normalised. Keys and values are products of these elements."""
    turned: int
    """The number of elements at the vector's end that rotate with the position. Every head's key ends with them."""
    plain: int
    """The number of elements of a head's query and key that do not rotate."""
    value: int
    """The number of elements of a head's value."""
    query_rank: int | None = None
    """The number of elements between the two products that make queries; None: one product makes them."""
    epsilon: float = 1e-6
    """Epsilon of the norms of latent vectors; the model's other norms may have another epsilon."""
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    """Name of the product that makes keys and values. For each head, the key's outputs come first, then the value's."""
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"

    @property
    def width(self) -> int:
        """The number of elements of the stored vector."""
        return self.size + self.turned

    @property
    def norms(self) -> dict[str, int]:
        sizes = {self.norm: self.size}
        return sizes if self.query_rank is None else {**sizes, self.query_norm: self.query_rank}

    def shapes(self, num_heads: int) -> dict[str, tuple[int, int]]:
        """The shapes [out, in] of the products that may have a bias and do not read the layer's rows."""
        width = num_heads * (self.plain + self.turned)
        return {} if self.query_rank is None else {self.query_up: (width, self.query_rank)}


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a layer's weights, below "model.layers.N."; several names make one product with joined outputs."""

    project: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    network: NetworkNames = NetworkNames()
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_network: str | None = "post_attention_layernorm"
    after_network: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    sinks: str | None = None
    """Name of a tensor with one score per head, which takes part in the softmax but has no value (arXiv 2309.17453)."""

    @property
    def norms(self) -> tuple[str, ...]:
        places = self.before_attention, self.after_attention, self.before_network, self.after_network
        return tuple(name for name in (*places, self.query_norm, self.key_norm) if name is not None)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """All facts of one model."""

    family: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    """With latent KV: 1."""
    head_dim: int
    """With latent KV: the number of elements of a stored vector."""
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    norm: NormSpec
    score_scale: float
    names: WeightNames = WeightNames()
    head_norm: Literal["each head", "all heads"] = "each head"
    """Whether norms of queries and keys, if any, normalise each head by itself or all heads as one row."""
    latent: LatentSpec | None = None
    """The vector that stands for keys and values; None: each head has its own keys and values."""
    activation: ActivationName = "silu"
    clamp: GateClamp | None = None
    """The gate with limits that replaces the activation; None: the activation is used."""
    experts: ExpertSpec | None = None
    parallel: bool = False
    """Whether the network reads the rows that attention reads: x = x + attention(norm(x)) + network(norm(x))."""
    tied: bool = False
    """Whether the embedding is also the output head."""
    score_cap: float | None = None
    """Scores become cap * tanh(score / cap); None: scores stay as they are."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the queries, keys and values of all heads.

        With latent KV: the width of the queries (or of the row from which they are made), and the width of the vector.
        """
        latent = self.latent
        if latent is not None:
            return latent.query_rank or self.num_heads * (latent.plain + latent.turned), latent.width
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    @property
    def mixed_width(self) -> int:
        """Width of the rows that attention gives the output product."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value)

    def products(self, has_experts: bool) -> dict[str, tuple[int, int]]:
        """The shapes [out, in] of the products of a layer with or without experts, by their modules' names.

        Each product may have a bias. Experts in one tensor, and the product `LatentSpec.up`, are not among them.
        """
        names, hidden = self.names, self.hidden_size
        sizes = self.widths if len(names.project) > 1 else (sum(self.widths),)
        shapes = {name: (size, hidden) for name, size in zip(names.project, sizes, strict=True)}
        shapes[names.output] = hidden, self.mixed_width
        shapes |= {} if self.latent is None else self.latent.shapes(self.num_heads)
        if has_experts and self.experts is not None:
            return shapes | self.experts.shapes(hidden)
        return shapes | names.network.shapes(hidden, self.intermediate_size)

    def weights(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes of the weights that a checkpoint must have, and of those that it may have, by their names.

        The second mapping has the biases of products, and the output head if it equals the embedding.
        """
        table = (self.vocab_size, self.hidden_size)
        must: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": table[1:]}
        may: dict[str, tuple[int, ...]] = {"lm_head.weight": table} if self.tied else {}
        must |= {} if self.tied else {"lm_head.weight": table}
        kinds = {has: self.products(has) for has in {layer.has_experts for layer in self.layers}}
        for number, layer in enumerate(self.layers):
            begin, products = f"model.layers.{number}", kinds[layer.has_experts]
            must |= {f"{begin}.{name}.weight": shape for name, shape in products.items()}
            may |= {f"{begin}.{name}.bias": shape[:1] for name, shape in products.items()}
            must |= {f"{begin}.{name}": shape for name, shape in self._tensors(layer).items()}
        return must, may

    def _tensors(self, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors other than its products, by their names below "model.layers.N."."""
        names, latent = self.names, self.latent
        heads = (self.head_dim, self.head_dim) if self.head_norm == "each head" else self.widths[:2]
        norms = {**dict.fromkeys(names.norms, self.hidden_size), **({} if latent is None else latent.norms)}
        norms |= {name: size for name, size in zip((names.query_norm, names.key_norm), heads, strict=True) if name}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
        shapes |= {} if names.sinks is None else {names.sinks: (self.num_heads,)}
        if latent is not None:
            shapes[f"{latent.up}.weight"] = self.num_heads * (latent.plain + latent.value), latent.size
        if layer.has_experts and self.experts is not None:
            shapes |= self.experts.tensors(self.hidden_size)
        return shapes

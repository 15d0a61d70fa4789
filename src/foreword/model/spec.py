"""DecoderSpec: what a decoder computes, as facts that can be checked against a paper.

`decoder/families.py` fills it in and `decoder/decoder.py` runs it. One layer, in which a family without some part has
None or 1 in its place:

    x = x + residual_scale * after_attention(output(attention(turn(head_norm(project(before_attention(x)))))))
    x = x + residual_scale * after_network(down(gate(before_network(x)) * up(before_network(x))))

In a layer with experts the network is the sum of the experts that a router chooses, each times its weight:

    network(x) = sum of weight(expert) * down(gate(x) * up(x)) + sigmoid(shared_gate(x)) * shared(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ActivationName = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How all norms of a model are computed."""

    epsilon: float
    scales: Literal["rounded", "in float32", "one more"] = "rounded"
    """What scales the normalised row: the weight, after the row was rounded to the model's type; the weight in float32;
    or the weight plus one in float32."""
    centred: bool = False
    """Whether the row's mean is subtracted first."""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One kind of rotary embeddings (arXiv 2104.09864)."""

    theta: float
    turned: int
    """The number of a head's first elements that turn."""
    kind: str = "default"
    """As `rope_type` in configs: default, linear, dynamic, llama3, yarn, longrope."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The kind's own numbers, by their names in configs."""
    max_positions: int = 0
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 make a pair, not i and i + turned / 2."""
    in_float32: bool = False
    """Whether heads are turned in float32 and then rounded, not in the model's type."""
    rounded_tables: bool = False
    """Whether cosines and sines are rounded to the model's type before that."""
    axes: tuple[int, ...] | None = None
    """By which number of a position each pair turns, where positions have three: time, row and column
    (arXiv 2409.12191); text has three equal ones. None: positions have one."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None = None
    """A query at position p sees positions p - window + 1 to p; None: all."""
    rotary: int | None = 0
    """Index into `DecoderSpec.rotaries`; None: heads are not turned."""
    has_experts: bool = False
    """Whether its network is `DecoderSpec.experts`."""


@dataclass(frozen=True, slots=True)
class GateClamp:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(slope * gate), where gate <= limit and -limit <= up <= limit."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class NetworkNames:
    """Where a feed-forward network's weights are."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    @property
    def products(self) -> tuple[str, ...]:
        return (*self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Networks of which a router chooses some for each row (arXiv 1701.06538)."""

    count: int
    chosen: int
    """The number of experts of a row."""
    width: int
    """The intermediate size of one."""
    softmax: Literal["over all", "over chosen"] = "over all"
    """Over which experts' scores the weights add up to 1."""
    normalised: bool = False
    """Whether the weights of chosen experts are then divided by their sum."""
    shared_width: int | None = None
    """The intermediate size of one more network that every row passes; None: there is none."""
    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    """Where an expert's weights are, by its number."""
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: NetworkNames | None = None
    shared_gate: str = "mlp.shared_expert_gate"
    stack: str | None = None
    """Where the file has all experts in tensors [experts, in, out], outputs of gate and up in turn; None: nowhere."""

    def network(self, expert: int) -> NetworkNames:
        """Where the weights of one expert are."""
        return NetworkNames((self.gate.format(expert), self.up.format(expert)), self.down.format(expert))

    @property
    def common(self) -> tuple[str, ...]:
        """Names of products that every row passes."""
        return (self.router,) if self.shared is None else (self.router, *self.shared.products, self.shared_gate)


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Where a layer's weights are, below "model.layers.N."; several names make one product, outputs end to end."""

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
    """A score for each head that takes its share of the softmax and has no value (arXiv 2309.17453)."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names of attention's weights that multiply rows, each perhaps with a bias beside it."""
        return (*self.project, self.output)

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
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    norm: NormSpec
    score_scale: float
    names: WeightNames = WeightNames()
    head_norm: Literal["each head", "all heads"] = "each head"
    """What the norms of queries and keys normalise, if the family has such norms."""
    activation: ActivationName = "silu"
    clamp: GateClamp | None = None
    """In place of the activation: gate and up are clamped."""
    experts: ExpertSpec | None = None
    parallel: bool = False
    """Whether the network reads the rows that attention reads: x = x + attention(norm(x)) + network(norm(x))."""
    tied: bool = False
    """Whether the embedding is also the output head."""
    score_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values, each of all heads."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

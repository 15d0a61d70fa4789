"""DecoderSpec: what a decoder computes, as facts that can be checked against a paper.

Knows sizes, places and numbers; knows neither tensors nor files. `decoder/families.py` fills it in and
`decoder/decoder.py` runs it. One layer, in which a family without some part has None or 1 in its place:

    x = x + residual_scale * after_attention(output(attention(turn(head_norm(project(before_attention(x)))))))
    x = x + residual_scale * after_network(down(gate(before_network(x)) * up(before_network(x))))
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


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None = None
    """A query at position p sees positions p - window + 1 to p; None: all."""
    rotary: int | None = 0
    """Index into `DecoderSpec.rotaries`; None: heads are not turned."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Where a layer's weights are, below "model.layers.N."; several names make one product, outputs end to end."""

    project: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_network: str | None = "post_attention_layernorm"
    after_network: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None

    @property
    def products(self) -> tuple[str, ...]:
        """Names of weights that multiply rows, each perhaps with a bias beside it."""
        return (*self.project, self.output, *self.gate_up, self.down)

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

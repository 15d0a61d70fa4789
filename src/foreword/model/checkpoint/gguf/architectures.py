"""GGUF's architectures: metadata becomes the fields of a config.json, tensors get the names of weights, and the changes
that llama.cpp's converter made to tensors are undone.

The facts come from llama.cpp's converter and its `src/models`. A key or a tensor that is unknown here may change what a
model computes, so the model is refused, and the error names the key or the tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import UnsupportedModelError
from foreword.model.checkpoint.gguf.file import GgufTensor

_NO_MATTER = frozenset(
    "vocab_size file_type attention.value_length rope.finetuned rope.dimension_count_swa tensor_data_layout "
    "attention.key_length_swa attention.value_length_swa attention.max_alibi_bias attention.causal "
    "use_parallel_residual pooling_type".split()
)
"""Metadata keys that change no result here: sizes that the tensors also show, and notes."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_PLAIN_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of a layer's tensor -> name of its weight, for llama."""
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MOST_EXPERTS = 1024
"""Most experts of a layer: a file may not ask for more names than this."""
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Name of a tensor of experts -> name of its weight. {} is an expert's number: one tensor [experts, ...] holds this
weight of all experts.
"""
_MIXTRAL = {
    name: place.replace("mlp", "block_sparse_moe").replace(old, new)
    for (name, place), (old, new) in zip(
        _EXPERTS.items(), (("", ""), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")), strict=True
    )
}
_GPT_OSS = {
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors with factors of rotary angles. They go into the config (`rope_parameters`), not into the weights."""

Order = np.ndarray[Any, np.dtype[np.int64]]


class Keys:
    """The metadata of a file's architecture, and which of its keys were read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._values = {name[len(self._prefix) :]: metadata[name] for name in metadata if name.startswith(self._prefix)}
        self._read: set[str] = set()

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a count. Raises UnsupportedModelError for another value, or if both key and default are missing."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value < 1 << 31:
            raise UnsupportedModelError(f"the GGUF file says {self._prefix}{name}={value!r:.60}, which is not a count")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number. Raises as `count` does."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UnsupportedModelError(f"the GGUF file says {self._prefix}{name}={value!r:.60}, which is not a number")
        return float(value)

    def word(self, name: str, default: str) -> str:
        """Return the value as a text, whatever its type."""
        return str(self._value(name, default))

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name, default)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file has no key {self._prefix}{name}; convert the model again")
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise UnsupportedModelError(
                    f"{self._prefix}{name} differs from layer to layer, which no written family has"
                )
            return value[0].item()
        return value

    def has(self, name: str) -> bool:
        """Whether there is such a key; it counts as read."""
        self._read.add(name)
        return name in self._values

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError for a key that may change what the model computes."""
        unread = sorted(set(self._values) - self._read - _NO_MATTER)
        if unread:
            value = repr(self._values[unread[0]])
            raise UnsupportedModelError(
                f"the GGUF file says {self._prefix}{unread[0]}={value:.60}, and foreword does not know what that "
                "changes; use the model's safetensors checkpoint"
            )


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts of one value of `general.architecture`."""

    family: str
    """`model_type` of configs."""
    config: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    """Fields that differ from llama's."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that differ from llama's."""
    turned_heads: bool = False
    """Whether the converter reordered rows of queries and keys, so that elements that rotate together are
    neighbours."""
    norms_plus_one: bool = False
    """Whether the converter added 1 to the weights of norms."""


def _windows(keys: Keys, pattern: int) -> dict[str, Any]:
    """Return fields for windows in all layers except every `pattern`-th layer."""
    step = keys.count("attention.sliding_window_pattern", pattern)
    if step != pattern:
        raise UnsupportedModelError(
            f"the GGUF file says attention.sliding_window_pattern={step!r}, and foreword reads {pattern} only; use the "
            "model's safetensors checkpoint"
        )
    return {"sliding_window": keys.count("attention.sliding_window")}


def _gemma(keys: Keys, wide: int) -> dict[str, Any]:
    """`wide`: the number of layers of the only model that scales scores by the hidden size per head."""
    heads, dim = keys.count("attention.head_count"), keys.count("attention.key_length", 256)
    share = keys.count("embedding_length") // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if keys.count("block_count") == wide else dim,
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, 46),
        **_windows(keys, 2),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    turns = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 1e6)}
    kind = keys.word("rope.scaling.type", "none")
    if kind != "none":
        if kind != "linear":
            raise UnsupportedModelError(f"gemma3 with rope.scaling.type={kind!r}; use its safetensors checkpoint")
        turns |= {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10_000.0)}
    cap = (
        {"final_logit_softcapping": keys.real("final_logit_softcapping")} if keys.has("final_logit_softcapping") else {}
    )
    return {
        **_gemma(keys, 62),
        **_windows(keys, 6),
        **cap,
        "rope_parameters": {"full_attention": turns, "sliding_attention": local},
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    dim = keys.count("embedding_length") // keys.count("attention.head_count")
    window = keys.count("attention.sliding_window", 0, least=0)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        ),
        "partial_rotary_factor": keys.count("rope.dimension_count", dim) / dim,
    }


def _granite(keys: Keys) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {name: keys.real(key) for name, key in names.items()}


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {
        **_windows(keys, 4),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "logit_scale": keys.real("logit_scale"),
    }


def _chosen(keys: Keys, number: str, softmax: int = 1) -> dict[str, Any]:
    """Return two fields: the number of experts, named `number`, and the number of experts that are chosen for a token.
    `softmax`: llama.cpp's number of the function that makes weights from scores; no other function is accepted.
    """
    if keys.word("expert_weights_norm", "True") != "True" or keys.real("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise UnsupportedModelError(
            "the GGUF file weighs its experts in a way that foreword does not compute; use the model's safetensors "
            "checkpoint"
        )
    gating = keys.count("expert_gating_func", softmax)
    if gating != softmax:
        raise UnsupportedModelError(
            f"the GGUF file says expert_gating_func={gating}, and foreword reads {softmax} only; use the model's "
            "safetensors checkpoint"
        )
    count, chosen = keys.count("expert_count"), keys.count("expert_used_count")
    if not chosen <= count <= MOST_EXPERTS:
        raise UnsupportedModelError(
            f"the GGUF file says {chosen} of {count} experts for each token; foreword reads at most {MOST_EXPERTS} "
            "experts, and no more for a token than there are"
        )
    return {number: count, "num_experts_per_tok": chosen}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return {
        **_chosen(keys, "num_experts"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    kinds = "sliding_attention", "full_attention"
    return {
        **_chosen(keys, "num_local_experts", softmax=3),
        **_windows(keys, 2),
        "intermediate_size": keys.count("expert_feed_forward_length", keys.count("feed_forward_length")),
        "layer_types": [kinds[layer % 2] for layer in range(keys.count("block_count"))],
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", turned_heads=True),
    "llama with experts": Architecture(
        "mixtral", lambda keys: _chosen(keys, "num_local_experts"), _MIXTRAL, turned_heads=True
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", names=_HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, {**_HEAD_NORMS, **_EXPERTS}),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _GPT_OSS),
    "gemma2": Architecture("gemma2", _gemma2, _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, {**_FOUR_NORMS, **_HEAD_NORMS}, norms_plus_one=True),
    "phi3": Architecture("phi3", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "granite": Architecture("granite", _granite, turned_heads=True),
    "smollm3": Architecture("smollm3", turned_heads=True),
    "olmo2": Architecture("olmo2", names={**_FOUR_NORMS, **_HEAD_NORMS}),
    "cohere2": Architecture("cohere2", _cohere2),
}
"""`general.architecture` -> its facts. Mixtral's files say "llama", too."""


def architecture_of(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return the name and the facts of a file's architecture. Raises UnsupportedModelError if it is unknown."""
    name = metadata.get("general.architecture")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"the GGUF file is a {kind!r}, not a model; give the model's file")
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    architecture = ARCHITECTURES.get(f"{name} with experts" if has_experts and name == "llama" else str(name))
    if architecture is None:
        raise UnsupportedModelError(
            f"the GGUF file is of the architecture {name!r}; foreword reads {', '.join(ARCHITECTURES)}: use the "
            "model's safetensors checkpoint"
        )
    return str(name), architecture


def config_fields(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the fields that the model's config.json would have. Raises UnsupportedModelError."""
    name, architecture = architecture_of(metadata)
    keys = Keys(metadata, name)
    if "token_embd.weight" not in tensors:
        raise UnsupportedModelError("the GGUF file has no tensor 'token_embd.weight'; is it a whole model?")
    if keys.count("expert_count", 0, least=0) and "experts" not in " ".join(architecture.names.values()):
        raise UnsupportedModelError(f"{name} with experts is not supported; use its safetensors checkpoint")
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    layers = {int(matched[1]) for tensor in tensors if (matched := _LAYER.fullmatch(tensor))}
    if keys.count("block_count") != len(layers):
        raise UnsupportedModelError(
            f"the GGUF file says {name}.block_count={keys.count('block_count')}, and has tensors of "
            f"{len(layers)} layers; download it again"
        )
    fields: dict[str, Any] = {
        "model_type": architecture.family,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    if not keys.has("attention.layer_norm_epsilon") or architecture.family != "cohere2":
        fields["rms_norm_eps"] = keys.real("attention.layer_norm_rms_epsilon")
    fields |= architecture.config(keys)
    if architecture.family not in ("phi3", "olmo2", "cohere2", "granite") or keys.has("attention.key_length"):
        fields["head_dim"] = keys.count("attention.key_length", keys.count("rope.dimension_count", hidden // heads))
    if "rope_parameters" not in fields:
        fields["rope_parameters"] = _rope(keys, fields, tensors)
    if architecture.family != "phi3":
        _expect_turned(keys, int(fields.get("head_dim", hidden // heads)))
    keys.refuse_unread()
    return fields


def _expect_turned(keys: Keys, head_dim: int) -> None:
    turned = keys.count("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedModelError(
            f"rope.dimension_count={turned} where heads have {head_dim} elements; use safetensors"
        )


def _rope(keys: Keys, fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return `rope_parameters`. Factors of angles are in one tensor for all lengths (Llama 3), or in two (Phi 3)."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10_000.0)}
    kind = keys.word("rope.scaling.type", "none")
    factors = [_factors(tensors[name], fields) for name in _ROPE_TENSORS if name in tensors]
    if factors:
        for name in ("rope.scaling.factor", "rope.scaling.original_context_length"):
            keys.has(name)  # counts as read: the converter made the factors from it
        original = fields.get("original_max_position_embeddings", fields["max_position_embeddings"])
        return {
            **rope,
            "rope_type": "longrope",
            "short_factor": factors[-1],
            "long_factor": factors[0],
            "attention_factor": keys.real("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.count("rope.scaling.original_context_length", fields["max_position_embeddings"])
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": original}
        names = {"factor": "rope.scaling.factor"} | {n: f"rope.scaling.yarn_{n}" for n in ("beta_fast", "beta_slow")}
        rope |= {"truncate": False} if fields["model_type"] == "gpt_oss" else {}
        return rope | {name: keys.real(key) for name, key in names.items() if keys.has(key)}
    if kind != "none":
        raise UnsupportedModelError(f"rope.scaling.type={kind!r}; foreword reads none, linear and yarn from GGUF files")
    return rope


def _factors(tensor: GgufTensor, fields: Mapping[str, Any]) -> list[float]:
    """Return divisors of angles. Raises UnsupportedModelError if there are more divisors than pairs in a head."""
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if len(tensor.shape) != 1 or tensor.shape[0] > head_dim // 2:
        raise UnsupportedModelError(f"tensor {tensor.name!r} of shape {tensor.shape} does not fit heads of {head_dim}")
    factors: list[float] = tensor.values().reshape(-1).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise UnsupportedModelError(f"tensor {tensor.name!r} has factors that are no positive numbers")
    return factors


@dataclass(frozen=True, slots=True)
class Weight:
    """The source of a weight, and the converter's changes that are to be undone."""

    tensor: GgufTensor
    order: Order | None = None
    """Row i of the weight is the tensor's row order[i]; None: rows are in order."""
    minus: float = 0.0
    """The number that the converter added to each value."""
    expert: int | None = None
    """The weight is this expert's part of a tensor [experts, ...]; None: the weight is the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def rows(self, first: int, end: int, *, in_order: bool = True) -> npt.NDArray[np.uint8]:
        """Read rows as bytes [rows, bytes of a row], in the weight's order or in the file's. Raises OSError."""
        start = 0 if self.expert is None else self.expert * math.prod(self.shape[:-1])
        if self.order is None or not in_order:
            return self.tensor.rows(start + first, start + end)
        indices = self.order[first:end]
        lowest = int(indices.min())
        return self.tensor.rows(lowest, int(indices.max()) + 1)[indices - lowest]


def weights_of(metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> dict[str, Weight]:
    """The weights of a model by their names. Raises UnsupportedModelError for an unknown tensor."""
    name, architecture = architecture_of(metadata)
    keys = Keys(metadata, name)
    heads = keys.count("attention.head_count")
    names = {**_PLAIN_NAMES, **architecture.names}
    if architecture.family == "olmo2":
        names.pop("attn_norm"), names.pop("ffn_norm")
    if "post_attention_norm" in architecture.names and "ffn_norm" not in architecture.names:
        names.pop("ffn_norm")
    num_turned = (
        {"attn_q": heads, "attn_k": keys.count("attention.head_count_kv", heads)} if architecture.turned_heads else {}
    )
    weights: dict[str, Weight] = {}
    for tensor in tensors:
        if tensor.name in _ROPE_TENSORS:
            continue
        matched = _LAYER.fullmatch(tensor.name)
        kind = matched[2] if matched else ""
        if matched and "{}" in names.get(kind, ""):
            if not 1 < len(tensor.shape) <= 3 or tensor.shape[0] > MOST_EXPERTS:
                raise UnsupportedModelError(f"tensor {tensor.name!r} of shape {tensor.shape} holds no experts")
            for number in range(tensor.shape[0]):
                place = f"model.layers.{matched[1]}.{names[kind].format(number)}.{matched[3]}"
                weights[place] = Weight(tensor, expert=number)
            continue
        if matched and kind in names:
            end = "" if kind == "attn_sinks" else f".{matched[3]}"
            place = f"model.layers.{matched[1]}.{names[kind]}{end}"
        elif tensor.name in _OUTSIDE:
            place = _OUTSIDE[tensor.name]
        else:
            raise UnsupportedModelError(
                f"the GGUF file has a tensor {tensor.name!r}, which {name} has no place for; use the "
                "model's safetensors checkpoint"
            )
        order = _unturned(tensor.shape[0], num_turned[kind]) if kind in num_turned else None
        is_norm = tensor.name.endswith("norm.weight")
        weights[place] = Weight(tensor, order, 1.0 if is_norm and architecture.norms_plus_one else 0.0)
    return weights


def _unturned(num_rows: int, num_heads: int) -> Order:
    """Return the order by which rows (2i, 2i + 1) of each head become rows (i, i + half)."""
    if num_rows % (2 * num_heads):
        raise UnsupportedModelError(
            f"{num_rows} rows cannot be split into {num_heads} heads; the GGUF file is damaged: download it again"
        )
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

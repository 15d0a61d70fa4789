"""The written families: decoders that foreword computes itself. Each function gives the facts that differ from llama.

A config field may change a model's results. If a config has a field that no function here reads, and `_NO_MATTER` does
not list it, the model runs in transformers' own modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.model.spec import (
    DecoderSpec,
    ExpertSpec,
    GateClamp,
    LatentSpec,
    LayerSpec,
    NetworkNames,
    NormSpec,
    RotarySpec,
    WeightNames,
)

_NO_MATTER = frozenset(
    "architectures attention_bias attention_dropout aux_loss_alpha bos_token_id cache_implementation "
    "chunk_size_feed_forward dtype embd_pdrop embedding_initializer_range eos_token_id ep_size id2label "
    "initializer_range is_encoder_decoder is_llama_config label2id max_window_layers mlp_bias _model_name_or_path "
    "model_type _name_or_path no_rope_layer_interval num_mtp_layers num_nextn_predict_layers "
    "original_max_position_embeddings output_attentions output_hidden_states output_router_logits pad_token_id "
    "problem_type qkv_bias quantization_config resid_pdrop return_dict router_aux_loss_coef router_jitter_noise "
    "seq_aux _sliding_window_pattern sliding_window_pattern torch_dtype transformers.js_config transformers_version "
    "unk_token_id unsloth_fixed use_cache".split()
)
"""Fields that do not change what a loaded model computes. The weights in the file show which biases there are, and
quantized weights have been read already."""
_ROPE_KEYS: Mapping[str, Collection[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""Kind of rotary embeddings -> its parameters, besides the parameters that every kind has."""


class UnwrittenError(Exception):
    """foreword has no spec for the model. The message says which fact is unknown."""


class Fields:
    """A config's fields, and which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """A field's value; the default if it is missing or None."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def expect(self, name: str, *values: object) -> None:
        """Raise UnwrittenError if a field is present and has none of these values."""
        value = self(name, values[0])
        if value not in values:
            raise UnwrittenError(f"{name}={value!r}")

    def unread(self) -> list[str]:
        """Names of the fields that have a value, may change results and were not read."""
        return sorted(
            name
            for name, value in self._values.items()
            if value is not None and name not in self._read and name not in _NO_MATTER
        )


def find_spec(values: Mapping[str, Any], weights: Collection[str]) -> DecoderSpec:
    """The spec of a model with these config fields and names of weights. Raises UnwrittenError."""
    family = str(values.get("model_type"))
    if family not in FAMILIES:
        raise UnwrittenError(f"model_type={family!r}")
    fields = Fields(values)
    spec = FAMILIES[family](fields)
    unread = fields.unread()
    if unread:
        raise UnwrittenError(f"config field {unread[0]}={values[unread[0]]!r}")
    if spec.experts is not None and spec.experts.stack is not None:
        is_stacked = any(f".{spec.experts.stack}.gate_up_proj" in name for name in weights)
        spec = spec if is_stacked else replace(spec, experts=replace(spec.experts, stack=None))
    must, may = spec.weights()
    missing, surplus = sorted(must.keys() - set(weights)), sorted(set(weights) - must.keys() - may.keys())
    if missing:
        raise UnwrittenError(f"no weight {missing[0]!r}")
    if surplus:
        raise UnwrittenError(f"weight {surplus[0]!r}")
    return spec


# ---------------------------------------------------------------------------------------------- families


def _plain(c: Fields, **facts: Any) -> DecoderSpec:
    """Return the spec of llama from config fields, changed by `facts`."""
    hidden, heads = c("hidden_size"), c("num_attention_heads")
    head_dim = c("head_dim", hidden // heads)
    c.expect("hidden_act", "silu", "gelu_pytorch_tanh")
    c.expect("hidden_activation", "silu", "gelu_pytorch_tanh")
    act = c("hidden_activation", c("hidden_act"))
    c.expect("pretraining_tp", 1)
    c.expect("rope_interleaved", False)
    c.expect("use_mrope", False)
    plain: dict[str, Any] = {
        "family": c("model_type"),
        "hidden_size": hidden,
        "vocab_size": c("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": c("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": c("intermediate_size"),
        "layers": (LayerSpec(),) * c("num_hidden_layers"),
        "score_scale": head_dim**-0.5,
        "activation": "gelu_tanh" if act == "gelu_pytorch_tanh" else "silu",
        "tied": c("tie_word_embeddings", False),
    }
    if "norm" not in facts:
        plain["norm"] = NormSpec(c("rms_norm_eps"))
    if "rotaries" not in facts:
        plain["rotaries"] = (_rotary(c, c("rope_parameters")),)
    return DecoderSpec(**{**plain, **facts})


def _rotary(
    c: Fields, rope: Mapping[str, Any], *, partial: bool = False, head_dim: int | None = None, **facts: Any
) -> RotarySpec:
    """Rotary embeddings as a config describes them. `partial`: whether the family may rotate a part of each head."""
    kind = rope.get("rope_type", "default")
    parameters = _ROPE_KEYS.get(kind)
    if parameters is None:
        raise UnwrittenError(f"rope_type={kind!r}")
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    unknown = sorted(set(rope) - set(parameters) - common)
    if unknown:
        raise UnwrittenError(f"rotary parameter {unknown[0]}={rope[unknown[0]]!r}")
    share = rope.get("partial_rotary_factor", c("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise UnwrittenError(f"partial_rotary_factor={share!r}")
    head_dim = head_dim or c("head_dim", c("hidden_size") // c("num_attention_heads"))
    longest = c("max_position_embeddings")
    if rope.get("mrope_section") is not None:
        facts["axes"] = _axes(rope["mrope_section"], int(head_dim * share) // 2, rope.get("mrope_interleaved", False))
    return RotarySpec(rope["rope_theta"], int(head_dim * share), kind, rope, longest, **facts)


def _axes(sections: Sequence[int], num_pairs: int, interleaved: bool) -> tuple[int, ...]:
    """The axis (time, row or column) of each pair. Axes form sections (arXiv 2409.12191) or alternate (Qwen3-VL)."""
    if len(sections) != 3 or sum(sections) != num_pairs or min(sections) < 0:
        raise UnwrittenError(f"mrope_section={sections!r} for {num_pairs} pairs")
    if interleaved:
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _layers(c: Fields, *, turns: Callable[[int, str], int | None] = lambda layer, kind: 0) -> tuple[LayerSpec, ...]:
    """Return the specs of all layers. Layers that are "sliding_attention" in `layer_types` have a window. `turns`
    returns the `LayerSpec.rotary` of a layer.
    """
    kinds = c("layer_types", ["full_attention"] * c("num_hidden_layers"))
    window = c("sliding_window")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnwrittenError(f"layer type {unknown[0]!r}")
    return tuple(
        LayerSpec(window if kind == "sliding_attention" else None, turns(layer, kind))
        for layer, kind in enumerate(kinds)
    )


def _head_norms(names: WeightNames) -> WeightNames:
    """Return `names` with norms of queries and keys."""
    return replace(names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")


_FOUR_NORMS = WeightNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_network="pre_feedforward_layernorm",
    after_network="post_feedforward_layernorm",
)


def llama(c: Fields) -> DecoderSpec:
    """arXiv 2302.13971."""
    return _plain(c)


def mistral(c: Fields) -> DecoderSpec:
    """arXiv 2310.06825: every layer has the window."""
    window = c("sliding_window")
    return _plain(c, layers=(LayerSpec(window),) * c("num_hidden_layers"))


def qwen2(c: Fields) -> DecoderSpec:
    """arXiv 2407.10671: queries, keys and values have biases."""
    c("use_sliding_window")  # `layer_types` follows it already
    return _plain(c, layers=_layers(c))


def qwen3(c: Fields) -> DecoderSpec:
    """arXiv 2505.09388: each head of queries and keys is normalised."""
    c("use_sliding_window")
    return _plain(c, layers=_layers(c), names=_head_norms(WeightNames()))


def smollm3(c: Fields) -> DecoderSpec:
    """Layers that `no_rope_layers` marks with 0, usually every fourth, rotate no heads (NoPE, arXiv 2501.18795)."""
    turned = c("no_rope_layers")
    has_windows = c("use_sliding_window", False)
    layers = _layers(c, turns=lambda layer, kind: 0 if turned[layer] else None)
    return _plain(c, layers=layers if has_windows else tuple(LayerSpec(None, layer.rotary) for layer in layers))


def granite(c: Fields) -> DecoderSpec:
    """arXiv 2408.13359: multipliers in four places."""
    return _plain(
        c,
        embedding_scale=c("embedding_multiplier"),
        residual_scale=c("residual_multiplier"),
        score_scale=c("attention_multiplier"),
        logit_scale=1.0 / c("logits_scaling"),
    )


def gemma2(c: Fields) -> DecoderSpec:
    """arXiv 2408.00118: norms before and after each part, capped scores and logits, windows in every other layer."""
    c.expect("use_bidirectional_attention", False)
    return _plain(
        c,
        layers=_layers(c),
        names=_FOUR_NORMS,
        norm=NormSpec(c("rms_norm_eps"), "one more"),
        embedding_scale=c("hidden_size") ** 0.5,
        score_scale=c("query_pre_attn_scalar") ** -0.5,
        score_cap=c("attn_logit_softcapping"),
        logit_cap=c("final_logit_softcapping"),
    )


def gemma3(c: Fields) -> DecoderSpec:
    """arXiv 2503.19786: gemma2 with normed heads instead of capped scores; layers with windows have other angles."""
    c.expect("use_bidirectional_attention", False)
    kinds = "full_attention", "sliding_attention"
    rope = c("rope_parameters")
    if any(kind not in rope for kind in kinds):
        raise UnwrittenError(f"rope_parameters={rope!r}")
    c.expect("attn_logit_softcapping", None)
    return _plain(
        c,
        layers=_layers(c, turns=lambda layer, kind: kinds.index(kind)),
        rotaries=tuple(_rotary(c, rope[kind]) for kind in kinds),
        names=_head_norms(_FOUR_NORMS),
        norm=NormSpec(c("rms_norm_eps"), "one more"),
        embedding_scale=c("hidden_size") ** 0.5,
        score_scale=c("query_pre_attn_scalar") ** -0.5,
        logit_cap=c("final_logit_softcapping"),
    )


def phi3(c: Fields) -> DecoderSpec:
    """arXiv 2404.14219: one weight for queries, keys and values, and one for gate and up."""
    window = c("sliding_window")
    return _plain(
        c,
        layers=(LayerSpec(window),) * c("num_hidden_layers"),
        rotaries=(_rotary(c, c("rope_parameters"), partial=True),),
        names=WeightNames(project=("self_attn.qkv_proj",), network=NetworkNames(("mlp.gate_up_proj",))),
    )


def olmo2(c: Fields) -> DecoderSpec:
    """arXiv 2501.00656: norms after attention and after the network, and one norm for all heads together."""
    names = WeightNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_network=None,
        after_network="post_feedforward_layernorm",
    )
    return _plain(
        c,
        names=_head_norms(names),
        head_norm="all heads",
        norm=NormSpec(c("rms_norm_eps"), "in float32"),
        rotaries=(_rotary(c, c("rope_parameters"), in_float32=True),),
    )


def cohere2(c: Fields) -> DecoderSpec:
    """arXiv 2504.00698: attention and network in parallel, one centred norm; only layers with windows rotate heads."""
    c.expect("use_qk_norm", False)
    c.expect("use_gated_activation", True)
    c.expect("use_parallel_block", True)
    c.expect("use_embedding_sharing", True)
    c.expect("rotary_pct", 1.0)
    for name in ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "use_parallel_embedding"):
        c(name)  # older files describe the order of layers by these, too
    return _plain(
        c,
        layers=_layers(c, turns=lambda layer, kind: 0 if kind == "sliding_attention" else None),
        rotaries=(_rotary(c, c("rope_parameters"), interleaved=True, in_float32=True, rounded_tables=True),),
        names=WeightNames(before_network=None),
        norm=NormSpec(c("layer_norm_eps"), "in float32", centred=True),
        parallel=True,
        logit_scale=c("logit_scale"),
    )


def mixtral(c: Fields) -> DecoderSpec:
    """arXiv 2401.04088: experts, whose weights add up to 1."""
    place = "block_sparse_moe"
    experts = ExpertSpec(
        c("num_local_experts"),
        c("num_experts_per_tok"),
        c("intermediate_size"),
        normalised=True,
        router=f"{place}.gate",
        gate=place + ".experts.{}.w1",
        up=place + ".experts.{}.w3",
        down=place + ".experts.{}.w2",
    )
    layers = (LayerSpec(c("sliding_window"), has_experts=True),) * c("num_hidden_layers")
    return _plain(c, layers=layers, experts=experts)


def _qwen_experts(c: Fields, layers: tuple[LayerSpec, ...], **facts: Any) -> dict[str, Any]:
    """Experts in every `decoder_sparse_step`-th layer, except the layers that `mlp_only_layers` names."""
    step, without = c("decoder_sparse_step", 1), c("mlp_only_layers", [])
    chosen = [(number + 1) % step == 0 and number not in without for number in range(len(layers))]
    experts = ExpertSpec(
        c("num_experts", c("num_local_experts")),  # files have one of these names
        c("num_experts_per_tok"),
        c("moe_intermediate_size"),
        normalised=c("norm_topk_prob", False),
        **facts,
    )
    layers = tuple(replace(layer, has_experts=has) for layer, has in zip(layers, chosen, strict=True))
    return {"layers": layers, "experts": experts}


def qwen2_moe(c: Fields) -> DecoderSpec:
    """arXiv 2407.10671: experts, and a shared network with a gate for all rows."""
    c("use_sliding_window")
    parts = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (f"mlp.shared_expert.{part}" for part in parts)
    shared = {"shared": NetworkNames((gate, up), down), "shared_width": c("shared_expert_intermediate_size")}
    return _plain(c, **_qwen_experts(c, _layers(c), shared_gate="mlp.shared_expert_gate", **shared))


def qwen3_moe(c: Fields) -> DecoderSpec:
    """arXiv 2505.09388: qwen3 with experts; every layer has the window, if the config has a window."""
    window = c("sliding_window") if c("use_sliding_window", False) else None
    layers = (LayerSpec(window),) * c("num_hidden_layers")
    return _plain(c, names=_head_norms(WeightNames()), **_qwen_experts(c, layers))


def gpt_oss(c: Fields) -> DecoderSpec:
    """arXiv 2508.10925: sinks, alternating windows, and experts with a clamped gate and biases."""
    for name in ("experts_per_token", "initial_context_length"):
        c(name)  # second names of fields that are read
    experts = ExpertSpec(
        c("num_local_experts"),
        c("num_experts_per_tok"),
        c("intermediate_size"),
        "softmax of chosen",
        router="mlp.router",
        stack="mlp.experts",
    )
    return _plain(
        c,
        layers=tuple(replace(layer, has_experts=True) for layer in _layers(c)),
        names=WeightNames(sinks="self_attn.sinks"),
        norm=NormSpec(c("rms_norm_eps"), "in float32"),
        clamp=GateClamp(c("swiglu_limit", 7.0), c("swiglu_alpha", 1.702)),
        experts=experts,
    )


def _latent(c: Fields, *, rotary: Mapping[str, Any], **facts: Any) -> DecoderSpec:
    """A decoder with latent KV (arXiv 2405.04434)."""
    value = c("v_head_dim", c("hidden_size") // c("num_attention_heads"))
    plain, turned, rank, rope = c("qk_nope_head_dim"), c("qk_rope_head_dim"), c("q_lora_rank"), c("rope_parameters")
    c.expect("num_key_value_heads", c("num_attention_heads"))
    c.expect("qk_head_dim", plain + turned)
    c.expect("head_dim", turned)
    latent = LatentSpec(c("kv_lora_rank"), turned, plain, value, rank)
    first = "self_attn.q_proj" if rank is None else "self_attn.q_a_proj"
    stretched = 1.0  # arXiv 2309.00071: longer contexts need sharper scores
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        stretched = 1.0 + 0.1 * rope["mscale_all_dim"] * math.log(max(rope["factor"], 1.0))
    return _plain(
        c,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.width,
        score_scale=(plain + turned) ** -0.5 * stretched**2,
        names=WeightNames(project=(first, "self_attn.kv_a_proj_with_mqa")),
        rotaries=(_rotary(c, rope, head_dim=turned, **rotary),),
        **facts,
    )


def _deepseek_experts(c: Fields, dense: Sequence[bool], **facts: Any) -> dict[str, Any]:
    """Experts in all layers that are not `dense`, and shared experts: one network for all rows."""
    c.expect("moe_layer_freq", 1)
    width, count, chosen = c("moe_intermediate_size"), c("n_routed_experts"), c("num_experts_per_tok")
    groups, of_groups = facts.get("groups", 1), facts.get("chosen_groups", 1)
    size = count // groups
    if count % groups or of_groups > groups or chosen > of_groups * size or facts.get("group_best", 1) > size:
        raise UnwrittenError(f"{chosen} of {count} experts, from {of_groups} of {groups} groups")
    gate, up, down = (f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
    experts = ExpertSpec(
        count,
        chosen,
        width,
        shared_width=width * c("n_shared_experts"),
        shared=NetworkNames((gate, up), down),
        scale=c("routed_scaling_factor"),
        routes_in_float32=True,
        **facts,
    )
    return {"layers": tuple(LayerSpec(has_experts=not is_dense) for is_dense in dense), "experts": experts}


def deepseek_v2(c: Fields) -> DecoderSpec:
    """arXiv 2405.04434: latent KV; a softmax chooses experts, in some models only from the best groups."""
    c.expect("scoring_func", "softmax")
    c.expect("topk_method", "greedy", "group_limited_greedy")
    c.expect("norm_topk_prob", False)
    groups = c("n_group", 1), c("topk_group", 1)
    grouped = {"groups": groups[0], "chosen_groups": groups[1]} if c("topk_method") == "group_limited_greedy" else {}
    dense = [number < c("first_k_dense_replace") for number in range(c("num_hidden_layers"))]
    rotary = {"interleaved": True, "in_float32": True}
    return _latent(c, rotary=rotary, **_deepseek_experts(c, dense, **grouped))


def deepseek_v3(c: Fields) -> DecoderSpec:
    """arXiv 2412.19437: as deepseek_v2, with sigmoids in place of the softmax, and corrected scores for the choice."""
    dense = [number < c("first_k_dense_replace") for number in range(c("num_hidden_layers"))]
    return _latent(c, rotary=_pairs(c), **_corrected_experts(c, dense))


def glm4_moe_lite(c: Fields) -> DecoderSpec:
    """arXiv 2508.06471: as deepseek_v3; a list says which layers have experts."""
    kinds = c("mlp_layer_types", ["dense"] + ["sparse"] * (c("num_hidden_layers") - 1))
    c.expect("first_k_dense_replace", 1)  # the list replaces this field
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown or len(kinds) != c("num_hidden_layers"):
        raise UnwrittenError(f"mlp_layer_types={kinds!r}")
    return _latent(c, rotary=_pairs(c), **_corrected_experts(c, [kind == "dense" for kind in kinds]))


def _pairs(c: Fields) -> dict[str, Any]:
    return {"interleaved": c("rope_interleave", True)}


def _corrected_experts(c: Fields, dense: Sequence[bool]) -> dict[str, Any]:
    c.expect("scoring_func", "sigmoid")
    c.expect("topk_method", "noaux_tc")
    return _deepseek_experts(
        c,
        dense,
        weights="sigmoid",
        normalised=c("norm_topk_prob"),
        groups=c("n_group"),
        chosen_groups=c("topk_group"),
        group_best=2,
        correction="mlp.gate.e_score_correction_bias",
    )


def youtu(c: Fields) -> DecoderSpec:
    """Youtu-LLM: as deepseek_v3 without experts."""
    return _latent(c, rotary=_pairs(c))


def minicpm3(c: Fields) -> DecoderSpec:
    """arXiv 2404.06395 with latent KV: multipliers in three places."""
    hidden, count = c("hidden_size"), c("num_hidden_layers")
    return _latent(
        c,
        rotary={},
        embedding_scale=c("scale_emb"),
        residual_scale=c("scale_depth", count**0.5) / count**0.5,
        logit_scale=c("dim_model_base", hidden) / hidden,
    )


FAMILIES: Mapping[str, Callable[[Fields], DecoderSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "smollm3": smollm3,
    "granite": granite,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "cohere2": cohere2,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "minicpm3": minicpm3,
    "youtu": youtu,
}
"""`model_type` of configs -> the function that makes a spec."""

"""config.json of the written families, completed as transformers completes it: defaults, old names, kinds of layers.

A config that is unknown here, or that may be wrong, raises `UnreadableError`: then transformers completes it, or says
what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword.errors import ModelLoadError
from foreword.model.checkpoint.picture_models import text_values
from foreword.model.checkpoint.tensors import UnreadableError

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
)
"""Fields that every file must have."""
_PLAIN: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": None,
    "num_key_value_heads": None,
    "head_dim": None,
}
_QWEN = {**_PLAIN, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}
_GEMMA = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_LATENT = {
    **_PLAIN,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK = {
    **_LATENT,
    "num_key_value_heads": 128,
    "eos_token_id": 1,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_PLAIN, "eos_token_id": 2},
    "mistral": {**_PLAIN, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "max_window_layers": 28},
    "qwen3": {**_QWEN, "max_window_layers": 28, "head_dim": 128},
    "smollm3": {
        **_PLAIN,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    "granite": {
        **_PLAIN,
        "eos_token_id": 2,
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
    },
    "mixtral": {
        **_PLAIN,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "gpt_oss": {
        **_PLAIN,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "gemma2": {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**_GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None},
    "phi3": {**_PLAIN, "rms_norm_eps": 1e-5, "eos_token_id": 32000, "original_max_position_embeddings": 4096},
    "olmo2": {**_PLAIN, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    "cohere2": {
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 255001,
        "num_key_value_heads": None,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
    },
    "deepseek_v2": {
        **_LATENT,
        "eos_token_id": 2,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": {
        **{name: value for name, value in _DEEPSEEK.items() if name != "first_k_dense_replace"},
        "num_key_value_heads": 20,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    "youtu": {
        **_LATENT,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
        "num_key_value_heads": 16,
        "rope_interleave": True,
    },
    "minicpm3": {
        **_LATENT,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "num_key_value_heads": 40,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
}
"""`model_type` -> the values of fields that a file leaves out."""
_MAY_BE_NULL = frozenset(
    "eos_token_id sliding_window final_logit_softcapping attn_logit_softcapping "
    "q_lora_rank scale_depth dim_model_base".split()
)
_NEVER_NULL = (
    "use_cache attention_bias mlp_bias initializer_range attention_dropout resid_pdrop embd_pdrop output_router_logits "
    "router_aux_loss_coef router_jitter_noise".split()
)
"""Fields that change no result, and that transformers refuses if they are null."""
_THETA = {"smollm3": 2e6, "gemma3_text": 1e6, "mixtral": 1e6, "gpt_oss": 150_000.0}
"""`model_type` -> the base of rotary angles, if it is not 10,000."""
MOST_LAYERS = 4096
"""Most layers of a model: a list of more layers might not fit into memory, whatever the file has."""
MOST_EXPERTS = 4096
"""Most experts of a layer: a file may not ask for more names than this."""
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


def read_raw(folder: Path) -> Mapping[str, Any]:
    """The fields of a folder's config.json, unchanged. Raises UnreadableError."""
    try:
        raw: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
        raw.get("model_type")
        return raw
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"a config.json that cannot be read ({error})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The completed fields that describe the language model of a folder. Raises UnreadableError."""
    try:
        return complete(text_values(read_raw(folder)))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise UnreadableError(f"a config.json that cannot be read ({error})") from error


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, as transformers' config of the family has them. Raises UnreadableError.

    Raises ModelLoadError for a number of layers that nobody can read.
    """
    family = raw.get("model_type")
    defaults = _DEFAULTS.get(str(family))
    if defaults is None:
        raise UnreadableError(f"model_type={family!r}")
    values = {**defaults, **raw}
    if family == "qwen3_moe" and "num_local_experts" not in raw:
        values.setdefault("num_experts", 128)
    null = [name for name in _NEVER_NULL if name in raw and raw[name] is None]
    if null:
        raise UnreadableError(f"config field {null[0]}=None")
    _check_sizes(values)
    for name, default in defaults.items():
        _check(name, values[name], default)
    number = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in values]
    if len(number) > 1 or any(type(values[name]) is not int for name in number):
        raise UnreadableError(f"numbers of experts {[values[name] for name in number]}")
    chosen = values.get("num_experts_per_tok") or 0
    if number and not 1 <= chosen <= values[number[0]] <= MOST_EXPERTS:
        raise UnreadableError(f"{chosen} of {values[number[0]]} experts")
    if "kv_lora_rank" in defaults:
        values["head_dim"] = values["qk_rope_head_dim"]
    elif values["hidden_size"] % values["num_attention_heads"]:
        raise UnreadableError("heads that do not divide hidden_size")
    if values.get("num_key_value_heads") and values["num_attention_heads"] % values["num_key_value_heads"]:
        raise UnreadableError("heads of keys and values that do not divide those of queries")
    values["dtype"] = _dtype(values.get("dtype") or values.pop("torch_dtype", None))
    _set_rope(str(family), values)
    _set_layers(str(family), values)
    return values


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raise UnreadableError for a size that is none, and ModelLoadError for a number of layers that nobody can read."""
    for name in _SIZES:
        if type(values.get(name)) is not int or values[name] < 1:
            raise UnreadableError(f"config field {name}={values.get(name)!r}")
    if (count := values["num_hidden_layers"]) > MOST_LAYERS:
        raise ModelLoadError(
            f"config.json has num_hidden_layers={count!r:.40}; at most {MOST_LAYERS} are read, correct it"
        )


def _check(name: str, value: Any, default: Any) -> None:
    """Raise UnreadableError for a value of another kind than the default's."""
    if name == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        if any(type(token_id) is not int for token_id in ids) and value is not None:
            raise UnreadableError(f"config field {name}={value!r}")
        return
    kind = type(default)
    fits = type(value) in ((int, float) if kind is float else (kind,))
    if value is None:
        fits = default is None or name in _MAY_BE_NULL
    elif default is None:
        fits = type(value) is int or (type(value) is float and name.endswith("softcapping"))
    if not fits:
        raise UnreadableError(f"config field {name}={value!r}")


def _dtype(name: Any) -> str | None:
    if name not in (None, "float32", "bfloat16", "float16"):
        raise UnreadableError(f"dtype={name!r}")
    return None if name is None else str(name)


def _set_rope(family: str, values: dict[str, Any]) -> None:
    """Complete rotary settings, in transformers' current form: `rope_parameters`."""
    scaling, rope = values.pop("rope_scaling", None), values.get("rope_parameters")
    if family == "gpt_oss" and rope is None and scaling is None:
        raise UnreadableError("rotary parameters that are left out")
    theta = values.pop("rope_theta", _THETA.get(family, 10_000.0))
    if family == "gemma3_text":
        plain = {"rope_type": "default"}
        rope = {"sliding_attention": plain, "full_attention": plain, **(rope or {})}
        full = {**(rope["full_attention"] or plain), **(scaling or {})}
        sliding = dict(rope["sliding_attention"] or plain)
        full.setdefault("rope_theta", theta)
        sliding.setdefault("rope_theta", values.pop("rope_local_base_freq", 10_000.0))
        rope = {**rope, "full_attention": full, "sliding_attention": sliding}
        parts = [full, sliding]
    else:
        rope = dict(scaling or rope or {})
        rope.setdefault("rope_theta", theta)
        parts = [rope]
        share = values.get("partial_rotary_factor", 1.0 if family == "phi3" else None)
        if family != "phi3":
            values.pop("partial_rotary_factor", None)
        if share is not None:
            rope.setdefault("partial_rotary_factor", share)
    for part in parts:
        _complete_rope(family, part, values)
    values["rope_parameters"] = rope


def _complete_rope(family: str, rope: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Complete one kind of rotary embeddings, and refuse settings that transformers may refuse."""
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind = rope["rope_type"]
    if kind in _WITH_ORIGINAL:
        if family == "phi3":
            rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
        if family != "gemma3_text":
            rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if family == "phi3" and kind in ("su", "yarn"):
        kind = rope["rope_type"] = "longrope"
    if kind not in ("default", *_ROPE_NEEDS) or (family == "phi3" and kind not in ("default", "longrope")):
        raise UnreadableError(f"rope_type={kind!r}")
    numbers = [rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)]
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    half = int(head_dim * numbers[1]) // 2
    if int(head_dim * numbers[1]) % 2:
        raise UnreadableError(f"{int(head_dim * numbers[1])} elements of a head that turn")
    for name in _ROPE_NEEDS.get(kind, ()):
        value = rope.get(name)
        if name.endswith("_factor") and kind == "longrope":
            if not isinstance(value, list) or len(value) != half:
                raise UnreadableError(f"rotary parameter {name} of another length than {half}")
            numbers += value
        else:
            numbers.append(value)
    if any(type(number) not in (int, float) for number in numbers):
        raise UnreadableError(f"rotary parameters {rope!r:.80}")


def _set_layers(family: str, values: dict[str, Any]) -> None:
    """Set `layer_types`, the attention type of each layer. Older files have a rule in place of this list."""
    count = values["num_hidden_layers"]
    if family in ("qwen2", "qwen3", "qwen3_moe") and not values["use_sliding_window"]:
        values["sliding_window"] = None
    if family == "cohere2":
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    if family == "smollm3" and values.get("no_rope_layers") is None:
        every = values["no_rope_layer_interval"]
        values["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(count)]
    window = values.get("sliding_window")
    pattern = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}.get(family)
    if family in ("gemma3_text", "cohere2"):
        pattern = values.get("sliding_window_pattern", pattern)
    if values.get("layer_types") is None:
        if pattern is not None:
            has_window = [bool((layer + 1) % pattern) for layer in range(count)]
        elif family in ("qwen2", "qwen3"):
            has_window = [window is not None and layer >= values["max_window_layers"] for layer in range(count)]
        elif family == "smollm3":
            uses = values["use_sliding_window"] and window is not None
            has_window = [uses and not turned for turned in values["no_rope_layers"][:count]]
        else:
            return
        values["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in has_window]
    if len(values["layer_types"]) != count:
        raise UnreadableError(f"{len(values['layer_types'])} layer_types for {count} layers")

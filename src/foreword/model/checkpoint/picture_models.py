"""Checkpoints of models that take pictures: the parts of their config and of their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foreword.errors import UnsupportedModelError
from foreword.model.checkpoint.tensors import Place, StackedPlace, StoredPlace, UnreadableError

_HEADS = "lm_head.weight", "language_model.lm_head.weight"
_STACKED = "gate_up_proj", "down_proj"
"""Weights that one tensor may hold for all experts of a layer."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family's files have the config and weights of both halves. The language half is a decoder by itself."""

    language: str
    """`model_type` of the language half. Except in Qwen's families, a `model_type` in `text_config` replaces it."""
    text: tuple[str, ...]
    """Prefixes that files give to names of the language half's weights; "model." replaces the prefix."""
    vision: Mapping[str, str]
    """Prefix, in files, of names of weights outside the language half -> the prefix that names the module."""
    is_qwen: bool = False
    is_tied: bool = False
    """Whether the embedding is the output head too, if config.json does not say whether it is."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the language half's config, with their values, for files that leave them out."""


_TILES = _Family(
    "llama", ("model.text_model.",), {"model.vision_model.": "vision_model.", "model.connector.": "connector."}
)
_VISUAL = {"model.visual.": "visual.", "visual.": "visual."}
_BEFORE = "model.language_model.", "language_model.model."
_TOWER = {
    f"{model}{name}": part
    for model in ("model.", "")
    for name, part in (
        ("vision_tower.vision_model.", "vision_tower."),
        ("vision_tower.", "vision_tower."),
        ("multi_modal_projector.", "multi_modal_projector."),
    )
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
_QWEN2 = _Family("qwen2", ("model.language_model.", "model."), _VISUAL, is_qwen=True)
PICTURE_MODELS = {
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": replace(_QWEN2, language="qwen3"),
    "qwen3_vl_moe": replace(_QWEN2, language="qwen3_moe", defaults={"num_experts_per_tok": 4}),
    "gemma3": _Family("gemma3_text", _BEFORE, _TOWER, is_tied=True, defaults=_GEMMA3),
    "mistral3": _Family("mistral", _BEFORE, _TOWER, is_tied=True),
    "llava": _Family("mistral", _BEFORE, _TOWER, defaults={"num_attention_heads": 32}),
    "internvl": _Family("qwen2", _BEFORE, _TOWER, is_tied=True),
}
"""`model_type` -> family, for the models that can have pictures in their prompts."""
_OF_OTHERS = frozenset(
    "_attn_implementation_autoset _flash_attn_2_enabled neftune_noise_alpha perceiver_config pixel_shuffle_factor "
    "qk_layer_norms use_resampler add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id is_decoder "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores prefix pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
    "torchscript typical_p use_bfloat16 is_composition".split()
)
"""Fields that old files have in `text_config`, and that change no result of transformers' language models."""
_OF_VISION = frozenset(
    "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id".split()
)
"""Fields that files have beside the language half's fields, and that do not belong to this half."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The files of a folder other than the language half."""

    folder: Path
    config: Mapping[str, Any]
    """The whole config."""
    weights: Mapping[str, StoredPlace]
    """Weights of the encoder and the connector by their names in transformers, without the leading `model.`."""


def text_values(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language half; the config itself if the model takes no pictures. Raises UnreadableError."""
    family = PICTURE_MODELS.get(str(raw.get("model_type")))
    if family is None:
        return raw
    text = raw.get("text_config")
    if text is None and family.is_qwen:  # older files have the half's fields beside the others
        text = raw
    if not isinstance(text, Mapping) or "rms_norm_eps" not in {**family.defaults, **text}:
        raise UnreadableError("a text_config that is left out, or has no rms_norm_eps")
    text = {**family.defaults, **{name: value for name, value in text.items() if name not in _OF_OTHERS}}
    dtype = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    text.pop("torch_dtype", None)
    kind = {"model_type": family.language}
    if family.is_qwen:
        text = {name: value for name, value in text.items() if name not in _OF_VISION}
        text |= {**kind, **_three_positions(text)}
        text["rope_parameters"]["mrope_interleaved"] = family.language != "qwen2"  # whatever the file says
    if family.language == "qwen3_moe":
        text["norm_topk_prob"] = True  # whatever the file says
    tied = raw.get("tie_word_embeddings", family.is_tied) or (family.is_qwen and text.get("tie_word_embeddings", False))
    return {**kind, **text, "dtype": dtype, "tie_word_embeddings": tied}


def _three_positions(text: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings for positions of three numbers, in transformers' current form. Raises UnreadableError."""
    rope = {**(text.pop("rope_scaling", None) or text.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", text.pop("rope_theta", None))
    if rope["rope_theta"] is None or not rope.get("mrope_section"):
        raise UnreadableError("rotary parameters without rope_theta or mrope_section")
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    return {"rope_parameters": {**rope, "rope_type": "default" if rope["rope_type"] == "mrope" else rope["rope_type"]}}


def refuse_other_form(folder: Path, reason: Exception) -> None:
    """Raise UnsupportedModelError if the model in `folder` takes pictures, because no other code runs such a model."""
    try:
        kind = str(json.loads((folder / "config.json").read_bytes()).get("model_type"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if kind in PICTURE_MODELS:
        raise UnsupportedModelError(
            f"model {str(folder)!r} ({kind}) cannot run: {reason}; models with pictures run on a CPU, from plain "
            "safetensors, with a language half of a written family"
        ) from reason


def parted(
    folder: Path, raw: Mapping[str, Any], places: Mapping[str, StoredPlace]
) -> tuple[dict[str, Place], VisionFiles | None]:
    """The language half's weights, named as in its family, and the other files; None if the model takes no pictures."""
    family = PICTURE_MODELS.get(str(raw.get("model_type")))
    if family is None:
        return dict(places), None
    text, vision, hidden = dict[str, Place](), {}, text_values(raw).get("hidden_size")
    is_turned = _are_turned(places, hidden)
    for name, place in places.items():
        part = next((begin for begin in family.vision if name.startswith(begin)), None)
        prefix = next((begin for begin in family.text if name.startswith(begin)), None)
        if part is not None:
            vision[family.vision[part] + name.removeprefix(part)] = place
        elif prefix is not None:
            text |= _apart("model." + name.removeprefix(prefix), place, is_turned)
        elif name in _HEADS:
            text[_HEADS[0]] = place
        else:
            raise UnreadableError(f"weight {name!r}")
    return text, VisionFiles(folder, raw, vision)


def _are_turned(places: Mapping[str, StoredPlace], hidden: Any) -> bool:
    """Whether tensors of a layer's experts are [experts, in, out], as published files have them.

    transformers 5 writes the form that it prefers, [experts, out, in]. One tensor whose sides differ shows the form of
    all. Raises UnreadableError if all are square.
    """
    stacks = {
        name: place
        for name, place in places.items()
        if name.partition(".experts.")[2] in _STACKED and len(place.shape) == 3
    }
    for name, place in stacks.items():
        is_hidden = [bool(size == hidden) for size in place.shape[1:]]
        if is_hidden[0] != is_hidden[1]:
            return is_hidden[1] if name.endswith("down_proj") else is_hidden[0]
    if stacks:
        name, place = next(iter(stacks.items()))
        raise UnreadableError(f"{name} of {place.shape}, where hidden_size={hidden} does not tell outputs from inputs")
    return False


def _apart(name: str, place: StoredPlace, is_turned: bool) -> dict[str, Place]:
    """Return a tensor's weight, or one weight per expert if the tensor holds all experts of a layer.
    In such a tensor, the gate's outputs come first, then those of up.
    """
    layer, _, last = name.partition(".experts.")
    if last not in _STACKED or len(place.shape) != 3:
        return {name: place}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    num_outputs = place.shape[2 if is_turned else 1] // len(parts)
    return {
        f"{layer}.experts.{expert}.{part}.weight": StackedPlace(
            place, expert, range(num_outputs * at, num_outputs * (at + 1)), is_turned
        )
        for expert in range(place.shape[0])
        for at, part in enumerate(parts)
    }

"""Checkpoints of models that take pictures: the parts of their config and of their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import UnsupportedModelError
from foreword.model.checkpoint.tensors import StoredPlace, UnreadableError

_TEXT, _HEAD = "model.text_model.", "lm_head.weight"
_VISION = ("model.vision_model.", "model.connector.")
PICTURE_MODELS = ("idefics3", "smolvlm")
"""`model_type` of the models whose pictures are served. Their language half is a decoder by itself."""
_OF_OTHERS = frozenset(
    "_attn_implementation_autoset _flash_attn_2_enabled neftune_noise_alpha perceiver_config pixel_shuffle_factor "
    "qk_layer_norms use_resampler add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id is_decoder "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores prefix pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
    "torchscript typical_p use_bfloat16".split()
)
"""Fields that old files have in `text_config`, and that change no number of transformers' language models."""


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """What a folder has besides the language half."""

    folder: Path
    config: Mapping[str, Any]
    """The whole config."""
    weights: Mapping[str, StoredPlace]
    """Weights of encoder and connector, named as below transformers' `model`."""


def text_values(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language half; the config itself if the model takes no pictures. Raises UnreadableError."""
    if raw.get("model_type") not in PICTURE_MODELS:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or "rms_norm_eps" not in text:
        raise UnreadableError("a text_config that is left out, or has no rms_norm_eps")
    own = {name: value for name, value in text.items() if name not in _OF_OTHERS}
    dtype = raw.get("dtype") or raw.get("torch_dtype") or own.get("dtype") or own.get("torch_dtype")
    own.pop("torch_dtype", None)
    tied = raw.get("tie_word_embeddings", False)
    return {"model_type": "llama", **own, "dtype": dtype, "tie_word_embeddings": tied}


def refuse_other_form(folder: Path, reason: Exception) -> None:
    """Raise UnsupportedModelError for such a model that is not read here: nothing else runs its two halves."""
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return
    if kind in PICTURE_MODELS:
        raise UnsupportedModelError(
            f"model {str(folder)!r} ({kind}) cannot run: {reason}; models with pictures run on a CPU, from plain "
            "safetensors, with a language half of a written family"
        ) from reason


def parted(
    folder: Path, raw: Mapping[str, Any], places: Mapping[str, StoredPlace]
) -> tuple[dict[str, StoredPlace], VisionFiles | None]:
    """Weights of the language half by the names of its family, and the rest; None: there is no other half."""
    if raw.get("model_type") not in PICTURE_MODELS:
        return dict(places), None
    text, vision = {}, {}
    for name, place in places.items():
        if name.startswith(_TEXT):
            text["model." + name.removeprefix(_TEXT)] = place
        elif name.startswith(_VISION):
            vision[name.removeprefix("model.")] = place
        elif name == _HEAD:
            text[name] = place
        else:
            raise UnreadableError(f"weight {name!r}")
    return text, VisionFiles(folder, raw, vision)

"""Reading a checkpoint of any Hugging Face causal language model: its config, and its weights in plain modules.

Knows configs, files and dtypes; knows no architecture by name, and nothing of what a model remembers. It refuses what
the config rules out, with the layer and the reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foreword.config import Dtype, ModelConfig
from foreword.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foreword.model.checkpoint.quantization import expand_quantized, give_one_type, refuse_gguf
from foreword.model.checkpoint.weights_progress import weights_progress
from foreword.model.foreign.attention import ATTENTION_NAME
from foreword.model.foreign.experts import EXPERTS_NAME

logger = logging.getLogger(__name__)

REFUSED_LAYER_TYPES: Mapping[str, str] = {
    "indexed_attention": "it chooses positions with an indexer, whose keys have no place in the cache",
}
"""Layer type that does not run -> the reason. Types in neither list are refused as unknown."""
SUPPORTED_LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "moe",
    "mlp",
)
SUPPORTED = (
    "decoder-only language models of transformers whose layers are full, sliding-window or chunked attention (llama, "
    "qwen2, qwen3, qwen3_moe, mistral, phi3, olmo2, granite, gemma2, gemma3, cohere2, gpt_oss, smollm3, llama4, bloom, "
    "mpt, ...), recurrent, or both (mamba2, qwen3_next, falcon_h1, granitemoehybrid, bamba, lfm2, ...)"
)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as transformers reads it, on its device, and the facts from its config."""

    module: PreTrainedModel
    config: PretrainedConfig
    """The config of the text part."""
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    """The length of the longest sequence that the model accepts."""
    eos_token_ids: frozenset[int]


def read_checkpoint(options: ModelConfig) -> Checkpoint:
    """Read a checkpoint from a folder or the hub. Raises ConfigError, ModelLoadError or UnsupportedModelError."""
    device = _device(options.device)
    config = _load_config(options)
    is_quantized = expand_quantized(config, options)
    text = config.get_text_config()
    _refuse_unsupported(config, text, options)
    dtype = choose_dtype(options, text, device)
    module = _load_weights(options, config, dtype).to(device).eval()
    if is_quantized:
        give_one_type(module, dtype)
    if dtype == torch.float16:  # the file's tensors may have another type than the config says
        _refuse_overflow(module, options)
    return Checkpoint(module, text, dtype, device, _max_positions(text), _eos_token_ids(module, text))


def _load_config(options: ModelConfig) -> PretrainedConfig:
    name = options.model
    refuse_gguf(name)
    if (os.sep in name or name.startswith((".", "~"))) and not os.path.isdir(name) and name.count("/") != 1:
        raise ModelLoadError(f"model folder {name!r} does not exist; give a folder with config.json or a hub id")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ModelLoadError(f"model folder {name!r} has no config.json; is it a Hugging Face checkpoint?")
    if os.path.isdir(name) and options.revision is not None:
        raise ConfigError(
            f"revision={options.revision!r} names a version on the hub, but {name!r} is a folder; drop it"
        )
    try:
        return AutoConfig.from_pretrained(
            name, revision=options.revision or "main", trust_remote_code=options.trust_remote_code
        )
    except ValueError as error:
        if "does not recognize this architecture" in str(error) or "model_type" in str(error):
            raise UnsupportedModelError(
                f"model {name!r} has an architecture that transformers does not know ({first_line(error)}); "
                f"supported are {SUPPORTED}"
            ) from error
        raise ModelLoadError(f"the config of model {name!r} cannot be read: {first_line(error)}") from error
    except OSError as error:
        raise ModelLoadError(
            f"model {name!r} is neither a local folder nor a hub id that can be reached: {first_line(error)}"
        ) from error


def _refuse_unsupported(config: PretrainedConfig, text: PretrainedConfig, options: ModelConfig) -> None:
    kind = getattr(config, "model_type", "?")
    for layer, layer_type in enumerate(getattr(text, "layer_types", None) or []):
        if layer_type not in SUPPORTED_LAYER_TYPES:
            reason = REFUSED_LAYER_TYPES.get(layer_type, f"it runs {', '.join(SUPPORTED_LAYER_TYPES)}")
            raise UnsupportedModelError(
                f"model {options.model!r} ({kind}): layer {layer} is of type {layer_type!r}, which this version cannot "
                f"run: {reason}. Supported are {SUPPORTED}"
            )
    _refuse_media(config, options)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model {options.model!r} ({kind}) is an encoder-decoder; supported are {SUPPORTED}"
        )


def _refuse_media(config: PretrainedConfig, options: ModelConfig) -> None:
    """Raise UnsupportedModelError for models of images or sound that have no class for text alone."""
    parts = " ".join(getattr(config, "sub_configs", {}))
    media = [medium for part, medium in (("vision", "images"), ("audio", "sound")) if part in parts]
    kind = f"model {options.model!r} ({getattr(config, 'model_type', '?')})"
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if media and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UnsupportedModelError(
            f"{kind} takes {' and '.join(media)} as well as text, and transformers has no class that loads its text "
            f"part alone; choose a text-only checkpoint of the family. Supported are {SUPPORTED}"
        )
    if media:
        logger.warning("%s takes %s as well as text; foreword serves text only", kind, " and ".join(media))


def _load_weights(options: ModelConfig, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    module: PreTrainedModel
    try:
        with weights_progress(options.model):
            module, report = AutoModelForCausalLM.from_pretrained(
                options.model,
                config=config,
                revision=options.revision or "main",
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                experts_implementation=EXPERTS_NAME if _has_experts(config) else None,
                trust_remote_code=options.trust_remote_code,
                output_loading_info=True,
            )
    except (SafetensorError, EOFError) as error:
        raise ModelLoadError(
            f"the weights of model {options.model!r} are damaged or truncated ({first_line(error)}); download them "
            "again"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"model {options.model!r} ({getattr(config, 'model_type', '?')}) cannot run with foreword's attention: "
            f"{first_line(error)}; supported are {SUPPORTED}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"the weights of model {options.model!r} cannot be loaded: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers has filled them with random numbers
        raise ModelLoadError(
            f"the weights of model {options.model!r} lack {len(missing)} of those that its config.json asks for "
            f"(first: {missing[0]!r}); download it again, or correct config.json"
        )
    return module


def _has_experts(config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _refuse_overflow(module: PreTrainedModel, options: ModelConfig) -> None:
    """Raise ConfigError if a weight is infinite as float16."""
    for name, weight in module.named_parameters():
        if weight.isinf().any():
            raise ConfigError(
                f"dtype='float16' cannot hold the weight {name!r} of model {options.model!r}: numbers beyond 65504 "
                "become infinite; use 'bfloat16' or 'float32'"
            )


def _checkpoint_dtype(text: PretrainedConfig) -> torch.dtype:
    """The config's dtype; float32 if it has none or one that foreword does not offer."""
    said = str(getattr(text, "dtype", None)).removeprefix("torch.")
    offered: torch.dtype = getattr(torch, said if said in get_args(Dtype) and said != "auto" else "float32")
    return offered


def choose_dtype(options: ModelConfig, text: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the requested type, else the checkpoint's. A CPU computes float16 as float32, which loses no bit."""
    if options.dtype != "auto":
        asked: torch.dtype = getattr(torch, options.dtype)
        return asked
    found = _checkpoint_dtype(text)
    return torch.float32 if found == torch.float16 and device.type == "cpu" else found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown: {first_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device here; use 'cpu'")
    return device


def _max_positions(text: PretrainedConfig) -> int:
    """The length of the longest sequence.

    Some rotary embeddings change beyond a certain length, which would change the KV of a prefix afterwards. That
    length is the limit of such models.
    """
    names = ("max_position_embeddings", "max_seq_len")
    longest = min((int(limit) for name in names if (limit := getattr(text, name, None))), default=2**20)
    parameters = getattr(text, "rope_parameters", None) or {}
    flat = parameters if "rope_type" in parameters else next(iter(parameters.values()), {})
    if isinstance(flat, dict) and flat.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        original = int(flat.get("original_max_position_embeddings") or longest)
        if original < longest:
            logger.warning(
                "%s rotary embeddings change beyond %d tokens; max_model_len is limited to that",
                flat["rope_type"],
                original,
            )
        return min(original, longest)
    return longest


def _eos_token_ids(module: PreTrainedModel, text: PretrainedConfig) -> frozenset[int]:
    generation: Any = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(text, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

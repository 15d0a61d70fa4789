"""Reading a checkpoint of any Hugging Face causal language model: its config, and its weights in plain modules.

A model that cannot run according to its config is refused, with the layer and the reason. transformers turns FP8 and
MXFP4 into plain numbers while it loads them, unless foreword reads them by itself (`small_floats.py`). Other formats
need special kernels, so they are refused by name before any weight is read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foreword.config import ModelConfig
from foreword.errors import ConfigError, ModelLoadError, UnsupportedModelError, first_line
from foreword.model.checkpoint.facts import (
    LOADABLE,
    SIDE_FILES,
    SUPPORTED,
    choose_dtype,
    find_device,
    max_positions,
    token_ids,
)
from foreword.model.checkpoint.hub import file_of, refuse_wrong_path
from foreword.model.checkpoint.tensors import weights_progress
from foreword.model.foreign.attention import ATTENTION_NAME, EXPERTS_NAME

logger = logging.getLogger(__name__)
REMEDY = (
    "foreword loads unquantized weights, FP8 (quant_method 'fp8' or 'mxfp8'), MXFP4, GGUF files, and folders on this "
    "machine in GPTQ, AWQ and compressed-tensors; choose a checkpoint of the model in one of these, or a .gguf file"
)
REFUSED_LAYER_TYPES: Mapping[str, str] = {
    "indexed_attention": "it chooses positions with an indexer, whose keys have no place in the cache; choose a model "
    "whose layers see every position, such as DeepSeek-V3.1 in place of V3.2, or GLM-4.7-Flash",
}
"""Layer type that does not run -> the reason. Types that are neither here nor in SUPPORTED_LAYER_TYPES are refused as
unknown."""
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


def expand_quantized(config: PretrainedConfig, options: ModelConfig) -> bool:
    """If the weights are quantized, have transformers load them as plain numbers. Return whether they are quantized.

    Raises UnsupportedModelError for formats that transformers cannot turn into plain numbers.
    """
    description = _description(config)
    if description is None:
        for method in _methods_of_side_files(options):
            raise _refusal(options.model, method)
        return False
    method = _method(description)
    if method not in LOADABLE:
        raise _refusal(options.model, " ".join(filter(None, (method, _details(description)))))
    description["dequantize"] = True
    config.quantization_config = description
    logger.info("%s weights are turned into plain numbers as they are loaded", LOADABLE[method])
    return True


def give_one_type(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert parameters to `dtype`, because transformers leaves unquantized parameters in the file's type."""
    in_float32 = set(module._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        in_float32 |= set(module._keep_in_fp32_modules or ())
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in in_float32):
            parameter.data = parameter.data.to(dtype)


def _refusal(model: str, method: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the weights of model {model!r} are quantized as {method!r}; {REMEDY}")


def _description(config: PretrainedConfig) -> dict[str, Any] | None:
    """The description of quantized weights in config.json, or in the part of it about the language model; None: plain
    numbers.
    """
    for place in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            description = getattr(place, name, None)
            if description is not None:
                return dict(description) if isinstance(description, Mapping) else dict(description.to_dict())
    return None


def _method(description: Mapping[str, Any]) -> str:
    if description.get("load_in_4bit") or description.get("load_in_8bit"):
        return "bitsandbytes"
    return str(description.get("quant_method") or "a format without a name")


def _details(description: Mapping[str, Any]) -> str:
    """The format's variant, if the description names it: 'NVFP4', '4 bits'."""
    bits = description.get("bits") or description.get("w_bit")
    return str(description.get("quant_algo") or description.get("format") or (f"{bits} bits" if bits else ""))


def _methods_of_side_files(options: ModelConfig) -> Iterator[str]:
    for name, method in SIDE_FILES.items():
        path = file_of(options, name)
        if path is None:
            continue
        try:
            algorithm = json.loads(path.read_text())["quantization"]["quant_algo"]
        except (ValueError, KeyError, TypeError):
            yield method
        else:
            if algorithm:  # None if only the KV cache is to be quantized
                yield f"{method} {algorithm}"


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
    device = find_device(options.device)
    config = _load_config(options)
    is_quantized = expand_quantized(config, options)
    text = config.get_text_config()
    _refuse_unsupported(config, text, options)
    dtype = choose_dtype(options, getattr(text, "dtype", None), device)
    module = _load_weights(options, config, dtype).to(device).eval()
    if is_quantized:
        give_one_type(module, dtype)
    if dtype == torch.float16:  # the file's tensors may have another type than the config says
        _refuse_overflow(module, options)
    return Checkpoint(module, text, dtype, device, max_positions(text), _eos_token_ids(module, text))


def _load_config(options: ModelConfig) -> PretrainedConfig:
    name = options.model
    if (os.sep in name or name.startswith((".", "~"))) and not os.path.isdir(name) and name.count("/") != 1:
        raise ModelLoadError(f"model folder {name!r} does not exist; give a folder with config.json or a hub id")
    refuse_wrong_path(name)
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
    except (StrictDataclassError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelLoadError(
            f"the config of model {name!r} cannot be read: {' '.join(str(error).split())}; correct config.json"
        ) from error
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
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
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
    """Raise ConfigError if a weight becomes infinite in float16."""
    for name, weight in module.named_parameters():
        if weight.isinf().any():
            raise ConfigError(
                f"dtype='float16' cannot hold the weight {name!r} of model {options.model!r}: numbers beyond 65504 "
                "become infinite; use 'bfloat16' or 'float32'"
            )


def _eos_token_ids(module: PreTrainedModel, text: PretrainedConfig) -> frozenset[int]:
    generation: Any = getattr(module, "generation_config", None)
    token = getattr(generation, "eos_token_id", None)
    if token is None:
        token = getattr(text, "eos_token_id", None)
    return token_ids(token)

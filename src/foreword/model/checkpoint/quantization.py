"""The number formats that a checkpoint's weights may have.

Knows how config.json and the files beside it describe quantized weights; reads no weights and knows no architecture.
transformers turns FP8 and MXFP4 into plain numbers while it loads them, where they are not read here
(`small_floats.py`). Other formats need special kernels, so they are refused by name before any weight is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from foreword.config import ModelConfig
from foreword.errors import UnsupportedModelError
from foreword.model.checkpoint.facts import LOADABLE, SIDE_FILES

logger = logging.getLogger(__name__)

REMEDY = (
    "foreword loads unquantized weights, FP8 (quant_method 'fp8' or 'mxfp8'), MXFP4, GGUF files, and folders on this "
    "machine in GPTQ, AWQ and compressed-tensors; choose a checkpoint of the model in one of these, or a .gguf file"
)


def expand_quantized(config: PretrainedConfig, options: ModelConfig) -> bool:
    """Have quantized weights loaded as plain numbers; returns whether the weights are quantized.

    Raises UnsupportedModelError for formats that transformers cannot turn into plain numbers.
    """
    found = _description(config)
    if found is None:
        for method in _methods_of_side_files(options):
            raise _refusal(options.model, method)
        return False
    method = _method(found)
    if method not in LOADABLE:
        raise _refusal(options.model, " ".join(filter(None, (method, _details(found)))))
    found["dequantize"] = True
    config.quantization_config = found
    logger.info("%s weights are turned into plain numbers as they are loaded", LOADABLE[method])
    return True


def give_one_type(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert parameters to `dtype`: transformers leaves those that were not quantized as they are in the file."""
    kept = set(module._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)


def _refusal(model: str, method: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the weights of model {model!r} are quantized as {method!r}; {REMEDY}")


def _description(config: PretrainedConfig) -> dict[str, Any] | None:
    """The description in config.json, at its top or for the language model in it; None if weights are plain numbers."""
    for place in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            found = getattr(place, name, None)
            if found is not None:
                return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def _method(found: Mapping[str, Any]) -> str:
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    return str(found.get("quant_method") or "a format without a name")


def _details(found: Mapping[str, Any]) -> str:
    """The format's variant, if the description names it: 'NVFP4', '4 bits'."""
    bits = found.get("bits") or found.get("w_bit")
    return str(found.get("quant_algo") or found.get("format") or (f"{bits} bits" if bits else ""))


def _methods_of_side_files(options: ModelConfig) -> Iterator[str]:
    folder = Path(options.model).expanduser()
    for name, method in SIDE_FILES.items():
        path = cached_file(
            str(folder) if folder.is_dir() else options.model,
            name,
            revision=options.revision or "main",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            continue
        try:
            algorithm = json.loads(Path(path).read_text())["quantization"]["quant_algo"]
        except (ValueError, KeyError, TypeError):
            yield method
        else:
            if algorithm:  # None if only the KV cache is to be quantized
                yield f"{method} {algorithm}"

"""Facts of a checkpoint, for all its readers: the type, the device, the longest sequence, the end tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, get_args

import torch

from foreword.config import Dtype, ModelConfig
from foreword.errors import ConfigError, ModelLoadError, first_line

logger = logging.getLogger(__name__)

SUPPORTED = (
    "decoder-only language models of transformers whose layers are full, sliding-window or chunked attention (llama, "
    "qwen2, qwen3, qwen3_moe, mistral, phi3, olmo2, granite, gemma2, gemma3, cohere2, gpt_oss, smollm3, deepseek_v2, "
    "deepseek_v3, glm4_moe_lite, minicpm3, youtu, llama4, bloom, mpt, ...), recurrent, or both (mamba2, qwen3_next, "
    "falcon_h1, granitemoehybrid, bamba, lfm2, ...)"
)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
LOADABLE: Mapping[str, str] = {"fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
"""`quant_method` of weights that transformers can read, too, as plain numbers -> the usual name of the format."""
SIDE_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Name of a file that describes quantized weights if config.json does not -> the format, if the file names none."""


def choose_dtype(options: ModelConfig, stored: object, device: torch.device) -> torch.dtype:
    """The requested type, else the config's type, else float32. A CPU computes float16 as float32, without loss."""
    if options.dtype != "auto":
        requested: torch.dtype = getattr(torch, options.dtype)
        return requested
    name = str(stored).removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, name if name in get_args(Dtype) and name != "auto" else "float32")
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def find_device(name: str) -> torch.device:
    """The device with this name. Raises ConfigError if the name is unknown, or there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown ({first_line(error)}); use 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device here; use 'cpu'")
    return device


def max_positions(text: Any) -> int:
    """The length of the longest sequence.

    Some rotary embeddings change the angles of all positions when a sequence exceeds a certain length. Then the KV of a
    cached prefix would no longer be right, so that length is the limit of such models.
    Raises ModelLoadError for a length that is none.
    """
    names = ("max_position_embeddings", "max_seq_len")
    longest = min((_length(name, limit) for name in names if (limit := getattr(text, name, None))), default=2**20)
    parameters = getattr(text, "rope_parameters", None) or {}
    flat = parameters if "rope_type" in parameters else next(iter(parameters.values()), {})
    if isinstance(flat, dict) and flat.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        name = "original_max_position_embeddings"
        original = _length(name, flat.get(name) or longest)
        if original < longest:
            logger.warning(
                "%s rotary embeddings change beyond %d tokens; max_model_len is limited to that",
                flat["rope_type"],
                original,
            )
        return min(original, longest)
    return longest


def _length(name: str, value: Any) -> int:
    if type(value) not in (int, float) or not 1 <= value < 2**31:
        raise ModelLoadError(f"config.json has {name}={value!r:.60}, which is no number of tokens; correct it")
    return int(value)


def token_ids(value: Any) -> frozenset[int]:
    """The tokens in a field that names one end token, a list of end tokens, or null. Raises ModelLoadError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelLoadError(
            f"the model's files have eos_token_id={value!r:.60}, which is neither a token's number nor a list of "
            "numbers; correct config.json and generation_config.json"
        )
    return frozenset(ids)

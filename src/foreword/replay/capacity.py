"""Capacities of a cache: blocks of a recording, or bytes of a model's KV.

Knows units and the facts about KV in a model's config.json; loads no model.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from foreword.config import Dtype, user_path
from foreword.config.sizes import parse_bytes
from foreword.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError)
"""Errors of reading a size in a configuration that lacks it, or has something else in its place."""
MAX_BLOCKS = 2**31 - 1
"""Block numbers are signed 32-bit integers."""
MOST_DIGITS = 100
"""A capacity in blocks may be written with at most this number of characters."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3", "youtu")
"""`model_type` of the models whose KV is stored as latent vectors on a CPU. Other models' KV is stored expanded, as
full keys and values."""
IS_EXPANDED = "kv_is_expanded"
"""A field that is added to a model's configuration if a server would expand the KV. No config.json has this field."""
SCALE_BYTES = 2
"""Bytes of one scale of KV in int8. Each head has one scale for a token's keys, and one for the token's values."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """One capacity that a user asked for."""

    name: str
    """The capacity as the user wrote it."""
    num_blocks: int


def parse_capacity(text: str, block_tokens: int, kv_bytes_per_token: int | None) -> Capacity:
    """Parse a number of blocks (`1000`), or of bytes of KV (`4GB`, `512MiB`). Raises ConfigError."""
    name = text.strip()
    if re.fullmatch(r"[0-9]+(_[0-9]+)*", name) and len(name) <= MOST_DIGITS:
        num_blocks = int(name)
    else:
        try:
            num_bytes = parse_with_unit(name)
        except ConfigError as error:
            raise ConfigError(f"{name!r} is no capacity; write blocks as 1000, or bytes as 4GB or 512MiB") from error
        if kv_bytes_per_token is None:
            raise ConfigError(
                f"capacity {name!r} is in bytes; give the folder of the model that it is for with --model"
            )
        num_blocks = num_bytes // (block_tokens * kv_bytes_per_token)
    if not 1 <= num_blocks <= MAX_BLOCKS:
        raise ConfigError(f"capacity {name!r} is {num_blocks:,} blocks; give one that holds 1 to {MAX_BLOCKS:,}")
    return Capacity(name, num_blocks)


def parse_with_unit(text: str) -> int:
    """Parse `4GB` to a number of bytes; refuse `4`, which lacks a unit. Raises ConfigError."""
    if not text.strip().upper().endswith("B"):
        raise ConfigError(f"{text!r} is no number of bytes; write it as 4GB or 512MiB")
    return parse_bytes(text)


def read_model_config(model: str, dtype: Dtype = "auto") -> dict[str, Any]:
    """Read config.json; `model` is a model's folder, or the file itself. Raises ModelLoadError.

    Adds `IS_EXPANDED` if the model's KV could be latent but `serve` with this `dtype` would expand it. This is checked
    only if torch is installed and the folder has the weights.
    """
    folder = user_path(model)
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{str(path)!r} cannot be read: {error}; give a model's folder or its config.json"
        ) from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{str(path)!r} is no model's configuration; give a model's folder or its config.json")
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    if is_latent(config) and any(folder.glob("*.safetensors")):
        with suppress(ImportError):  # an installation of foreword[ops] has no torch
            from foreword.model.loader import why_not_written

            try:
                reason = why_not_written(folder, dtype)
            except ModelLoadError as error:
                logger.warning("KV of %s is taken for latent, because of its model_type: %s", model, error)
                return config
            if reason:
                logger.warning("%s runs in transformers' modules, with expanded KV: %s", model, reason)
                return {**config, IS_EXPANDED: True}
    return config


def is_latent(config: dict[str, Any]) -> bool:
    """Whether a CPU stores a token's keys and values in a layer as one vector for all heads."""
    return config.get("model_type") in LATENT_FAMILIES and not config.get(IS_EXPANDED)


def kv_bytes_per_token(config: dict[str, Any], kv_cache_dtype: str = "auto") -> int:
    """Bytes of one token's keys and values in all layers, as if every layer attended to all tokens.

    `kv_cache_dtype` says how `serve` stores KV; "auto" stands for the type in the configuration.
    Raises ModelLoadError if the configuration lacks a size, and ConfigError for latent vectors in int8.
    """
    latent = is_latent(config)
    if kv_cache_dtype == "int8" and latent:
        raise ConfigError(
            "kv_cache_dtype='int8' stores keys and values of heads, and this model's KV is latent; leave it out"
        )
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    size = DTYPE_BYTES.get(dtype, 2)
    try:
        layers = int(config["num_hidden_layers"])
        if latent:  # one vector for the keys and values of all heads
            row_bytes = size * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        else:
            row_bytes = int(config.get("num_key_value_heads") or config["num_attention_heads"]) * _head_bytes(
                config, size, is_int8=kv_cache_dtype == "int8"
            )
        if layers * row_bytes < 1:
            raise ValueError(f"{layers} layers of {row_bytes} bytes")
    except UNREADABLE as error:
        raise ModelLoadError(
            f"the model's configuration does not tell the size of its KV ({error}); give --kv-bytes-per-token"
        ) from error
    return layers * row_bytes


def _head_bytes(config: dict[str, Any], size: int, *, is_int8: bool) -> int:
    """Bytes of one token's key and value in one head. `size`: bytes of a number that is not in int8."""
    if config.get("kv_lora_rank") is None:
        widths = 2 * int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    else:
        widths = sum(int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return widths + 2 * SCALE_BYTES if is_int8 else widths * size

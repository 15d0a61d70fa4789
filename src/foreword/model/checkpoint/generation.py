"""The sampling that a checkpoint recommends: `generation_config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from foreword.config import ModelConfig, user_path
from foreword.errors import ConfigError, InvalidRequestError
from foreword.model.checkpoint.hub import file_of
from foreword.request import SamplingParams

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are read, as in vLLM: not `do_sample`; end tokens are read with the model."""


def recommended_sampling(options: ModelConfig) -> SamplingParams:
    """Sampling parameters with the values of the model's generation_config.json, or of the file that
    `options.generation_config` names.

    Raises ConfigError if the named file does not exist, or for values that no request could give.
    """
    path = _find(options)
    if path is None:
        return SamplingParams()
    try:
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict):
            raise TypeError(f"it holds a {type(fields).__name__}, not an object")
        values = {name: value for name in NAMES if (value := fields.get(name)) is not None}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
                raise TypeError(f"{name}={value!r} is not a number of the right kind")
        return SamplingParams(**values)
    except (OSError, ValueError, TypeError, InvalidRequestError) as error:
        raise ConfigError(
            f"generation_config={options.generation_config!r}: {path} cannot be used: {error}; "
            "mend it, name another file, or give generation_config='none'"
        ) from error


def differences(params: SamplingParams) -> dict[str, float]:
    """The values of NAMES that differ from the defaults of SamplingParams."""
    plain = SamplingParams()
    return {name: getattr(params, name) for name in NAMES if getattr(params, name) != getattr(plain, name)}


def _find(options: ModelConfig) -> Path | None:
    source = options.generation_config
    if source in ("none", "vllm"):  # vLLM's name for its own plain sampling
        return None
    if source != "auto":
        path = user_path(source)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"generation_config={source!r}: there is no file {path}; name a file, a folder with {FILE_NAME}, "
                "'auto' or 'none'"
            )
        return path
    return file_of(options, FILE_NAME)

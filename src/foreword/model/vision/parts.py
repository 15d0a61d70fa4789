"""The parts of a model's half that sees, as transformers has them: weights, settings, errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import ConfigError, ModelLoadError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec


def load_weights(parts: Mapping[str, Any], files: VisionFiles, dtype: torch.dtype) -> None:
    """Give modules on the device "meta" their weights, named by their part first."""
    module = torch.nn.ModuleDict(parts)
    module.load_state_dict({name: place.stored().to(dtype) for name, place in files.weights.items()}, assign=True)
    if unfilled := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ValueError(f"the numbers of {unfilled[0]} are in no file")
    module.eval().requires_grad_(False)


def digest_of(config: Any, processor: Any, dtype: torch.dtype) -> str:
    """A digest of all besides pixels and weights on which a picture's rows depend."""
    import PIL
    import transformers

    facts = {
        "config": config.to_dict(),
        "processor": processor.to_dict(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def check_width(rows: Tensor, spec: DecoderSpec) -> None:
    """Raise ValueError unless a picture's rows are as wide as the language half's."""
    if rows.shape[-1] != spec.hidden_size:
        raise ValueError(f"pictures become rows of {rows.shape[-1]} numbers, and hidden_size is {spec.hidden_size}")


def check_last_layer(config: Any) -> None:
    """Raise ValueError unless rows come from the encoder's last layer."""
    if config.vision_feature_layer != -1:
        raise ValueError(f"config.json has vision_feature_layer={config.vision_feature_layer}, and only -1 is served")


def without_pixels(height: int, width: int) -> npt.NDArray[np.uint8]:
    """A picture [3, height, width] that takes no memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


@contextmanager
def loading(files: VisionFiles) -> Iterator[None]:
    """Turn what files that do not fit together raise into ModelLoadError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # config.json and preprocessor_config.json may hold anything
        line = str(error).strip().partition("\n")[0]
        raise ModelLoadError(
            f"the half of model {str(files.folder)!r} that sees cannot be loaded: {line}; download the model again, or "
            "choose another"
        ) from error

"""The choice of a model's half that sees."""

from __future__ import annotations

import logging

import torch

from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision
from foreword.model.vision.gemma3 import Gemma3Vision
from foreword.model.vision.idefics3 import Idefics3Vision
from foreword.model.vision.internvl import InternVLVision
from foreword.model.vision.pixtral import PixtralVision
from foreword.model.vision.qwen import QwenVision

logger = logging.getLogger(__name__)


def load_vision(files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, *, max_tokens: int) -> Vision | None:
    """The half of a model that sees; None without Pillow, which the model serves text without.

    `spec`: of the language half; `max_tokens`: of one picture, where the family leaves it open. Raises ModelLoadError,
    and ConfigError for a limit that is too small.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        logger.warning("the model takes pictures, but Pillow is missing: run `pip install foreword[vision]`")
        return None
    match files.config["model_type"]:
        case "idefics3" | "smolvlm":
            return Idefics3Vision(files, dtype)
        case "gemma3":
            return Gemma3Vision(files, dtype, spec)
        case "mistral3" | "llava":
            return PixtralVision(files, dtype, spec, max_tokens)
        case "internvl":
            return InternVLVision(files, dtype, spec)
    return QwenVision(files, dtype, spec, max_tokens)

"""Loading the half of a model that sees."""

from __future__ import annotations

import logging

import torch

from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.vision.encoded import Vision
from foreword.model.vision.idefics3 import Idefics3Vision

logger = logging.getLogger(__name__)


def load_vision(files: VisionFiles, dtype: torch.dtype) -> Vision | None:
    """The half of a model that sees; None without Pillow, which the model serves text without.

    Raises ModelLoadError.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        logger.warning("the model takes pictures, but Pillow is missing: run `pip install foreword[vision]`")
        return None
    return Idefics3Vision(files, dtype)

"""Pixtral and Mistral 3: a picture keeps its shape, and each row of its tokens ends with a mark."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import InvalidRequestError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision
from foreword.model.vision.parts import check_last_layer, check_width, digest_of, load_weights, loading, without_pixels

Grid = tuple[int, int]
"""Rows and columns of a picture's tokens."""


class PixtralVision(Vision):
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, max_tokens: int) -> None:
        """Read the weights. `spec`: of the language half; `max_tokens`: of one picture.

        Raises ModelLoadError for files that do not fit together.
        """
        with loading(files):
            self._processor, config, self._tower, self._projector = _parts(files, dtype)
            check_last_layer(config)
            self._merges: int | None = getattr(config, "spatial_merge_size", None)
            self._side: int = config.vision_config.patch_size * (self._merges or 1)
            longest = self._processor.size.longest_edge
            if not self._processor.do_resize or not longest or longest < self._side:
                raise ValueError(
                    f"preprocessor_config.json has do_resize={self._processor.do_resize} and longest_edge={longest}; "
                    f"only pictures are served that are resized, to at least {self._side} pixels"
                )
            self._longest = min(longest, math.isqrt(max_tokens) * self._side)
            self._processor.size = type(self._processor.size)(longest_edge=self._longest)
            check_width(self.encode(np.zeros((self._side, self._side, 3), np.uint8)), spec)
        self.token_id: int = config.image_token_id
        self.digest = digest_of(config, self._processor, dtype)

    def shape(self, height: int, width: int) -> Grid:
        """How a picture of this size is cut. Raises InvalidRequestError if nothing of a side is left."""
        if max(height, width) > self._longest * min(height, width):
            raise InvalidRequestError(
                f"a picture has {width} x {height} pixels, and is too flat for the {self._longest} pixels of a side "
                "that max_picture_tokens leaves; send a part of it"
            )
        sizes, image = sys.modules[type(self._processor).__module__], without_pixels(height, width)
        rows, columns = sizes.get_resize_output_image_size(image, self._longest, self._side, "channels_first")
        return rows // self._side, columns // self._side

    def num_rows(self, shape: Grid) -> int:
        """The number of rows of a picture that is cut so."""
        return shape[0] * shape[1]

    def text(self, shape: Grid) -> str:
        """What stands in a prompt for a picture that is cut so."""
        return "[IMG_BREAK]".join(["[IMG]" * shape[1]] * shape[0]) + "[IMG_END]"

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3]."""
        prepared = self._processor(
            [pixels], return_tensors="pt", input_data_format="channels_last", patch_size=self._side
        )
        sizes = prepared["image_sizes"]
        seen = self._tower(prepared["pixel_values"].to(self._tower.dtype), image_sizes=sizes).last_hidden_state
        rows: Tensor = self._projector(seen[0]) if self._merges is None else self._projector(seen[0], sizes)
        return rows


def _parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the projector of a model."""
    from transformers import LlavaConfig, Mistral3Config, PixtralVisionModel
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    is_llava = files.config["model_type"] == "llava"
    config = (LlavaConfig if is_llava else Mistral3Config).from_dict(dict(files.config))
    kind = config.vision_config.model_type
    if kind != "pixtral" or (is_llava and config.vision_feature_select_strategy != "full"):
        raise ValueError(f"its encoder is {kind!r}, and only pixtral with all of its rows is served")
    with torch.device("meta"):
        tower = PixtralVisionModel._from_config(config.vision_config)
        projector = (LlavaMultiModalProjector if is_llava else Mistral3MultiModalProjector)(config)
    rotary = tower.patch_positional_embedding
    tower.patch_positional_embedding = type(rotary)(tower.config)  # its numbers are in no file
    load_weights({"vision_tower": tower, "multi_modal_projector": projector}, files, dtype)
    return PixtralImageProcessorPil.from_pretrained(files.folder), config, tower, projector

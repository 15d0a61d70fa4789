"""InternVL: a picture is cut into tiles, and the whole is one more unless there is one tile."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision
from foreword.model.vision.parts import check_last_layer, check_width, digest_of, load_weights, loading

MOST_TILES = 64
Tiles = tuple[int, int]
"""Rows and columns of tiles."""


class InternVLVision(Vision):
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec) -> None:
        """Read the weights. `spec`: of the language half. Raises ModelLoadError for files that do not fit together."""
        with loading(files):
            self._processor, config, self._tower, self._projector = _parts(files, dtype)
            check_last_layer(config)
            if config.vision_feature_select_strategy != "default":
                raise ValueError(f"vision_feature_select_strategy={config.vision_feature_select_strategy!r} is unknown")
            size, own = self._processor.size, tuple(config.vision_config.image_size)
            if not self._processor.do_resize or (size.height, size.width) != own:
                raise ValueError(f"preprocessor_config.json gives tiles another size than {own[0]} x {own[1]} pixels")
            if not 1 <= self._processor.min_patches <= self._processor.max_patches <= MOST_TILES:
                raise ValueError(
                    f"preprocessor_config.json cuts pictures into {self._processor.min_patches} to "
                    f"{self._processor.max_patches} tiles; at most {MOST_TILES} are served"
                )
            self._scale: float = config.downsample_ratio
            self._tile_rows: int = config.image_seq_length
            made = self.encode(np.zeros((*own, 3), np.uint8))
            check_width(made, spec)
            if len(made) != self._tile_rows:
                raise ValueError(f"a tile becomes {len(made)} rows, and image_seq_length={self._tile_rows}")
        self.token_id: int = config.image_token_id
        self.digest = digest_of(config, self._processor, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        """How a picture of this size is cut."""
        own, module = self._processor, sys.modules[type(self._processor).__module__]
        if own.max_patches <= 1:
            return 1, 1
        size = own.size.height, own.size.width
        columns, rows = module.get_optimal_tiled_canvas((height, width), size, own.min_patches, own.max_patches)
        return rows, columns

    def num_rows(self, shape: Tiles) -> int:
        """The number of rows of a picture that is cut so."""
        num_tiles = shape[0] * shape[1]
        return (num_tiles + (num_tiles > 1)) * self._tile_rows

    def text(self, shape: Tiles) -> str:
        """What stands in a prompt for a picture that is cut so."""
        return f"<img>{'<IMG_CONTEXT>' * self.num_rows(shape)}</img>"

    def tile_rows(self, shape: Tiles) -> int:
        """The number of rows of a tile."""
        return self._tile_rows

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3], or of some of its tiles."""
        prepared = self._processor(
            [pixels], return_tensors="pt", input_data_format="channels_last", crop_to_patches=True
        )
        own = prepared["pixel_values"][tiles].to(self._tower.dtype)
        return torch.cat([self._of_tile(tile[None]) for tile in own])

    def _of_tile(self, tile: Tensor) -> Tensor:
        """The rows of one tile [1, 3, height, width]."""
        from transformers.models.internvl.modeling_internvl import InternVLModel

        seen = self._tower(pixel_values=tile).last_hidden_state[:, 1:]  # the first row stands for the whole tile
        side = round(seen.shape[1] ** 0.5)
        joined = InternVLModel.pixel_shuffle(None, seen.reshape(1, side, side, -1), self._scale)
        rows: Tensor = self._projector(joined.reshape(-1, joined.shape[-1]))
        return rows


def _parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the projector of a model."""
    from transformers import InternVLConfig, InternVLVisionModel
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

    config = InternVLConfig.from_dict(dict(files.config))
    with torch.device("meta"):
        tower, projector = InternVLVisionModel._from_config(config.vision_config), InternVLMultiModalProjector(config)
    load_weights({"vision_tower": tower, "multi_modal_projector": projector}, files, dtype)
    return GotOcr2ImageProcessorPil.from_pretrained(files.folder), config, tower, projector

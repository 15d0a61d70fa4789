"""SmolVLM and Idefics3: a picture is cut into tiles, and the whole is one more."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.vision.encoded import Vision
from foreword.model.vision.parts import digest_of, load_weights, loading, without_pixels

Tiles = tuple[int, int]
"""Rows and columns of tiles; (0, 0): the picture is not cut."""


class Idefics3Vision(Vision):
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype) -> None:
        """Read the weights. Raises ModelLoadError for files that do not fit together."""
        with loading(files):
            self._processor, config, self._tower, self._connector = _idefics3_parts(files, dtype)
            side, scale = self._processor.max_image_size["longest_edge"], config.scale_factor
            patches = side // config.vision_config.patch_size  # pixels beyond the last whole one are not seen
            if patches % scale:
                raise ValueError(
                    f"{patches} patches of a tile of {side} pixels are no multiple of scale_factor, {scale}"
                )
            self._tile_rows: int = (patches // scale) ** 2
            self._sizes = _SizesAlone(self._processor)
            shape, tiles = self.shape(side, side), self._tiles(np.zeros((side, side, 3), np.uint8))
            if len(tiles) != shape[0] * shape[1] + 1 or tiles.shape[-2:] != (side, side):
                raise ValueError(f"a picture becomes tiles {list(tiles.shape)}, which preprocessor_config.json denies")
        self.token_id: int = config.image_token_id
        self.digest = digest_of(config, self._processor, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        """How a picture of this size is cut."""
        return self._sizes.tiles(height, width)

    def num_rows(self, shape: Tiles) -> int:
        """The number of rows of a picture that is cut so."""
        return (shape[0] * shape[1] + 1) * self._tile_rows

    def text(self, shape: Tiles) -> str:
        """What stands in a prompt for a picture that is cut so."""
        tile, mark = "<image>" * self._tile_rows, "<fake_token_around_image>"
        tiles = (
            "".join(f"{mark}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(shape[1])) + "\n"
            for row in range(shape[0])
        )
        whole = f"{mark}<global-img>{tile}{mark}"
        return "".join(tiles) + (f"\n{whole}" if shape[0] else whole)

    def _tiles(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The tiles of a picture, and the whole: [tiles, 3, side, side]."""
        prepared = self._processor([[pixels]], return_tensors="pt", input_data_format="channels_last")
        found: Tensor = prepared["pixel_values"][0]
        return found

    def tile_rows(self, shape: Tiles) -> int:
        """The number of rows of a tile."""
        return self._tile_rows

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3], or of some of its tiles."""
        own = self._tiles(pixels)[tiles].to(self._connector.modality_projection.proj.weight.dtype)
        rows = [self._connector(self._tower(pixel_values=tile[None]).last_hidden_state)[0] for tile in own]
        return torch.cat(rows)


def _idefics3_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the connector of a model."""
    if files.config["model_type"] == "smolvlm":
        from transformers import SmolVLMConfig as Config
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Processor
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector as Connector
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer as Tower
    else:
        from transformers import Idefics3Config as Config
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
        from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector as Connector
        from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer as Tower
    config = Config.from_dict(dict(files.config))
    with torch.device("meta"):
        tower, connector = Tower._from_config(config.vision_config), Connector(config)
    load_weights({"vision_model": tower, "connector": connector}, files, dtype)
    return Processor.from_pretrained(files.folder), config, tower, connector


class _SizesAlone:
    """An image processor that cuts pictures without pixels: its own code says how."""

    def __init__(self, processor: Any) -> None:
        self._processor = copy.copy(processor)
        self._processor.resize = self._resized

    def tiles(self, height: int, width: int) -> Tiles:
        """Rows and columns of tiles of a picture of this size."""
        own, image = self._processor, without_pixels(height, width)
        if not own.do_image_splitting:
            return 0, 0
        if own.do_resize:
            image = own.resize(image, own.size)
        image = own.resize_for_vision_encoder(image, own.max_image_size["longest_edge"])
        _, rows, columns = own.split_images(image, own.max_image_size)
        return rows, columns

    def _resized(self, image: npt.NDArray[np.uint8], size: Any, **_: object) -> npt.NDArray[np.uint8]:
        if size.longest_edge:
            module = sys.modules[type(self._processor).__module__]
            return without_pixels(*module.get_resize_output_image_size(image, size.longest_edge))
        return without_pixels(size.height, size.width)

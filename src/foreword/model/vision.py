"""The halves of models that see: pictures to rows that enter a decoder's first layer."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import sys
import time
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import ModelLoadError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.request import Picture

Tiles = tuple[int, int]
"""Rows and columns of tiles; (0, 0): the picture is not cut."""
logger = logging.getLogger(__name__)


class Vision(Protocol):
    """The half of a model that sees."""

    token_id: int
    """The token that rows of pictures replace."""
    digest: str
    """Of all besides pixels and weights on which a picture's rows depend."""

    def shape(self, height: int, width: int) -> Any:
        """How a picture of this size is cut."""

    def num_rows(self, shape: Any) -> int:
        """The number of rows of a picture that is cut so."""

    def text(self, shape: Any) -> str:
        """What stands in a prompt for a picture that is cut so."""

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3]."""


class EncodedPictures:
    """The rows of the pictures that were shown last."""

    def __init__(self, vision: Vision, max_bytes: int) -> None:
        """`max_bytes`: most memory of kept rows; the last picture stays in any case, for its next chunk."""
        self.vision, self.max_bytes = vision, max_bytes
        self._kept: OrderedDict[tuple[str | None, str], Tensor] = OrderedDict()
        self.num_bytes = self.num_encoded = self.num_found = 0
        """Memory of kept rows; how often a picture was encoded, and how often its rows were there."""
        self.seconds = 0.0
        """Time that encoding took."""

    def rows(self, picture: Picture, salt: str | None = None) -> Tensor:
        """The rows of a picture, [rows, width]; of those kept under `salt` alone, lest time tell who else showed it."""
        key = salt, picture.digest
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self.num_found += 1
            return found
        started = time.monotonic()
        made = self.vision.encode(picture.pixels())
        assert len(made) == self.vision.num_rows(picture.shape), "the image processor cuts pictures otherwise"
        self.seconds += time.monotonic() - started
        self.num_encoded += 1
        self._kept[key] = made
        self.num_bytes += made.nbytes
        while self.num_bytes > self.max_bytes and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


class Idefics3Vision:
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype) -> None:
        """Read the weights. Raises ModelLoadError for files that do not fit together."""
        import PIL
        import transformers

        try:
            self._processor, config, self._tower, self._connector = _parts(files, dtype)
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
        except Exception as error:  # config.json and preprocessor_config.json may hold anything
            line = str(error).strip().partition("\n")[0]
            raise ModelLoadError(
                f"the picture encoder of model {str(files.folder)!r} cannot be loaded: {line}; download it again"
            ) from error
        self.token_id: int = config.image_token_id
        """The token that rows of pictures replace."""
        facts = {
            "config": config.to_dict(),
            "processor": self._processor.to_dict(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "pillow": PIL.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(dtype),
        }
        self.digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        """Of all besides pixels and weights on which a picture's rows depend."""

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

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3]."""
        tiles = self._tiles(pixels).to(self._connector.modality_projection.proj.weight.dtype)
        rows = [self._connector(self._tower(pixel_values=tile[None]).last_hidden_state)[0] for tile in tiles]
        return torch.cat(rows)


def _parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
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
        module = torch.nn.ModuleDict(
            {"vision_model": Tower._from_config(config.vision_config), "connector": Connector(config)}
        )
    module.load_state_dict({name: place.stored().to(dtype) for name, place in files.weights.items()}, assign=True)
    module.eval().requires_grad_(False)
    return Processor.from_pretrained(files.folder), config, module["vision_model"], module["connector"]


class _SizesAlone:
    """An image processor that cuts pictures without pixels: its own code says how."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._module = copy.copy(processor), sys.modules[type(processor).__module__]
        self._processor.resize = self._resized

    def tiles(self, height: int, width: int) -> Tiles:
        """Rows and columns of tiles of a picture of this size."""
        own, image = self._processor, _without_pixels(height, width)
        if not own.do_image_splitting:
            return 0, 0
        if own.do_resize:
            image = own.resize(image, own.size)
        image = own.resize_for_vision_encoder(image, own.max_image_size["longest_edge"])
        _, rows, columns = own.split_images(image, own.max_image_size)
        return rows, columns

    def _resized(self, image: npt.NDArray[np.uint8], size: Any, **_: object) -> npt.NDArray[np.uint8]:
        if size.longest_edge:
            return _without_pixels(*self._module.get_resize_output_image_size(image, size.longest_edge))
        return _without_pixels(size.height, size.width)


def _without_pixels(height: int, width: int) -> npt.NDArray[np.uint8]:
    """A picture [3, height, width] that takes no memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


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

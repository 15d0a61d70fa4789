"""The halves of models that see: pictures to rows that enter a decoder's first layer.

Encoders and image processors are transformers'. A picture's rows depend on no other picture: each is encoded alone, and
its tiles, where a family has them, one after the other. Encoded pictures are kept by the digest of what they show and
the salt of who shows them; the engine's thread alone may ask for them, so a new picture of several requests is encoded
once.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import ConfigError, ModelLoadError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.request import Picture

logger = logging.getLogger(__name__)


class Vision(Protocol):
    """The half of a model that sees."""

    token_id: int
    """The token that rows of pictures replace."""
    digest: str
    """Of all besides pixels and weights on which a picture's rows depend."""
    num_added: int
    """The number of layers after which more is added to its rows."""

    def shape(self, height: int, width: int) -> Any:
        """How a picture of this size is cut."""

    def num_rows(self, shape: Any) -> int:
        """The number of rows of a picture that is cut so."""

    def text(self, shape: Any) -> str:
        """What stands in a prompt for a picture that is cut so."""

    def grid(self, shape: Any) -> tuple[int, int] | None:
        """Rows and columns in which its tokens turn; None: they turn as text does."""

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The rows of a picture [height, width, 3]: [rows, (1 + num_added) * width]."""


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


def _load_weights(parts: Mapping[str, Any], files: VisionFiles, dtype: torch.dtype) -> None:
    """Give modules on the device "meta" their weights, named by their part first."""
    module = torch.nn.ModuleDict(parts)
    module.load_state_dict({name: place.stored().to(dtype) for name, place in files.weights.items()}, assign=True)
    module.eval().requires_grad_(False)


def _digest_of(config: Any, processor: Any, dtype: torch.dtype) -> str:
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


@contextmanager
def _loading(files: VisionFiles) -> Iterator[None]:
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


Tiles = tuple[int, int]
"""Rows and columns of tiles; (0, 0): the picture is not cut."""


class Idefics3Vision:
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype) -> None:
        """Read the weights. Raises ModelLoadError for files that do not fit together."""
        with _loading(files):
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
        """The token that rows of pictures replace."""
        self.digest = _digest_of(config, self._processor, dtype)
        """Of all besides pixels and weights on which a picture's rows depend."""
        self.num_added = 0

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

    def grid(self, shape: Tiles) -> None:
        """None: its tokens turn as text does."""

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
    _load_weights({"vision_model": tower, "connector": connector}, files, dtype)
    return Processor.from_pretrained(files.folder), config, tower, connector


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


_ENCODERS = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLVisionModel"),
}
"""`model_type` -> transformers' names of its config and of its encoder."""
_SIGN = "<|image_pad|>"
Grid = tuple[int, int]
"""Rows and columns of a picture's tokens."""


class QwenVision:
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, max_tokens: int) -> None:
        """Read the weights. `spec`: of the language half; `max_tokens`: of one picture.

        Raises ModelLoadError for files that do not fit together.
        """
        with _loading(files):
            self._processor, config, self._tower = _qwen_parts(files, dtype)
            own = config.vision_config
            self._side: int = own.patch_size * own.spatial_merge_size
            said = self._processor.patch_size, self._processor.merge_size, self._processor.temporal_patch_size
            if said != (own.patch_size, own.spatial_merge_size, own.temporal_patch_size):
                raise ValueError(f"preprocessor_config.json cuts pictures by {said}, which config.json denies")
            if not self._processor.do_resize:
                raise ValueError("preprocessor_config.json has do_resize=False, and only resized pictures are served")
            size, most = dict(self._processor.size), max_tokens * self._side**2
            if most < size["shortest_edge"]:
                least = -(-size["shortest_edge"] // self._side**2)
                raise ConfigError(f"max_picture_tokens={max_tokens} is less than the model's least, {least}; raise it")
            self._processor.size = type(self._processor.size)(
                shortest_edge=size["shortest_edge"], longest_edge=min(size["longest_edge"], most)
            )
            self.num_added = len(getattr(own, "deepstack_visual_indexes", ()))
            if self.num_added >= len(spec.layers):
                raise ValueError(
                    f"deepstack_visual_indexes has {self.num_added} entries, and the language half {len(spec.layers)} "
                    "layers, which must be more"
                )
            width = self.encode(np.zeros((self._side, self._side, 3), np.uint8)).shape[-1]
            if width != (1 + self.num_added) * spec.hidden_size:
                raise ValueError(f"pictures become rows of {width} numbers, and hidden_size is {spec.hidden_size}")
        self.token_id: int = config.image_token_id
        """The token that rows of pictures replace."""
        self.digest = _digest_of(config, self._processor, dtype)
        """Of all besides pixels and weights on which a picture's rows depend."""

    def shape(self, height: int, width: int) -> Grid:
        """How a picture of this size is cut."""
        size, module = self._processor.size, sys.modules[type(self._processor).__module__]
        resized = module.smart_resize(height, width, self._side, size["shortest_edge"], size["longest_edge"])
        return resized[0] // self._side, resized[1] // self._side

    def num_rows(self, shape: Grid) -> int:
        """The number of rows of a picture that is cut so."""
        return shape[0] * shape[1]

    def text(self, shape: Grid) -> str:
        """What stands in a prompt for a picture that is cut so."""
        return _SIGN * self.num_rows(shape)

    def grid(self, shape: Grid) -> Grid:
        """Rows and columns in which its tokens turn."""
        return shape

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The rows of a picture [height, width, 3]: [rows, (1 + num_added) * width]."""
        prepared = self._processor([pixels], return_tensors="pt", input_data_format="channels_last")
        seen = self._tower(prepared["pixel_values"].to(self._tower.dtype), grid_thw=prepared["image_grid_thw"])
        return torch.cat((seen.pooler_output, *(seen.deepstack_features if self.num_added else ())), -1)


def _qwen_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The image processor, the config and the encoder of a model."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind = files.config["model_type"]
    config_name, encoder_name = _ENCODERS[kind]
    place = f"transformers.models.{kind}"
    configs = importlib.import_module(f"{place}.configuration_{kind}")
    encoders = importlib.import_module(f"{place}.modeling_{kind}")
    config = getattr(configs, config_name).from_dict(dict(files.config))
    with torch.device("meta"):
        tower = getattr(encoders, encoder_name)._from_config(config.vision_config)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)  # its numbers are in no file
    _load_weights({"visual": tower}, files, dtype)
    return Qwen2VLImageProcessorPil.from_pretrained(files.folder), config, tower


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
    if files.config["model_type"] in ("idefics3", "smolvlm"):
        return Idefics3Vision(files, dtype)
    return QwenVision(files, dtype, spec, max_tokens)

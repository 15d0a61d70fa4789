"""The vision half of each family of models: Idefics3 and SmolVLM, Gemma 3, Pixtral and Mistral 3, InternVL, Qwen.

Encoders and image processors are transformers'. Each family says how a picture is cut, and which text stands for the
picture in prompts.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import ConfigError, InvalidRequestError, ModelLoadError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision

logger = logging.getLogger(__name__)

MOST_TILES = 64
"""The most tiles of a picture in InternVL."""
_QWEN_ENCODERS = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeVisionModel"),
}
"""`model_type` -> transformers' names of its config and of its encoder."""
_GEMMA_SIGN = "<start_of_image>"
Tiles = tuple[int, int]
"""Rows and columns of a picture's tiles, or of its tokens."""


def load_vision(files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, *, max_tokens: int) -> Vision | None:
    """Load the vision half of a model; None without Pillow: the model then serves text alone.

    `spec`: the spec of the language half; `max_tokens`: the most tokens of one picture, where the family sets no limit.
    Raises ModelLoadError, and ConfigError for a limit that is too small.
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


def load_weights(parts: Mapping[str, Any], files: VisionFiles, dtype: torch.dtype) -> None:
    """Load weights into modules on the device "meta"; each weight's name begins with its part's name."""
    module = torch.nn.ModuleDict(parts)
    module.load_state_dict({name: place.stored().to(dtype) for name, place in files.weights.items()}, assign=True)
    if unfilled := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ValueError(f"the numbers of {unfilled[0]} are in no file")
    module.eval().requires_grad_(False)


def check_last_layer(config: Any) -> None:
    """Raise ValueError unless rows come from the encoder's last layer."""
    if config.vision_feature_layer != -1:
        raise ValueError(f"config.json has vision_feature_layer={config.vision_feature_layer}, and only -1 is served")


def without_pixels(height: int, width: int) -> npt.NDArray[np.uint8]:
    """A picture [3, height, width] that takes no memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


@contextmanager
def loading(files: VisionFiles) -> Iterator[None]:
    """Turn errors of files that do not fit together into ModelLoadError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # config.json and preprocessor_config.json may hold anything
        line = str(error).strip().partition("\n")[0]
        raise ModelLoadError(
            f"the vision half of model {str(files.folder)!r} cannot be loaded: {line}; download the model again, or "
            "choose another"
        ) from error


class _Half(Vision):
    """The vision half of one model. Raises ModelLoadError for files that do not fit together."""

    _processor: Any
    """The image processor."""

    def _name(self, config: Any, dtype: torch.dtype) -> None:
        """Set the token of pictures, and a digest of all that changes a picture's rows, except pixels and weights."""
        import PIL
        import transformers

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
        self.token_id = config.image_token_id

    def _prepare(self, pictures: list[Any], **options: Any) -> Any:
        """The result of the image processor for pictures [height, width, 3]."""
        return self._processor(pictures, return_tensors="pt", input_data_format="channels_last", **options)

    def _check_rows(self, side: tuple[int, int], spec: DecoderSpec, expected: tuple[str, int] | None = None) -> None:
        """Raise ValueError unless a picture's rows have the language half's width, and their number is `expected`."""
        rows = self.encode(np.zeros((*side, 3), np.uint8))
        if rows.shape[-1] != (1 + self.num_added) * spec.hidden_size:
            raise ValueError(f"pictures become rows of {rows.shape[-1]} numbers, and hidden_size is {spec.hidden_size}")
        if expected is not None and len(rows) != expected[1]:
            raise ValueError(f"a picture becomes {len(rows)} rows, and {expected[0]}={expected[1]}")


class Idefics3Vision(_Half):
    """SmolVLM and Idefics3: a picture is cut into tiles, or not (shape (0, 0)); the whole picture is one more tile."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype) -> None:
        with loading(files):
            self._processor, config, self._tower, self._connector = _idefics3_parts(files, dtype)
            side, scale = self._processor.max_image_size["longest_edge"], config.scale_factor
            patches = side // config.vision_config.patch_size  # pixels after the last whole patch are not seen
            if patches % scale:
                raise ValueError(
                    f"{patches} patches of a tile of {side} pixels are no multiple of scale_factor, {scale}"
                )
            self._tile_rows: int = (patches // scale) ** 2
            self._sizes = copy.copy(self._processor)  # its code computes how pictures without pixels are cut
            self._sizes.resize = functools.partial(_resized, type(self._processor).__module__)
            shape, tiles = self.shape(side, side), self._tiles(np.zeros((side, side, 3), np.uint8))
            if len(tiles) != shape[0] * shape[1] + 1 or tiles.shape[-2:] != (side, side):
                raise ValueError(f"a picture becomes tiles {list(tiles.shape)}, which preprocessor_config.json denies")
        self._name(config, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        processor, image = self._sizes, without_pixels(height, width)
        if not processor.do_image_splitting:
            return 0, 0
        if processor.do_resize:
            image = processor.resize(image, processor.size)
        image = processor.resize_for_vision_encoder(image, processor.max_image_size["longest_edge"])
        _, rows, columns = processor.split_images(image, processor.max_image_size)
        return rows, columns

    def num_rows(self, shape: Tiles) -> int:
        return (shape[0] * shape[1] + 1) * self._tile_rows

    def text(self, shape: Tiles) -> str:
        tile, mark = "<image>" * self._tile_rows, "<fake_token_around_image>"
        tiles = (
            "".join(f"{mark}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(shape[1])) + "\n"
            for row in range(shape[0])
        )
        whole = f"{mark}<global-img>{tile}{mark}"
        return "".join(tiles) + (f"\n{whole}" if shape[0] else whole)

    def _tiles(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The tiles of a picture and the whole picture, [tiles, 3, side, side]."""
        tiles: Tensor = self._prepare([[pixels]])["pixel_values"][0]
        return tiles

    def tile_rows(self, shape: Tiles) -> int:
        return self._tile_rows

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        chosen = self._tiles(pixels)[tiles].to(self._connector.modality_projection.proj.weight.dtype)
        rows = [self._connector(self._tower(pixel_values=tile[None]).last_hidden_state)[0] for tile in chosen]
        return torch.cat(rows)


def _resized(module: str, image: npt.NDArray[np.uint8], size: Any, **_: object) -> npt.NDArray[np.uint8]:
    if size.longest_edge:
        return without_pixels(*sys.modules[module].get_resize_output_image_size(image, size.longest_edge))
    return without_pixels(size.height, size.width)


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


class Gemma3Vision(_Half):
    """Gemma 3: all pictures get the same size and number of tokens; the tokens of a picture see each other."""

    sees_ahead = True
    written_sign = _GEMMA_SIGN, f"\n\n{_GEMMA_SIGN}\n\n"

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec) -> None:
        with loading(files):
            self._processor, config, self._tower, self._projector = _gemma3_parts(files, dtype)
            tower, size, count = config.vision_config, self._processor.size, config.mm_tokens_per_image
            if self._processor.do_pan_and_scan:
                raise ValueError(
                    "preprocessor_config.json has do_pan_and_scan=True, and only whole pictures are served"
                )
            if not self._processor.do_resize or (size.height, size.width) != (tower.image_size, tower.image_size):
                raise ValueError(f"preprocessor_config.json gives pictures another size than {tower.image_size} pixels")
            if count < 1 or (tower.image_size // tower.patch_size) % round(count**0.5):
                raise ValueError(f"mm_tokens_per_image={count} does not divide a side of patches")
            self._num_rows: int = count
            self._check_rows((tower.image_size, tower.image_size), spec, ("mm_tokens_per_image", count))
        self._sign_id: int = config.boi_token_id
        self._name(config, dtype)

    @property
    def sign_id(self) -> int:
        return self._sign_id

    @property
    def most_whole(self) -> int:
        return self._num_rows

    def shape(self, height: int, width: int) -> None:
        return None

    def num_rows(self, shape: None) -> int:
        return self._num_rows

    def text(self, shape: None) -> str:
        return f"{_GEMMA_SIGN}{'<image_soft_token>' * self._num_rows}<end_of_image>"

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        seen = self._tower(pixel_values=self._prepare([pixels])["pixel_values"].to(self._tower.dtype)).last_hidden_state
        rows: Tensor = self._projector(seen)[0]
        return rows


def _gemma3_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the projector of a model."""
    from transformers import Gemma3Config, SiglipVisionModel
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    config = Gemma3Config.from_dict(dict(files.config))
    with torch.device("meta"):
        tower, projector = SiglipVisionModel._from_config(config.vision_config), Gemma3MultiModalProjector(config)
    places = torch.arange(tower.embeddings.num_positions)
    tower.embeddings.position_ids = places.expand((1, -1))  # no file has these positions
    load_weights({"vision_tower": tower, "multi_modal_projector": projector}, files, dtype)
    return Gemma3ImageProcessorPil.from_pretrained(files.folder), config, tower, projector


class PixtralVision(_Half):
    """Pixtral and Mistral 3: a picture keeps its aspect ratio, and each row of its tokens ends with a special token."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, max_tokens: int) -> None:
        with loading(files):
            self._processor, config, self._tower, self._projector = _pixtral_parts(files, dtype)
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
            self._check_rows((self._side, self._side), spec)
        self._name(config, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        """Raises InvalidRequestError if a side of the picture is so short that resizing would leave no pixel of it."""
        if max(height, width) > self._longest * min(height, width):
            raise InvalidRequestError(
                f"a picture has {width} x {height} pixels, and is too flat for the {self._longest} pixels of a side "
                "that max_picture_tokens leaves; send a part of it"
            )
        sizes, image = sys.modules[type(self._processor).__module__], without_pixels(height, width)
        rows, columns = sizes.get_resize_output_image_size(image, self._longest, self._side, "channels_first")
        return rows // self._side, columns // self._side

    def num_rows(self, shape: Tiles) -> int:
        return shape[0] * shape[1]

    def text(self, shape: Tiles) -> str:
        return "[IMG_BREAK]".join(["[IMG]" * shape[1]] * shape[0]) + "[IMG_END]"

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        prepared = self._prepare([pixels], patch_size=self._side)
        sizes = prepared["image_sizes"]
        seen = self._tower(prepared["pixel_values"].to(self._tower.dtype), image_sizes=sizes).last_hidden_state
        rows: Tensor = self._projector(seen[0]) if self._merges is None else self._projector(seen[0], sizes)
        return rows


def _pixtral_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
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


class InternVLVision(_Half):
    """InternVL: a picture is cut into tiles; the whole picture is one more tile, unless there is only one tile."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec) -> None:
        with loading(files):
            self._processor, config, self._tower, self._projector = _internvl_parts(files, dtype)
            check_last_layer(config)
            if config.vision_feature_select_strategy != "default":
                raise ValueError(f"vision_feature_select_strategy={config.vision_feature_select_strategy!r} is unknown")
            size, sides = self._processor.size, tuple(config.vision_config.image_size)
            if not self._processor.do_resize or (size.height, size.width) != sides:
                raise ValueError(
                    f"preprocessor_config.json gives tiles another size than {sides[0]} x {sides[1]} pixels"
                )
            if not 1 <= self._processor.min_patches <= self._processor.max_patches <= MOST_TILES:
                raise ValueError(
                    f"preprocessor_config.json cuts pictures into {self._processor.min_patches} to "
                    f"{self._processor.max_patches} tiles; at most {MOST_TILES} are served"
                )
            self._scale: float = config.downsample_ratio
            self._tile_rows: int = config.image_seq_length
            self._check_rows(sides, spec, ("image_seq_length", self._tile_rows))
        self._name(config, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        processor, module = self._processor, sys.modules[type(self._processor).__module__]
        if processor.max_patches <= 1:
            return 1, 1
        size = processor.size.height, processor.size.width
        limits = processor.min_patches, processor.max_patches
        columns, rows = module.get_optimal_tiled_canvas((height, width), size, *limits)
        return rows, columns

    def num_rows(self, shape: Tiles) -> int:
        num_tiles = shape[0] * shape[1]
        return (num_tiles + (num_tiles > 1)) * self._tile_rows

    def text(self, shape: Tiles) -> str:
        return f"<img>{'<IMG_CONTEXT>' * self.num_rows(shape)}</img>"

    def tile_rows(self, shape: Tiles) -> int:
        return self._tile_rows

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        chosen = self._prepare([pixels], crop_to_patches=True)["pixel_values"][tiles].to(self._tower.dtype)
        return torch.cat([self._of_tile(tile[None]) for tile in chosen])

    def _of_tile(self, tile: Tensor) -> Tensor:
        """The rows of one tile [1, 3, height, width]."""
        from transformers.models.internvl.modeling_internvl import InternVLModel

        seen = self._tower(pixel_values=tile).last_hidden_state[:, 1:]  # the first row stands for the whole tile
        side = round(seen.shape[1] ** 0.5)
        joined = InternVLModel.pixel_shuffle(None, seen.reshape(1, side, side, -1), self._scale)
        rows: Tensor = self._projector(joined.reshape(-1, joined.shape[-1]))
        return rows


def _internvl_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the projector of a model."""
    from transformers import InternVLConfig, InternVLVisionModel
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

    config = InternVLConfig.from_dict(dict(files.config))
    with torch.device("meta"):
        tower, projector = InternVLVisionModel._from_config(config.vision_config), InternVLMultiModalProjector(config)
    load_weights({"vision_tower": tower, "multi_modal_projector": projector}, files, dtype)
    return GotOcr2ImageProcessorPil.from_pretrained(files.folder), config, tower, projector


class QwenVision(_Half):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a picture is not cut, and its tokens are rotated by row and column."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, max_tokens: int) -> None:
        with loading(files):
            self._processor, config, self._tower = _qwen_parts(files, dtype)
            vision = config.vision_config
            self._side: int = vision.patch_size * vision.spatial_merge_size
            cuts = self._processor.patch_size, self._processor.merge_size, self._processor.temporal_patch_size
            if cuts != (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size):
                raise ValueError(f"preprocessor_config.json cuts pictures by {cuts}, which config.json denies")
            if not self._processor.do_resize:
                raise ValueError("preprocessor_config.json has do_resize=False, and only resized pictures are served")
            size, max_pixels = dict(self._processor.size), max_tokens * self._side**2
            if max_pixels < size["shortest_edge"]:
                least = -(-size["shortest_edge"] // self._side**2)
                raise ConfigError(f"max_picture_tokens={max_tokens} is less than the model's least, {least}; raise it")
            self._processor.size = type(self._processor.size)(
                shortest_edge=size["shortest_edge"], longest_edge=min(size["longest_edge"], max_pixels)
            )
            self.num_added = len(getattr(vision, "deepstack_visual_indexes", ()))
            if self.num_added >= len(spec.layers):
                raise ValueError(
                    f"deepstack_visual_indexes has {self.num_added} entries, and the language half {len(spec.layers)} "
                    "layers, which must be more"
                )
            self._check_rows((self._side, self._side), spec)
        self._name(config, dtype)

    def shape(self, height: int, width: int) -> Tiles:
        size, module = self._processor.size, sys.modules[type(self._processor).__module__]
        resized = module.smart_resize(height, width, self._side, size["shortest_edge"], size["longest_edge"])
        return resized[0] // self._side, resized[1] // self._side

    def num_rows(self, shape: Tiles) -> int:
        return shape[0] * shape[1]

    def text(self, shape: Tiles) -> str:
        return "<|image_pad|>" * self.num_rows(shape)

    def grid(self, shape: Tiles) -> Tiles:
        return shape

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        prepared = self._prepare([pixels])
        seen = self._tower(prepared["pixel_values"].to(self._tower.dtype), grid_thw=prepared["image_grid_thw"])
        return torch.cat((seen.pooler_output, *(seen.deepstack_features if self.num_added else ())), -1)


def _qwen_parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The image processor, the config and the encoder of a model."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind = files.config["model_type"]
    config_name, encoder_name = _QWEN_ENCODERS[kind]
    place = f"transformers.models.{kind}"
    configs = importlib.import_module(f"{place}.configuration_{kind}")
    encoders = importlib.import_module(f"{place}.modeling_{kind}")
    config = getattr(configs, config_name).from_dict(dict(files.config))
    with torch.device("meta"):
        tower = getattr(encoders, encoder_name)._from_config(config.vision_config)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)  # its numbers are in no file
    load_weights({"visual": tower}, files, dtype)
    return Qwen2VLImageProcessorPil.from_pretrained(files.folder), config, tower

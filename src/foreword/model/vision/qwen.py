"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a picture is seen whole, and its tokens turn by row and column."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.errors import ConfigError
from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision
from foreword.model.vision.parts import digest_of, load_weights, loading

_ENCODERS = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeVisionModel"),
}
"""`model_type` -> transformers' names of its config and of its encoder."""
_SIGN = "<|image_pad|>"
Grid = tuple[int, int]
"""Rows and columns of a picture's tokens."""


class QwenVision(Vision):
    """The half of one model that sees."""

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec, max_tokens: int) -> None:
        """Read the weights. `spec`: of the language half; `max_tokens`: of one picture.

        Raises ModelLoadError for files that do not fit together.
        """
        with loading(files):
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
        self.digest = digest_of(config, self._processor, dtype)

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

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
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
    load_weights({"visual": tower}, files, dtype)
    return Qwen2VLImageProcessorPil.from_pretrained(files.folder), config, tower

"""Gemma 3: a picture has a fixed number of tokens, which see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.model.checkpoint.picture_models import VisionFiles
from foreword.model.spec import DecoderSpec
from foreword.model.vision.encoded import Vision
from foreword.model.vision.parts import check_width, digest_of, load_weights, loading

_SIGN, _TOKEN, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Vision(Vision):
    """The half of one model that sees."""

    sees_ahead = True
    written_sign = _SIGN, f"\n\n{_SIGN}\n\n"

    def __init__(self, files: VisionFiles, dtype: torch.dtype, spec: DecoderSpec) -> None:
        """Read the weights. `spec`: of the language half. Raises ModelLoadError for files that do not fit together."""
        with loading(files):
            self._processor, config, self._tower, self._projector = _parts(files, dtype)
            own, size, count = config.vision_config, self._processor.size, config.mm_tokens_per_image
            if self._processor.do_pan_and_scan:
                raise ValueError(
                    "preprocessor_config.json has do_pan_and_scan=True, and only whole pictures are served"
                )
            if not self._processor.do_resize or (size.height, size.width) != (own.image_size, own.image_size):
                raise ValueError(f"preprocessor_config.json gives pictures another size than {own.image_size} pixels")
            if count < 1 or (own.image_size // own.patch_size) % round(count**0.5):
                raise ValueError(f"mm_tokens_per_image={count} does not divide a side of patches")
            self._num_rows: int = count
            made = self.encode(np.zeros((own.image_size, own.image_size, 3), np.uint8))
            check_width(made, spec)
            if len(made) != count:
                raise ValueError(f"a picture becomes {len(made)} rows, and mm_tokens_per_image={count}")
        self.token_id: int = config.image_token_id
        self._sign_id: int = config.boi_token_id
        self.digest = digest_of(config, self._processor, dtype)

    @property
    def sign_id(self) -> int:
        return self._sign_id

    @property
    def most_whole(self) -> int:
        return self._num_rows

    def shape(self, height: int, width: int) -> None:
        """None: all pictures are brought to one size."""

    def num_rows(self, shape: None) -> int:
        """The number of rows of a picture."""
        return self._num_rows

    def text(self, shape: None) -> str:
        """What stands in a prompt for a picture."""
        return _SIGN + _TOKEN * self._num_rows + _END

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        """The rows [rows, width] of a picture [height, width, 3]."""
        prepared = self._processor([pixels], return_tensors="pt", input_data_format="channels_last")
        seen = self._tower(pixel_values=prepared["pixel_values"].to(self._tower.dtype)).last_hidden_state
        rows: Tensor = self._projector(seen)[0]
        return rows


def _parts(files: VisionFiles, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The image processor, the config, the encoder and the projector of a model."""
    from transformers import Gemma3Config, SiglipVisionModel
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    config = Gemma3Config.from_dict(dict(files.config))
    with torch.device("meta"):
        tower, projector = SiglipVisionModel._from_config(config.vision_config), Gemma3MultiModalProjector(config)
    places = torch.arange(tower.embeddings.num_positions)
    tower.embeddings.position_ids = places.expand((1, -1))  # they are in no file
    load_weights({"vision_tower": tower, "multi_modal_projector": projector}, files, dtype)
    return Gemma3ImageProcessorPil.from_pretrained(files.folder), config, tower, projector

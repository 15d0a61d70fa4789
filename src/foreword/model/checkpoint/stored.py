"""Models of the families that foreword's own decoder computes, read from folders: config.json, and weights, each of
which is read when it is used.

transformers is not imported. Anything unusual raises UnreadableError: then transformers reads the model, or says what
is wrong with it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from foreword.config import ModelConfig
from foreword.config.sizes import format_bytes
from foreword.errors import UnsupportedModelError
from foreword.model.checkpoint.config_json import read_config, read_raw
from foreword.model.checkpoint.facts import LOADABLE, SIDE_FILES, choose_dtype, max_positions, token_ids
from foreword.model.checkpoint.gguf.tensors import gguf_places
from foreword.model.checkpoint.gguf.unfold import gguf_files
from foreword.model.checkpoint.grouped import METHODS, grouped_places
from foreword.model.checkpoint.picture_models import VisionFiles, parted
from foreword.model.checkpoint.tensors import Place, StoredPlace, StoredTensors, UnreadableError, safetensors_places
from foreword.model.cpu.coded_product import HAS_INSTRUCTIONS
from foreword.model.cpu.product import can_multiply
from foreword.model.machine import total_cpu_bytes
from foreword.model.spec import DecoderSpec

logger = logging.getLogger(__name__)
EXPANDED_SHARE = 0.5
"""Weights in codes are expanded only if they then take at most this share of the memory."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A folder's config and weights."""

    values: Mapping[str, Any]
    """The config's fields, completed."""
    weights: StoredTensors
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    """The length of the longest sequence that the model accepts."""
    eos_token_ids: frozenset[int]
    vision: VisionFiles | None = None
    """The files of the half that sees pictures; None if the model has no such half."""


def read_stored(options: ModelConfig) -> StoredModel:
    """Open the model in a folder on this machine, to run it on the CPU. Raises UnreadableError."""
    folder, device = Path(options.model), torch.device("cpu")
    if options.device != "cpu":
        raise UnreadableError(f"device={options.device!r}")
    if not folder.is_dir() or options.revision is not None:
        raise UnreadableError("models of the hub")
    values = read_config(folder)
    if values.pop("auto_map", None) and options.trust_remote_code:
        raise UnreadableError("code of the checkpoint's own")
    quantized = values.get("quantization_config")
    is_grouped = isinstance(quantized, Mapping) and quantized.get("quant_method") in METHODS
    special = ["compression_config"] if values.get("compression_config") is not None else []
    special += ["quantization_config"] if quantized is not None and not is_grouped else []
    special += [
        name for name in ("adapter_config.json", *(() if is_grouped else SIDE_FILES)) if (folder / name).exists()
    ]
    if special:
        raise UnreadableError(special[0])
    files = gguf_files(folder)
    plain: dict[str, Place] = {}
    vision = None
    if not files and not is_grouped:
        plain, vision = parted(folder, read_raw(folder), safetensors_places(folder))
    is_coded = bool(files) or is_grouped

    def coded_places(keeps_codes: bool) -> Mapping[str, Place]:
        return _grouped(folder, quantized, keeps_codes) if is_grouped else gguf_places(files, keeps_codes=keeps_codes)

    places: Mapping[str, Place] = coded_places(True) if is_coded else plain
    # Without instructions for bfloat16, float32 rows times 16-bit weights are several times as fast as bfloat16 rows.
    # Weights of experts in one tensor would become float32, so models with such tensors keep bfloat16.
    is_apart = all(isinstance(place, StoredPlace) and len(place.shape) < 3 for place in plain.values())
    keeps_bits = values["dtype"] == "bfloat16" and is_apart
    in_integers = options.weight_arithmetic == "int8"
    is_widened = not can_multiply() and keeps_bits
    is_widened |= is_coded and (in_integers or not can_multiply())
    if is_coded and not is_widened and options.dtype == "auto" and values["dtype"] == "bfloat16":
        is_widened = not _fits(folder, places, files or [*folder.glob("*.safetensors")])
    is_widened &= HAS_INSTRUCTIONS
    dtype = choose_dtype(options, "float32" if is_widened else values["dtype"], device)
    if dtype == torch.float16:
        raise UnreadableError("float16, which may not hold all weights")
    # With instructions for bfloat16, weights in 12 bits are multiplied faster than codes: see docs/decisions/0050.
    keeps_codes = in_integers or not (dtype == torch.bfloat16 and can_multiply())
    if is_coded and not keeps_codes:
        places = coded_places(False)
    if "embed_tokens.weight" in plain:  # a model without a head, as embedding models are stored
        places = {f"model.{name}": place for name, place in plain.items()}
        values = {**values, "tie_word_embeddings": True}
    weights = StoredTensors(str(folder), _of_layers(places, values), dtype, in_integers=in_integers)
    longest = max_positions(SimpleNamespace(**values))
    return StoredModel(values, weights, dtype, device, longest, _ends(folder, values), vision)


def _fits(folder: Path, places: Mapping[str, Place], files: Sequence[Path]) -> bool:
    """Whether weights in 12 bits each take at most `EXPANDED_SHARE` of the memory, or at most the bytes of their files.

    If the weights take more, a log line says so. The limit is a share of all memory, not of the free memory: otherwise
    the type of rows, and so the bits of answers, would depend on the free memory.
    """
    num_bytes, total = 3 * sum(math.prod(place.shape) for place in places.values()) // 2, total_cpu_bytes()
    if num_bytes <= max(EXPANDED_SHARE * total, sum(path.stat().st_size for path in files)):
        return True
    logger.info(
        "the weights of %s stay in their codes: expanded, they would take %s of %s; dtype=bfloat16 expands them, for "
        "faster prompts",
        folder.name, format_bytes(num_bytes), format_bytes(total),
    )  # fmt: skip
    return False


def _of_layers(places: Mapping[str, Place], values: Mapping[str, Any]) -> Mapping[str, Place]:
    """All places except those of layers for multi-token prediction. Such layers come last, if the config counts any."""
    if not values.get("num_nextn_predict_layers"):
        return places
    numbers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in places}
    count = values["num_hidden_layers"]
    return {name: place for name, place in places.items() if (at := numbers[name]) is None or int(at[1]) < count}


def quantized_as(folder: Path) -> str | None:
    """The quant_method of a folder, if foreword reads weights of this method and transformers does not; else None."""
    try:
        method = read_raw(folder)["quantization_config"]["quant_method"]
    except (UnreadableError, TypeError, LookupError):
        return None
    return method if method in METHODS and method not in LOADABLE else None


def _grouped(folder: Path, config: Any, keeps_codes: bool) -> dict[str, Place]:
    """A quantized folder's weights.

    Raises UnsupportedModelError, or UnreadableError if transformers may read the folder.
    """
    try:
        return grouped_places(safetensors_places(folder, quantized=True), config, keeps_codes=keeps_codes)
    except (UnreadableError, ValueError, TypeError, KeyError, AttributeError) as error:
        if config["quant_method"] in LOADABLE:
            raise UnreadableError(f"weights in {LOADABLE[config['quant_method']]} ({error})") from error
        raise UnsupportedModelError(
            f"the weights of model {str(folder)!r} are quantized as {config['quant_method']!r}, which foreword does "
            f"not read in this form: {error}; choose another checkpoint of the model"
        ) from error


def check_shapes(spec: DecoderSpec, weights: StoredTensors) -> None:
    """Raise UnreadableError for a weight that does not fit the spec."""
    must, may = spec.weights()
    shapes = must | may
    for name in weights:
        if weights.shape(name) != shapes[name]:
            raise UnreadableError(f"{name} of shape {weights.shape(name)}, where {shapes[name]} is expected")


def _ends(folder: Path, values: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end answers, from generation_config.json, else from config.json."""
    path = folder / "generation_config.json"
    try:
        token = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        return token_ids(values["eos_token_id"] if token is None else token)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UnreadableError(f"a generation_config.json that cannot be read ({error})") from error

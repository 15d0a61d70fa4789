"""Weights of small floats: FP8 (e4m3) with scales of blocks, and MXFP4.

Tensors, their order and their names are those of transformers 5 and of compressed-tensors 0.17. Weights stay in codes
that linear layers can multiply.

    fp8                 weight e4m3 [out, in], weight_scale_inv [out / rows, in / columns], one per block
    compressed-tensors  weight e4m3 [out, in], weight_scale of the whole, of each row, or of each block
    mxfp4               NAME_blocks [experts, out, in / 32, 16], two codes a byte, the first in the low half;
                        NAME_scales [experts, out, in / 32]; rows of gate and up alternate
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.kernels.products.coded import E4M3_NAN, E4M3_SCALE, FORMATS, STEP, Bytes, Codes
from foreword.model.checkpoint.tensors import Place, StoredPlace, UnreadableError
from foreword.model.cpu.coded_product import CodedProduct, CodedRows, Weight

Config = Mapping[str, Any]
"""`quantization_config` of a config.json."""
BAND = 1 << 20
"""The number of weights that are expanded to floats at once."""
NO_NUMBER = 255
"""The exponent of MXFP4 that stands for NaN."""
_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_(blocks|scales|bias)")


@dataclass(frozen=True, slots=True)
class Float8Place:
    """The place of a weight of e4m3 and of its scales."""

    weight: StoredPlace
    scales: StoredPlace
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    keeps_codes: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, dtype: torch.dtype) -> Weight:
        outputs, inputs = self.shape
        rows, columns = self.block
        grid = -(-outputs // rows), -(-inputs // columns)
        scales = self.scales.stored().float().reshape(grid)
        if self.keeps_codes and (columns % STEP == 0 or grid[1] == 1):
            starts = torch.arange(0, inputs, STEP) // columns

            def codes(first: int, end: int) -> Codes:
                by_step = (scales[torch.arange(first, end) // rows] * E4M3_SCALE)[:, starts]
                heads = by_step.numpy().view(np.uint32)[:, :, None]
                return Codes(self._bits(first, end), heads)

            coded = CodedRows(FORMATS["E4M3"], (outputs, inputs), codes)
            if CodedProduct.can_take(coded):
                return coded
        values, band = torch.empty(outputs, inputs, dtype=dtype), max(1, BAND // max(1, inputs))
        of_columns = torch.arange(inputs) // columns
        for first in range(0, outputs, band):
            end = min(first + band, outputs)
            numbers = torch.from_numpy(self._bits(first, end)).view(torch.float8_e4m3fn).float()
            values[first:end] = numbers * scales[torch.arange(first, end) // rows][:, of_columns]
        return values

    def _bits(self, first: int, end: int) -> Bytes:
        bits: Bytes = self.weight.rows(first, (end - first, self.shape[1])).view(torch.uint8).numpy()
        if (bits & 0x7F == E4M3_NAN).any():
            raise UnreadableError(f"weights in {self.weight.path.name} that are no numbers")
        return bits


@dataclass(frozen=True, slots=True)
class Mxfp4Place:
    """The place of a part of an expert's weight: `count` rows."""

    blocks: StoredPlace
    """[experts * rows, in / 32, 16]"""
    scales: StoredPlace
    """[experts * rows, in / 32]"""
    first: int
    step: int
    """The distance from one of the weight's rows to the next, in rows of the file."""
    count: int
    keeps_codes: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, 32 * self.blocks.shape[1]

    def read(self, dtype: torch.dtype) -> Weight:
        rows = CodedRows(FORMATS["MXFP4"], (self.count, self.shape[1]), self._codes)
        return rows if self.keeps_codes and CodedProduct.can_take(rows) else rows.plain(dtype)

    def _codes(self, first: int, end: int) -> Codes:
        start, count = self.first + first * self.step, (end - first - 1) * self.step + 1
        packed, scales = (
            place.rows(start, (count, *place.shape[1:]))[:: self.step].numpy() for place in (self.blocks, self.scales)
        )
        if (scales == NO_NUMBER).any():
            raise UnreadableError(f"weights in {self.scales.path.name} that are no numbers")
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
        return Codes(codes, np.ascontiguousarray(scales)[:, :, None])


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """The place of a part of an expert's bias: every `step`-th number from `first` on."""

    biases: StoredPlace
    """[experts, numbers]"""
    expert: int
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(range(self.first, self.biases.shape[1], self.step)),)

    def read(self, dtype: torch.dtype) -> Tensor:
        biases = self.biases.rows(self.expert, (1, self.biases.shape[1]))
        return biases[0, self.first :: self.step].to(dtype).contiguous()


def float8_places(places: Mapping[str, StoredPlace], config: Config, *, keeps_codes: bool) -> dict[str, Place]:
    """The weights of an FP8 checkpoint by their names. Raises UnreadableError if foreword cannot read it by itself."""
    is_compressed = config.get("quant_method") == "compressed-tensors"
    end = ".weight_scale" if is_compressed else ".weight_scale_inv"
    weights: dict[str, Place] = {}
    for name, place in places.items():
        if name.endswith((".input_scale", ".k_scale", ".v_scale")):
            continue  # neither activations nor KV are rounded
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            weight = places.get(name.removesuffix(end) + ".weight") if name.endswith(end) else None
            if weight is None or weight.dtype != torch.float8_e4m3fn:
                raise UnreadableError(f"a scale {name}")
        elif place.dtype != torch.float8_e4m3fn:
            weights[name] = place
        else:
            stem = name.removesuffix(".weight")
            scales = places.get(stem + end)
            if len(place.shape) != 2 or scales is None or not scales.dtype.is_floating_point:
                raise UnreadableError(f"{name} of e4m3 without {stem}{end}")
            weights[name] = Float8Place(place, scales, _block(name, place.shape, scales.shape, config), keeps_codes)
    return weights


def _block(name: str, shape: tuple[int, ...], scales: tuple[int, ...], config: Config) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    size = config.get("weight_block_size")
    if config.get("quant_method") == "compressed-tensors":
        sizes = [group["weights"].get("block_structure") for group in config["config_groups"].values()]
        size = sizes[0] if len(sizes) == 1 else None
        if isinstance(size, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", size):
            size = [int(part) for part in size.split("x")]
    choices = [(shape[0], shape[1]), (1, shape[1])]
    if isinstance(size, list | tuple) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        choices.append((size[0], size[1]))
    for rows, columns in choices:
        grid = -(-shape[0] // rows), -(-shape[1] // columns)
        if scales == grid or (grid == (1, 1) and scales in ((), (1,))):
            return rows, columns
    raise UnreadableError(f"scales {scales} that do not fit {name} of {shape}")


def mxfp4_places(places: Mapping[str, StoredPlace], config: Config, *, keeps_codes: bool) -> dict[str, Place]:
    """The weights of an MXFP4 checkpoint by their names; each expert gets its own weights. Raises UnreadableError."""
    weights: dict[str, Place] = {}
    stacks: dict[tuple[str, str], dict[str, StoredPlace]] = {}
    for name, place in places.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            weights[name] = place
        else:
            stacks.setdefault((match[1], match[2]), {})[match[3]] = place
    for (stem, kind), parts in stacks.items():
        blocks, scales, bias = (parts.get(part) for part in ("blocks", "scales", "bias"))
        if blocks is None or scales is None or len(blocks.shape) != 4 or blocks.shape[3] != 16:
            raise UnreadableError(f"{stem}.{kind}_proj without blocks of 16 bytes and scales")
        count, rows = blocks.shape[:2]
        if scales.shape != blocks.shape[:3] or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise UnreadableError(f"scales {scales.shape} that do not fit {stem}.{kind}_proj of {blocks.shape}")
        if bias is not None and bias.shape != (count, rows):
            raise UnreadableError(f"biases {bias.shape} that do not fit {stem}.{kind}_proj of {blocks.shape}")
        flat = (
            replace(blocks, shape=(count * rows, *blocks.shape[2:])),
            replace(scales, shape=(count * rows, blocks.shape[2])),
        )
        names = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
        for expert in range(count):
            for number, name in enumerate(names):
                first, step = expert * rows + number, len(names)
                prefix = f"{stem}.{expert}.{name}"
                weights[f"{prefix}.weight"] = Mxfp4Place(*flat, first, step, rows // step, keeps_codes)
                if bias is not None:
                    weights[f"{prefix}.bias"] = BiasPlace(bias, expert, number, step)
    return weights

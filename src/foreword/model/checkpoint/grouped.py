"""Checkpoints of compressed-tensors, GPTQ and AWQ: whole numbers in groups of inputs, with a scale for each group.

`small_floats.py` has checkpoints of floats.

Tensors and their order are those of compressed_tensors 0.17, and of AutoGPTQ and AutoAWQ as vLLM reads them. A weight
is scale * (code - zero), and stays in codes that linear layers can multiply. Scales keep their 16 bits, and a group of
64 or more inputs becomes groups of 32 with the same scale. Inputs that are not in the order of their groups (g_idx of
`desc_act` and `actorder`) are put into that order. Activations are not rounded, whatever the file says.

    compressed-tensors  weight_packed [out, in / n], weight_scale [out, groups], zeros packed along out; or weight int8
    GPTQ                qweight [in / n, out], scales [groups, out], qzeros [groups, out / n], each 1 less than the zero
    AWQ                 qweight [in, out / n], scales [groups, out], qzeros [groups, out / n]; nibbles 0 2 4 6 1 3 5 7

n codes lie in an int32, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foreword.kernels.products.coded import FORMATS, STEP, Bytes, Codes
from foreword.model.checkpoint.small_floats import Config, float8_places, mxfp4_places
from foreword.model.checkpoint.tensors import PLAIN_TYPES, Place, StoredPlace, UnreadableError
from foreword.model.cpu.coded_product import CodedProduct, CodedRows, Weight

_PARTS = frozenset(
    "qweight qzeros scales g_idx weight weight_packed weight_scale weight_shape weight_zero_point weight_g_idx".split()
)
"""Ends of the names of the tensors that together store one weight."""
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
_AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Bits of a code -> the place of each code in an int32."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GroupedPlace:
    """The places of the tensors (codes, scales and others) that store one weight."""

    shape: tuple[int, ...]
    parts: Mapping[str, StoredPlace]
    codes_of: Callable[[Tensors], tuple[Bytes, npt.NDArray[np.int64], torch.Tensor]]
    """Tensors of the parts -> codes [out, in], zeros [out, groups], scales [out, groups]."""
    keeps_codes: bool

    def read(self, dtype: torch.dtype) -> Weight:
        try:
            tensors = {name: place.stored() for name, place in self.parts.items()}
            codes, zeros, scales = self.codes_of(tensors)
            order = _order(tensors, codes.shape[1], scales.shape[1])
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise UnreadableError(f"parts that do not fit each other ({error})") from error
        if codes.shape != self.shape or zeros.shape != tuple(scales.shape) or len(scales) != len(codes):
            raise UnreadableError(f"codes {codes.shape}, zeros {zeros.shape}, scales {tuple(scales.shape)}")
        if order is not None:
            codes = np.ascontiguousarray(codes[:, order])
        rows = self._rows(codes, zeros, scales) if self.keeps_codes else None
        if rows is not None and CodedProduct.can_take(rows):
            return replace(rows, order=order)
        per_group = codes.shape[1] // scales.shape[1]
        numbers = torch.from_numpy(codes.astype(np.float32) - np.repeat(zeros.astype(np.float32), per_group, 1))
        values = (numbers * scales.float().repeat_interleave(per_group, 1)).to(dtype)
        return values if order is None else values[:, np.argsort(order)]

    def _rows(self, codes: Bytes, zeros: npt.NDArray[np.int64], scales: torch.Tensor) -> CodedRows | None:
        """The weight in a format that linear layers multiply; None if no format fits the weight."""
        per_group = codes.shape[1] // scales.shape[1]
        is_half = scales.dtype == torch.float16
        if per_group % STEP or (not is_half and scales.dtype != torch.bfloat16):
            return None
        bits = 4 if int(codes.max(initial=0)) < 16 else 8
        if (zeros == (1 << bits - 1)).all():
            name = {(4, True): "Q4_0", (8, True): "Q8_0", (4, False): "int4", (8, False): "int8"}[bits, is_half]
            codes, of_steps = codes - np.uint8(128 if bits == 8 else 0), None
        else:
            groups = codes.reshape(*zeros.shape, per_group)
            apart = groups.min(-1).astype(np.int64) - zeros, groups.max(-1).astype(np.int64) - zeros
            if zeros.min() < 0 or zeros.max() > 255 or apart[0].min() < -128 or apart[1].max() > 127:
                return None
            name = f"uint{bits} {'half' if is_half else 'bfloat16'}"
            of_steps = np.repeat(zeros.astype(np.uint8), per_group // STEP, 1)
        bits_of = scales.contiguous().view(torch.int16).numpy().view(np.uint16)
        heads = np.repeat(bits_of, per_group // STEP, 1)[:, :, None]

        def some(first: int, end: int) -> Codes:
            return Codes(codes[first:end], heads[first:end], None, None if of_steps is None else of_steps[first:end])

        return CodedRows(FORMATS[name], (codes.shape[0], codes.shape[1]), some)


def grouped_places(places: Mapping[str, StoredPlace], config: Config, *, keeps_codes: bool) -> dict[str, Place]:
    """The weights of a checkpoint by their names, from the places of its tensors and its `quantization_config`.

    `config["quant_method"]` is one of METHODS. Raises UnreadableError for a checkpoint that foreword cannot read.
    """
    empty = [name for name, place in places.items() if 0 in place.shape]
    if empty:
        raise UnreadableError(f"{empty[0]} of shape {places[empty[0]].shape}")
    weights = _read_as(config)(places, config, keeps_codes=keeps_codes)
    for name, place in weights.items():
        if isinstance(place, StoredPlace) and place.dtype not in PLAIN_TYPES:
            raise UnreadableError(f"{name} in {place.dtype}, without what a weight in it needs")
    return weights


def _read_as(config: Config) -> Callable[..., dict[str, Place]]:
    method = config.get("quant_method")
    if method == "mxfp4":
        return mxfp4_places
    if method != "fp8":
        _check(config)
    return float8_places if method == "fp8" or config.get("format") == "float-quantized" else _integer_places


def _integer_places(places: Mapping[str, StoredPlace], config: Config, *, keeps_codes: bool) -> dict[str, Place]:
    is_compressed = config["quant_method"] == "compressed-tensors"
    read, ends = (_compressed, ".weight_scale") if is_compressed else (_gptq_or_awq, ".qweight")
    weights: dict[str, Place] = dict(places)
    parts_of: dict[str, dict[str, StoredPlace]] = {
        name.removesuffix(ends): {} for name in places if name.endswith(ends)
    }
    for name, place in places.items():
        stem, _, part = name.rpartition(".")
        if stem in parts_of and part in _PARTS:
            parts_of[stem][part] = place
            del weights[name]
    for stem, parts in parts_of.items():
        shape, codes_of = read(stem, parts, config)
        weights[f"{stem}.weight"] = GroupedPlace(shape, parts, codes_of, keeps_codes)
    return weights


def _check(config: Config) -> None:
    """Raise UnreadableError if `config` describes weights that foreword cannot read by itself."""
    method = config["quant_method"]
    if method == "compressed-tensors":
        groups, kind = config.get("config_groups"), "float" if config.get("format") == "float-quantized" else "int"
        is_known = isinstance(groups, Mapping) and all(
            isinstance(group, Mapping)
            and isinstance(group.get("weights"), Mapping)
            and group["weights"].get("type") == kind
            and (kind == "int" or group["weights"].get("num_bits") == 8)
            for group in groups.values()
        )
        if config.get("format") not in ("pack-quantized", "int-quantized", "float-quantized") or not is_known:
            raise UnreadableError(f"compressed-tensors of format={config.get('format')!r}")
        for name in ("sparsity_config", "transform_config", *(("kv_cache_scheme",) if kind == "int" else ())):
            value = config.get(name)
            if value not in (None, {}) and not (isinstance(value, Mapping) and value.get("format") == "dense"):
                raise UnreadableError(f"compressed-tensors with {name}")
        return
    if config.get("bits", config.get("w_bit")) not in (4, 8):
        raise UnreadableError(f"{method} of {config.get('bits', config.get('w_bit'))!r} bits")
    if method == "gptq" and config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise UnreadableError(f"gptq with checkpoint_format={config['checkpoint_format']!r}")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise UnreadableError(f"awq with version={config['version']!r}")


# ------------------------------------------------------------------------------------------------- formats


def _unpacked(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> Bytes:
    """Unpack int32 [rows, columns] to codes [rows, n * columns]; n: the number of codes in an int32."""
    places = range(32 // bits) if order is None else order
    shifts = np.array(places, np.uint32) * np.uint32(bits)
    codes = packed.numpy().view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(packed), -1)


def _need(stem: str, parts: Mapping[str, StoredPlace], *names: str) -> list[tuple[int, ...]]:
    """The shapes of parts. They must have two dimensions: packed codes in int32, bytes in int8, scales in floats."""
    for name in names:
        if name not in parts or len(parts[name].shape) != 2:
            raise UnreadableError(f"no tensor {stem}.{name} of two dimensions")
        dtype = parts[name].dtype
        expected = torch.int8 if name == "weight" else torch.int32
        if not dtype.is_floating_point if "scale" in name else dtype != expected:
            raise UnreadableError(f"{stem}.{name} in {dtype}")
    return [parts[name].shape for name in names]


def _fit(stem: str, inputs: int, groups: int) -> None:
    if not groups or inputs % groups:
        raise UnreadableError(f"{groups} groups for {inputs} inputs of {stem}")


def _order(tensors: Tensors, inputs: int, groups: int) -> npt.NDArray[np.int64] | None:
    """The inputs in the order of their groups; None if they lie in this order. Raises UnreadableError."""
    stored = tensors.get("g_idx", tensors.get("weight_g_idx"))
    if stored is None or ("weight_g_idx" in tensors and bool((stored == -1).all())):  # the initial value
        return None
    index, in_order = stored.numpy().astype(np.int64), np.repeat(np.arange(groups), inputs // groups)
    order = np.argsort(index, kind="stable")
    if index.shape != in_order.shape or not np.array_equal(index[order], in_order):
        raise UnreadableError(f"g_idx that does not put {inputs} inputs into {groups} groups of one size")
    return None if np.array_equal(index, in_order) else order


def _gptq_or_awq(stem: str, parts: Mapping[str, StoredPlace], config: Config) -> Any:
    """GPTQ packs codes along inputs, AWQ along outputs."""
    bits, is_gptq = int(config.get("bits", config.get("w_bit"))), config["quant_method"] == "gptq"
    packed, zeros, scales = _need(stem, parts, "qweight", "qzeros", "scales")
    in_word = 32 // bits
    inputs, outputs = (packed[0] * in_word, packed[1]) if is_gptq else (packed[0], packed[1] * in_word)
    _fit(stem, inputs, scales[0])
    if zeros != (scales[0], outputs // in_word) or scales[1] != outputs:
        raise UnreadableError(f"scales {scales} and zeros {zeros} that do not fit {stem} of {(outputs, inputs)}")
    is_second = config.get("checkpoint_format", "gptq") == "gptq_v2"
    return (outputs, inputs), partial(_read_gptq, bits, is_second) if is_gptq else partial(_read_awq, bits)


def _read_gptq(bits: int, is_second: bool, tensors: Tensors) -> Any:
    codes = np.ascontiguousarray(_unpacked(tensors["qweight"].T.contiguous(), bits))
    scales = tensors["scales"].T.contiguous()
    zeros = _unpacked(tensors["qzeros"], bits).T.astype(np.int64)
    return codes, zeros if is_second else zeros + 1 & (1 << bits) - 1, scales


def _read_awq(bits: int, tensors: Tensors) -> Any:
    codes = np.ascontiguousarray(_unpacked(tensors["qweight"], bits, _AWQ_ORDER[bits]).T)
    zeros = _unpacked(tensors["qzeros"], bits, _AWQ_ORDER[bits]).T.astype(np.int64)
    return codes, zeros, tensors["scales"].T.contiguous()


def _compressed(stem: str, parts: Mapping[str, StoredPlace], config: Config) -> Any:
    if "weight" in parts:
        [shape], [scales] = _need(stem, parts, "weight"), _need(stem, parts, "weight_scale")
        bits = 8
    else:
        packed, scales = _need(stem, parts, "weight_packed", "weight_scale")
        bits = _bits_of(stem, config)
        shape = packed[0], packed[1] * 32 // bits
    _fit(stem, shape[1], scales[1])
    if scales[0] != shape[0]:
        raise UnreadableError(f"scales {scales} that do not fit {stem} of {shape}")
    return shape, partial(_read_compressed, stem, bits)


def _bits_of(stem: str, config: Config) -> int:
    """The bits of packed codes, which all groups of layers must share."""
    sizes = {group["weights"].get("num_bits") for group in config["config_groups"].values()}
    bits = sizes.pop() if len(sizes) == 1 else None
    if bits not in (4, 8):
        raise UnreadableError(f"{stem} of {bits} bits")
    return int(bits)


def _read_compressed(stem: str, bits: int, tensors: Tensors) -> Any:
    scales, packed_zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    middle = 1 << bits - 1
    if "weight" in tensors:
        codes = tensors["weight"].numpy().view(np.uint8) ^ np.uint8(128)
    else:
        codes = _unpacked(tensors["weight_packed"], bits)
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != list(codes.shape):
        raise UnreadableError(f"{stem} of shape {shape.tolist()}, whose codes are {list(codes.shape)}")
    zeros = np.full(scales.shape, middle, np.int64)
    if packed_zeros is not None and packed_zeros.dtype == torch.int32:
        zeros = _unpacked(packed_zeros.T.contiguous(), bits).T.astype(np.int64)
    elif packed_zeros is not None:
        zeros = packed_zeros.numpy().astype(np.int64) + middle
    if zeros.shape != tuple(scales.shape):
        raise UnreadableError(f"zeros {zeros.shape} that do not fit {stem}'s scales {tuple(scales.shape)}")
    return codes, zeros, scales

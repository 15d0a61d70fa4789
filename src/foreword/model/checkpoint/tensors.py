"""The tensors of safetensors files, each read when it is asked for, so that a model is never in memory twice.

A tensor is read into memory of its own, not mapped: pages of a mapped file stay in the process's memory after its
weights have been packed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreword.errors import ModelLoadError, UnsupportedModelError
from foreword.kernels.products.coded import FORMATS, Codes
from foreword.model.checkpoint.gguf.file import read_bytes
from foreword.model.cpu.coded_product import CodedProduct, CodedRows, Weight

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 5.0
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
IN_FLOAT32 = ".e_score_correction_bias"
"""End of the names of tensors that stay in float32, as in transformers: 16 bits would change the choice of experts."""
PLAIN_TYPES = frozenset(_TYPES.values())
_KEPT = {torch.bfloat16: FORMATS["BF16"], torch.float16: FORMATS["F16"]}
"""Types of numbers that linear layers read unchanged, and multiply by rows of float32."""
_PARTS = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn
}  # fmt: skip
"""Types of the parts of quantized weights."""


class WeightsLog:
    """Counts tensors as they are read, and logs their number every few seconds."""

    def __init__(self, model: str, num_tensors: int, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> None:
        self._model, self._of, self._read = model, num_tensors, 0
        self._seconds, self._last = seconds_between_lines, time.monotonic()

    def note(self) -> None:
        """Count one more tensor that has been read."""
        self._read += 1
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            logger.info(
                "%s: %.0f%% of the weights (%d of %d tensors)",
                self._model,
                100 * self._read / self._of,
                self._read,
                self._of,
                extra={"fields": {"event": "weights", "read": self._read, "of": self._of}},
            )


@contextmanager
def weights_progress(model: str, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> Iterator[None]:
    """Log the number of tensors read so far every few seconds, instead of showing transformers' progress bar."""
    from transformers.utils import logging as transformers_logging

    set_hook: Callable[[Any], Any] | None = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items: Any = args[0] if args else options.get("iterable")
        if not hasattr(items, "__iter__") or not hasattr(items, "__len__"):
            return factory(*args, **options)
        return _counted(items, WeightsLog(model, len(items), seconds_between_lines))

    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def _counted(items: Any, log: WeightsLog) -> Iterator[Any]:
    for item in items:
        yield item
        log.note()


class UnreadableError(Exception):
    """foreword does not read these files by itself; the message says why."""


class Place(Protocol):
    """The place of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    def read(self, dtype: torch.dtype) -> Weight:
        """The tensor in memory of its own, or the codes of a weight. Raises OSError and UnreadableError."""


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """The place of a tensor in a safetensors file."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_weight: bool = False
    """Whether the tensor may be the weight of a linear layer."""
    keeps_float32: bool = False
    """Whether the tensor is read in float32, whatever type other tensors get."""

    def read(self, dtype: torch.dtype) -> Weight:
        """Read the tensor into memory of its own. 16-bit weights for float32 rows stay in 16 bits. Raises OSError."""
        kind = _KEPT.get(self.dtype) if dtype == torch.float32 and self.is_weight else None
        if self.keeps_float32:
            return self.stored().float()
        if kind is not None:
            coded = CodedRows(kind, (self.shape[0], self.shape[1]), self._codes)
            if CodedProduct.can_take(coded):
                return coded
        return self.stored().to(dtype)

    def stored(self) -> Tensor:
        """The tensor in the type that it has in the file. Raises OSError."""
        return self.rows(0, self.shape)

    def _codes(self, first: int, end: int) -> Codes:
        return Codes(self.rows(first, (end - first, self.shape[1])).view(torch.uint16).numpy(), None)

    def rows(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """The part of this shape [rows, ...] that begins at row `first`, in the tensor's type. Raises OSError."""
        tensor = torch.empty(shape, dtype=self.dtype)
        if tensor.numel():
            start = self.start + first * math.prod(shape[1:]) * self.dtype.itemsize
            read_bytes(self.path, start, tensor.view(-1).view(torch.uint8).numpy())
        return tensor


@dataclass(frozen=True, slots=True)
class StackedPlace:
    """The place of some outputs of one expert's weight in a tensor of all experts."""

    stack: StoredPlace
    """[experts, out, in], or [experts, in, out] if `is_turned`."""
    expert: int
    outputs: range
    is_turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, [out, in]."""
        return len(self.outputs), self.stack.shape[1 if self.is_turned else 2]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read the weight into memory of its own. Raises OSError."""
        [matrix] = self.stack.rows(self.expert, (1, *self.stack.shape[1:]))
        part: Tensor = (matrix.T if self.is_turned else matrix)[self.outputs.start : self.outputs.stop]
        return part.to(dtype).contiguous()


class StoredTensors(MutableMapping[str, Weight]):
    """A model's tensors by their names. A tensor that is looked up stays in memory; one that is popped does not."""

    def __init__(
        self, model: str, places: Mapping[str, Place], dtype: torch.dtype, *, in_integers: bool = False
    ) -> None:
        """`dtype`: the type that tensors get; `in_integers`: whether whole-number codes are multiplied in integers."""
        self._model, self._places, self._dtype, self._in_integers = model, dict(places), dtype, in_integers
        self._read: dict[str, Weight] = {}
        self._log = WeightsLog(model, len(self._places))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._places[name].shape

    def __getitem__(self, name: str) -> Weight:
        if name not in self._read:
            try:
                weight = self._places[name].read(self._dtype)
                if self._in_integers and isinstance(weight, CodedRows) and weight.kind.is_whole:
                    weight = replace(weight, in_integers=True)
                self._read[name] = weight
            except OSError as error:
                raise ModelLoadError(
                    f"the weights of model {self._model!r} cannot be read: {error}; start again"
                ) from error
            except UnreadableError as error:
                problem = f"the weights of model {self._model!r} are not read: {name}: {error}"
                raise UnsupportedModelError(problem) from error
            self._log.note()
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._read

    def __setitem__(self, name: str, tensor: Weight) -> None:
        self._read[name] = tensor

    def __delitem__(self, name: str) -> None:
        self._places.pop(name, None)
        self._read.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._read})

    def __len__(self) -> int:
        return len(self._places.keys() | self._read.keys())


def safetensors_places(folder: Path, *, quantized: bool = False) -> dict[str, StoredPlace]:
    """The tensors of a folder by their names.

    `quantized`: tensors of integers and float8, the parts of quantized weights, are read too. Raises UnreadableError.
    """
    types = {**_TYPES, **(_PARTS if quantized else {})}
    try:
        return {name: place for path in _files(folder) for name, place in _places(path, types).items()}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UnreadableError(f"weights that cannot be read ({error})") from error


def _files(folder: Path) -> list[Path]:
    """The files in which transformers would look for weights first."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    names = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def check_complete(folder: Path) -> None:
    """Raise ModelLoadError if a file of weights, or a tensor that the index names, is missing or cannot be read."""
    try:
        names = set[str]()
        for path in _files(folder):
            with safe_open(path, framework="np") as file:  # checks the header and the size
                names |= set(file.keys())
        index = folder / "model.safetensors.index.json"
        listed = () if (folder / "model.safetensors").is_file() else json.loads(index.read_bytes())["weight_map"]
        lacking = sorted(set(listed) - names)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise ModelLoadError(
            f"the weights in {str(folder)!r} are not complete ({error}); download them again"
        ) from error
    if lacking:
        raise ModelLoadError(f"the weights in {str(folder)!r} lack {lacking[0]!r}; download them again")


def places_in(path: Path) -> dict[str, StoredPlace]:
    """The tensors of one file of plain numbers by their names. Raises UnreadableError."""
    try:
        return _places(path, _TYPES)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UnreadableError(str(error)) from error


def _places(path: Path, types: Mapping[str, torch.dtype]) -> dict[str, StoredPlace]:
    with safe_open(path, framework="np") as file:  # checks the header
        if (file.metadata() or {}).get("format") != "pt":
            raise ValueError(f"{path.name} does not say that it is PyTorch's")
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header: dict[str, Any] = json.loads(raw.read(length))
        num_bytes = os.fstat(raw.fileno()).st_size
    places = {}
    for name, entry in header.items():
        if name == "__metadata__" or name.endswith("rotary_emb.inv_freq"):  # computed from the config
            continue
        if entry["dtype"] not in types:
            raise ValueError(f"{name} is of type {entry['dtype']}")
        start, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
        is_weight = name.endswith(".weight") and len(shape) == 2
        place = StoredPlace(path, start, types[entry["dtype"]], shape, is_weight, name.endswith(IN_FLOAT32))
        if place.start + math.prod(place.shape) * place.dtype.itemsize > num_bytes:
            raise ValueError(f"{path.name} is truncated")
        places[name] = place
    return places

"""Prompt embeddings: rows that callers give, which enter a decoder's first layer in place of tokens' embeddings.

Embeddings come as arrays, as raw little-endian values with their shape, or as safetensors of one tensor: never as
pickles, which run code, nor by torch.load, whose sparse tensors can write outside their memory (CVE-2025-62164).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.cache import KeyedSpan
from foreword.errors import InvalidRequestError
from foreword.request import HeldBytes

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_HEADER_BYTES = 2**14
"""The longest header of a safetensors file."""


class PromptEmbeds:
    """The rows of one prompt's beginning, in the model's type."""

    def __init__(self, values: Tensor, block_size: int) -> None:
        """`values`: [rows, width], which nobody changes."""
        self.values = values
        self.spans = tuple(_spans(values, block_size))
        """The part of block keys that identifies the rows of `values`. Prompts with equal first rows share blocks."""

    def __len__(self) -> int:
        return len(self.values)


def _spans(values: Tensor, block_size: int) -> Iterator[KeyedSpan]:
    for start in range(0, len(values), block_size):
        rows = values[start : start + block_size]
        digest = hashlib.sha256(f"prompt embeddings {rows.dtype} {list(rows.shape)}\n".encode())
        digest.update(rows.view(torch.uint8).numpy().tobytes())
        yield KeyedSpan("media", digest.hexdigest(), start, len(rows))


class EmbedsReader:
    """Reads prompt embeddings for one model. Any thread may call it."""

    def __init__(self, dtype: torch.dtype, width: int, max_rows: int, block_size: int) -> None:
        """`dtype`, `width`: type and width of rows; `max_rows`: most rows of a prompt; `block_size`: rows per block."""
        self._dtype, self._width, self._max_rows, self._block_size = dtype, width, max_rows, block_size
        self.held = HeldBytes()
        """The embeddings that requests hold."""

    def read(self, source: Any) -> PromptEmbeds:
        """The embeddings of an array or a tensor [rows, width]. Raises InvalidRequestError.

        A source that is PromptEmbeds already is returned as it is.
        """
        if isinstance(source, PromptEmbeds):
            return source
        if not isinstance(source, Tensor):
            try:
                source = torch.from_numpy(np.array(source))
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(
                    f"prompt_embeds is a {type(source).__name__}; give an array or a tensor [tokens, {self._width}]"
                ) from error
        if source.layout != torch.strided or source.dtype not in _TYPES.values():
            raise InvalidRequestError(f"prompt_embeds has the type {source.dtype}; give {', '.join(_TYPES)}")
        self._check(tuple(source.shape))
        values = source.detach().to("cpu", self._dtype, copy=True).contiguous()
        if not values.isfinite().all():
            raise InvalidRequestError(f"prompt_embeds has NaN, or numbers that {self._dtype} cannot hold; give others")
        embeds = PromptEmbeds(values, self._block_size)
        self.held.hold(embeds, values.nbytes)
        return embeds

    def read_raw(self, data: bytes | memoryview, shape: Sequence[int], dtype: str) -> PromptEmbeds:
        """The embeddings in little-endian values, row by row. Raises InvalidRequestError."""
        self._check(tuple(shape))
        kind = _TYPES[dtype]
        if len(data) != shape[0] * shape[1] * kind.itemsize:
            raise InvalidRequestError(
                f"prompt_embeds has {len(data)} bytes; a shape of {list(shape)} in {dtype} has "
                f"{shape[0] * shape[1] * kind.itemsize}, send them all"
            )
        return self.read(torch.frombuffer(bytearray(data), dtype=kind).view(*shape))

    def read_safetensors(self, data: bytes) -> PromptEmbeds:
        """The embeddings in a file of one tensor. Raises InvalidRequestError."""
        length = int.from_bytes(data[:8], "little")
        values = memoryview(data)[8 + length :] if length <= MAX_HEADER_BYTES else memoryview(b"")
        try:
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes, and at most {MAX_HEADER_BYTES} are read")
            header = json.loads(data[8 : 8 + length])
            tensors = [value for name, value in header.items() if name != "__metadata__"]
            if len(tensors) != 1:
                raise ValueError(f"it has {len(tensors)} tensors")
            shape, dtype = tensors[0]["shape"], _SAFETENSORS_TYPES[tensors[0]["dtype"]]
            if tensors[0]["data_offsets"] != [0, len(values)] or not all(type(size) is int for size in shape):
                raise ValueError("its header does not fit its length")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequestError(
                f"prompt_embeds is no safetensors file of one tensor ({error!s:.100}); send a whole one of "
                f"{', '.join(_SAFETENSORS_TYPES)}"
            ) from error
        return self.read_raw(values, shape, dtype)

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != self._width or not 1 <= shape[0] <= self._max_rows:
            raise InvalidRequestError(
                f"prompt_embeds has the shape {list(shape)!s:.80}; give [tokens, {self._width}], of 1 to "
                f"{self._max_rows} tokens"
            )

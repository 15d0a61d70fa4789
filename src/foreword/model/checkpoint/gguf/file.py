"""A GGUF file on a memory map: its metadata and where its tensors lie (ggml's `docs/gguf.md`, versions 2 and 3).

    header     "GGUF", version u32, number of tensors u64, number of keys u64
    keys       name, type u32, value; a text is its length u64 and its bytes; an array is type u32, length u64, values
    tensors    name, number of dimensions u32, dimensions u64 (the length of a row first), type u32, offset u64
    data       from the next multiple of `general.alignment` (32), each tensor at its offset from there

Files come from strangers. Each count is compared with the bytes that are left before anything of its size is made, so
that a lie costs neither memory nor time, and every fault is an UnsoundGgufError that says where.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelLoadError
from foreword.kernels.products.coded import Bytes, Floats
from foreword.model.checkpoint.gguf.blocks import BLOCKS, Blocks

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_DIMENSIONS, LONGEST_NAME, DEEPEST = 4, 1 << 12, 4
MOST_SPLITS = 1000
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Type of a value -> numpy's name of it. Beside them 7 is a truth value of one byte, 8 a text, 9 an array."""


class UnsoundGgufError(ModelLoadError):
    """A GGUF file is damaged, or is none."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as it lies in its file."""

    name: str
    shape: tuple[int, ...]
    """As of a row-major array: the length of a row last."""
    blocks: Blocks
    path: Path
    start: int
    """Its first byte in the file."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.blocks.num_values * self.blocks.num_bytes

    def rows(self, first: int, end: int) -> Bytes:
        """The bytes [rows, bytes of a row] of some rows, read from the file. Raises OSError."""
        found = np.empty((end - first, self.row_bytes), np.uint8)
        memory = memoryview(found.reshape(-1))  # type: ignore[arg-type]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + first * self.row_bytes)
            while memory:
                num_read = file.readinto(memory)
                if not num_read:
                    raise OSError(f"{self.path.name} ended early")
                memory = memory[num_read:]
        return found

    def values(self, first: int = 0, end: int | None = None) -> Floats:
        """The values [rows, length of a row] of some rows in float32. Raises OSError."""
        rows = self.rows(first, self.num_rows if end is None else end)
        return self.blocks.expand(rows.reshape(-1, self.blocks.num_bytes)).reshape(-1, self.shape[-1])


class _Cursor:
    """Reads values one after the other, none beyond the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self.at = 0

    def __len__(self) -> int:
        return len(self._data)

    def fault(self, what: str) -> UnsoundGgufError:
        return UnsoundGgufError(f"{self._path.name} is no sound GGUF file: {what} at byte {self.at}; download it again")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > len(self._data) - self.at:
            raise self.fault(f"{what} of {num_bytes} bytes reaches beyond the end")
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, longest: int | None = None) -> str:
        length = self.number("<Q", what)
        if longest is not None and length > longest:
            raise self.fault(f"{what} of {length} bytes")
        return self.take(length, what).decode("utf-8", "replace")

    def _texts(self, count: int, what: str) -> list[str]:
        """As `text` does `count` times: vocabularies have 300,000."""
        found, data, length_at = [], self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.at + 8 > len(data):
                raise self.fault(f"{what} reaches beyond the end")
            start = self.at + 8
            end = start + length_at(data, self.at)[0]
            if end > len(data):
                raise self.fault(f"{what} reaches beyond the end")
            found.append(data[start:end].decode("utf-8", "replace"))
            self.at = end
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A value of metadata. Numbers of an array are a numpy array, texts a list."""
        if kind in _NUMBERS:
            [number] = np.frombuffer(self.take(np.dtype(_NUMBERS[kind]).itemsize, what), _NUMBERS[kind])
            return float(str(number)) if kind == 6 else number.item()  # 1e-06, not 9.99999997e-07
        if kind == 7:
            return self.number("<B", what) != 0
        if kind == 8:
            return self.text(what)
        if kind != 9:
            raise self.fault(f"{what} of the unknown type {kind}")
        of_kind, length = self.number("<I", what), self.number("<Q", what)
        if of_kind in _NUMBERS:
            size = np.dtype(_NUMBERS[of_kind]).itemsize
            return np.frombuffer(self.take(length * size, what), _NUMBERS[of_kind])
        least = {7: 1, 8: 8, 9: 12}.get(of_kind)
        if least is None or depth == DEEPEST:
            raise self.fault(f"{what} with values of the unknown type {of_kind}")
        if length * least > len(self._data) - self.at:
            raise self.fault(f"{what} of {length} values reaches beyond the end")
        if of_kind == 8:
            return self._texts(length, what)
        return [self.value(of_kind, what, depth + 1) for _ in range(length)]


class GgufFile:
    """One file, of which everything is known but the tensors' values."""

    def __init__(self, path: Path) -> None:
        """Read everything but the tensors' data. Raises UnsoundGgufError, or ModelLoadError for a type of blocks."""
        self.path = path
        try:
            with path.open("rb") as file:
                said = os.fstat(file.fileno())
                self.stamp = [said.st_size, said.st_mtime_ns, said.st_ctime_ns, said.st_ino, said.st_dev]
                """Changes with the file."""
                if said.st_size < 24:
                    raise UnsoundGgufError(f"{path.name} is no GGUF file: it has less than 24 bytes")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"the model file {str(path)!r} cannot be read: {error.strerror}") from error
        with data:
            self._read(_Cursor(data, path))

    def _read(self, cursor: _Cursor) -> None:
        path, num_bytes = self.path, len(cursor)
        if cursor.take(4, "magic") != MAGIC:
            raise UnsoundGgufError(f"{path.name} is no GGUF file: it does not begin with {MAGIC.decode()!r}")
        version = cursor.number("<I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "is of a machine with the other order of bytes" if swapped else f"has version {version}"
            raise UnsoundGgufError(f"{path.name} {why}; foreword reads versions 2 and 3, little-endian")
        num_tensors, num_keys = cursor.number("<Q", "number of tensors"), cursor.number("<Q", "number of keys")
        if num_keys * 13 + num_tensors * 24 > num_bytes:
            raise cursor.fault(f"{num_tensors} tensors and {num_keys} keys do not fit")
        self.metadata: Mapping[str, Any] = dict(_keys(cursor, num_keys))
        self.tensors: Mapping[str, GgufTensor] = self._tensors(cursor, num_tensors)

    def _tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        heads = [_head(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment % 8:
            raise cursor.fault(f"general.alignment is {alignment!r}, not a multiple of 8 up to 1,048,576")
        start = -(-cursor.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in sorted(heads, key=lambda head: head[3]):
            cursor.at = start + offset
            blocks = BLOCKS.get(kind)
            if blocks is None:
                raise ModelLoadError(
                    f"tensor {name!r} of {self.path.name} is of ggml's type {kind}, which foreword does not read; "
                    f"it reads {', '.join(one.name for one in BLOCKS.values())}: choose a file of one of these"
                )
            if shape[-1] % blocks.num_values:
                raise cursor.fault(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {blocks.num_values}")
            num_bytes = math.prod(shape) // blocks.num_values * blocks.num_bytes
            if offset % alignment or offset < end:
                raise cursor.fault(f"tensor {name!r} is not aligned, or lies upon another one")
            if name in found:
                raise cursor.fault(f"there are two tensors {name!r}")
            end = offset + num_bytes
            if start + end > len(cursor):
                raise cursor.fault(f"tensor {name!r} of {num_bytes} bytes reaches beyond the end")
            found[name] = GgufTensor(name, shape, blocks, self.path, start + offset)
        return found


def _keys(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    names = set()
    for _ in range(count):
        name = cursor.text("name of a key", LONGEST_NAME)
        if name in names:
            raise cursor.fault(f"there are two keys {name!r}")
        names.add(name)
        yield name, cursor.value(cursor.number("<I", f"type of {name!r}"), name)


def _head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name = cursor.text("name of a tensor", LONGEST_NAME)
    num_dimensions = cursor.number("<I", f"dimensions of {name!r}")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise cursor.fault(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("<Q", f"shape of {name!r}") for _ in range(num_dimensions))[::-1]
    if not all(shape):
        raise cursor.fault(f"tensor {name!r} of shape {shape} is empty")
    return name, shape, cursor.number("<I", f"type of {name!r}"), cursor.number("<Q", f"offset of {name!r}")


def open_gguf(path: Path) -> list[GgufFile]:
    """The file, or all files of a model that was split, in order. Raises UnsoundGgufError or ModelLoadError."""
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return [first]
    matched = _SPLIT.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count <= MOST_SPLITS or matched is None or int(matched[3]) != count:
        raise UnsoundGgufError(f"{path.name} is one of {count} files, and is not named NAME-00001-of-{count:05}.gguf")
    files = []
    for number in range(count):
        part = path.with_name(f"{matched[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise ModelLoadError(f"{path.name} is one of {count} files, and {part.name} is not beside it")
        file = first if part == path else GgufFile(part)
        if (file.metadata.get("split.no"), file.metadata.get("split.count")) != (number, count):
            raise UnsoundGgufError(f"{part.name} says that it is another one of the {count} files; download it again")
        files.append(file)
    names = [name for file in files for name in file.tensors]
    if len(names) != len(set(names)) or len(names) != files[0].metadata.get("split.tensors.count", len(names)):
        raise UnsoundGgufError(f"the {count} files of {matched[1]} do not fit together; download them again")
    return files

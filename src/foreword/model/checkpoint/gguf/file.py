"""A GGUF file on a memory map: its metadata and where its tensors lie (ggml's `docs/gguf.md`, versions 2 and 3).

    header     "GGUF", version u32, number of tensors u64, number of keys u64
    keys       name, type u32, value; a text is its length u64 and its bytes; an array is type u32, length u64, values
    tensors    name, number of dimensions u32, dimensions u64 (the length of a row first), type u32, offset u64
    data       from the next multiple of `general.alignment` (32), each tensor at its offset from there

Files come from strangers. Each count is compared with the bytes that are left before memory of its size is taken, so a
wrong count costs neither memory nor time. Every fault is an UnsoundGgufError that says where it is.

A block of values lies within one row. `d` and `m` are its scale and offset in float16, `q` are codes. The function of
each type says in which order a block has these, and what a value is. The facts come from gguf-py's `quants.py`. Tests
compare every type with gguf-py, value by value.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import ModelLoadError
from foreword.kernels.products.coded import FORMATS, Bytes, CodeFormat, Codes, Floats

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_DIMENSIONS, LONGEST_NAME, DEEPEST = 4, 1 << 12, 4
MOST_SPLITS = 1000
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Number of a type -> numpy's name of the type. Three types have no such name: 7 is a boolean of one byte, 8 is a text,
9 is an array."""


def read_bytes(path: Path, start: int, into: Bytes) -> None:
    """Fill an array [bytes] from a file, from byte `start` on. Raises OSError."""
    memory = memoryview(into)  # type: ignore[arg-type]
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while memory:
            num_read = file.readinto(memory)
            if not num_read:
                raise OSError(f"{path.name} ended early")
            memory = memory[num_read:]


class UnsoundGgufError(ModelLoadError):
    """A file is damaged, or is not a GGUF file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file, which is not read yet."""

    name: str
    shape: tuple[int, ...]
    """The shape of a row-major array: the length of a row is last."""
    blocks: Blocks
    path: Path
    start: int
    """The tensor's first byte in the file."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.blocks.num_values * self.blocks.num_bytes

    def rows(self, first: int, end: int) -> Bytes:
        """Read the bytes [rows, bytes of a row] of the rows first <= i < end from the file. Raises OSError."""
        data = np.empty((end - first, self.row_bytes), np.uint8)
        read_bytes(self.path, self.start + first * self.row_bytes, data.reshape(-1))
        return data

    def values(self, first: int = 0, end: int | None = None) -> Floats:
        """Read the values [rows, length of a row] of the rows first <= i < end in float32. Raises OSError."""
        rows = self.rows(first, self.num_rows if end is None else end)
        return self.blocks.expand(rows.reshape(-1, self.blocks.num_bytes)).reshape(-1, self.shape[-1])


class _Cursor:
    """Reads values one after the other, never beyond the end of the file."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
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

    def _texts(self, count: int, what: str) -> _Texts:
        """Return where the next `count` texts are, without reading them."""
        start, last, length_at = self.at, len(self._data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.at > last:
                raise self.fault(f"{what} reaches beyond the end")
            length = length_at(self._data, self.at)[0]
            if length > last - self.at:
                raise self.fault(f"{what} reaches beyond the end")
            self.at += 8 + length
        return _Texts(self._path, start, self.at - start, count)

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """Read a value of metadata. An array of numbers becomes a numpy array, other arrays become lists."""
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
        if of_kind == 8 and not depth:
            return self._texts(length, what)
        return [self.value(of_kind, what, depth + 1) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class _Texts:
    """An array of texts in a file."""

    path: Path
    start: int
    num_bytes: int
    count: int

    def read(self) -> list[str]:
        """Read the texts. Raises OSError, or UnsoundGgufError if the file has changed."""
        data = np.empty(self.num_bytes, np.uint8)
        read_bytes(self.path, self.start, data)
        content, at, texts, length_at = data.tobytes(), 0, [], struct.Struct("<Q").unpack_from
        for _ in range(self.count):  # faster than a cursor: vocabularies have up to 300,000 texts
            end = at + 8 + (length_at(content, at)[0] if at <= len(content) - 8 else 0)
            if end > len(content):
                raise UnsoundGgufError(f"{self.path.name} has changed while it was read; start again")
            texts.append(content[at + 8 : end].decode("utf-8", "replace"))
            at = end
        return texts


class _Metadata(Mapping[str, Any]):
    """Values by their keys. Arrays of texts are read at each look-up: few callers need a vocabulary's 300,000 texts."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value.read() if isinstance(value, _Texts) else value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def stamp_of(status: os.stat_result) -> list[int]:
    """Numbers about a file, of which some change whenever the file changes."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


class GgufFile:
    """One file: its metadata, and where its tensors lie."""

    def __init__(self, path: Path) -> None:
        """Read all but the tensors' data. Raises UnsoundGgufError, or ModelLoadError for unknown types of blocks."""
        self.path = path
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                self.stamp = stamp_of(stat)
                if stat.st_size < 24:
                    raise UnsoundGgufError(f"{path.name} is no GGUF file: it has less than 24 bytes")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"the model file {str(path)!r} cannot be read: {error.strerror}") from error
        with data:
            self._read(_Cursor(data, path))

    def count(self, key: str, default: int) -> int:
        """An integer of the metadata. Raises UnsoundGgufError for a value of another type."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise UnsoundGgufError(f"{self.path.name} has {key}={value!r:.60}, which is not a count; download it again")
        return value

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
        self.metadata: Mapping[str, Any] = _Metadata(dict(_keys(cursor, num_keys)))
        self.tensors: Mapping[str, GgufTensor] = self._tensors(cursor, num_tensors)

    def _tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        heads = [_head(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment % 8:
            raise cursor.fault(f"general.alignment is {alignment!r}, not a multiple of 8 up to 1,048,576")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in sorted(heads, key=lambda head: head[3]):
            cursor.at = start + offset
            blocks = BLOCKS.get(kind)
            if blocks is None:
                raise ModelLoadError(
                    f"tensor {name!r} of {self.path.name} is of ggml's type {kind}, which foreword does not read; "
                    f"it reads {', '.join(form.name for form in BLOCKS.values())}: choose a file of one of these"
                )
            if shape[-1] % blocks.num_values:
                raise cursor.fault(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {blocks.num_values}")
            num_bytes = math.prod(shape) // blocks.num_values * blocks.num_bytes
            if offset % alignment or offset < end:
                raise cursor.fault(f"tensor {name!r} is not aligned, or lies upon another one")
            if name in tensors:
                raise cursor.fault(f"there are two tensors {name!r}")
            end = offset + num_bytes
            if start + end > len(cursor):
                raise cursor.fault(f"tensor {name!r} of {num_bytes} bytes reaches beyond the end")
            tensors[name] = GgufTensor(name, shape, blocks, self.path, start + offset)
        return tensors


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
    count = first.count("split.count", 1)
    if count in (0, 1):
        return [first]
    matched = _SPLIT.fullmatch(path.name)
    if not 1 < count <= MOST_SPLITS or matched is None or int(matched[3]) != count:
        raise UnsoundGgufError(f"{path.name} is one of {count} files, and is not named NAME-00001-of-{count:05}.gguf")
    files = []
    for number in range(count):
        part = path.with_name(f"{matched[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise ModelLoadError(
                f"{path.name} is one of {count} files, and {part.name} is not beside it; put all into one folder"
            )
        file = first if part == path else GgufFile(part)
        if (file.count("split.no", -1), file.count("split.count", -1)) != (number, count):
            raise UnsoundGgufError(f"{part.name} says that it is another one of the {count} files; download it again")
        files.append(file)
    names = [name for file in files for name in file.tensors]
    if len(names) != len(set(names)) or len(names) != files[0].count("split.tensors.count", len(names)):
        raise UnsoundGgufError(f"the {count} files of {matched[1]} do not fit together; download them again")
    return files


_SIGN = np.uint16(1 << 15)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A type of blocks, such as Q4_K."""

    num_values: int
    """The number of values in a block."""
    num_bytes: int
    """The number of bytes of a block."""
    kind: CodeFormat
    split: Callable[[Bytes], Codes]
    """Turns blocks [count, num_bytes] into `Codes` whose axis of outputs has one entry for each block."""

    @property
    def name(self) -> str:
        return self.kind.name

    def codes(self, rows: Bytes) -> Codes:
        """The codes of rows [rows, bytes of a row]."""
        flat = self.split(rows.reshape(-1, self.num_bytes))
        count = len(rows)
        heads = None if flat.heads is None else flat.heads.reshape(count, -1, flat.heads.shape[-1])
        integers = None if flat.integers is None else flat.integers.reshape(count, -1, flat.integers.shape[-1])
        return Codes(flat.codes.reshape(count, -1), heads, integers)

    def expand(self, blocks: Bytes) -> Floats:
        """Blocks [count, num_bytes] -> values [count, num_values]."""
        if self.name == "F32":
            return np.ascontiguousarray(blocks).view(np.float32)
        return self.codes(blocks).values(self.kind)


def _halves(blocks: Bytes, *places: int) -> npt.NDArray[np.uint16]:
    """The bits of the float16 numbers that begin at the bytes `places` of each block, [count, 1, places]."""
    halves = [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.uint16) for at in places]
    return np.concatenate(halves, axis=1)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 2 n]: the low four bits of all bytes, then the high four bits of all bytes."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _bits(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 8 n]: the bits, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _whole(b: Bytes) -> Codes:
    """Values of 16 bits: each value is its own code."""
    return Codes(np.ascontiguousarray(b).view(np.uint16), None)


def _q4_0(b: Bytes) -> Codes:
    """d; 16 bytes: code i in the low half, code i + 16 in the high half. A value is d (q - 8), or d table[q]."""
    return Codes(_nibbles(b[:, 2:]), _halves(b, 0))


def _q4_1(b: Bytes) -> Codes:
    """d, m; codes as Q4_0. A value is d q + m."""
    return Codes(_nibbles(b[:, 4:]), _halves(b, 0, 2))


def _q5_0(b: Bytes) -> Codes:
    """d; 32 fifth bits; codes as Q4_0. A value is d (q - 16)."""
    return Codes(_nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4), _halves(b, 0))


def _q5_1(b: Bytes) -> Codes:
    """d, m; 32 fifth bits; codes as Q4_0. A value is d q + m."""
    return Codes(_nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4), _halves(b, 0, 2))


def _q8_0(b: Bytes) -> Codes:
    """d; 32 signed bytes as codes. A value is d q."""
    return Codes(b[:, 2:], _halves(b, 0))


def _quarters(packed: Bytes) -> Bytes:
    """[count, 64] -> [count, 256]: from each 32 bytes, the lowest two bits of each byte, then the next two, etc."""
    halves = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters: Bytes = (halves & 3).astype(np.uint8).reshape(-1, 256)
    return quarters


def _with_minima(
    codes: npt.NDArray[Any], halves: npt.NDArray[np.uint16], scales: npt.NDArray[Any], minima: npt.NDArray[Any]
) -> Codes:
    """A value is d s q - dmin m. The offset becomes (-dmin) m."""
    halves[..., 1] ^= _SIGN
    return Codes(codes, halves, np.stack((scales, minima), axis=-1).view(np.int8))


def _q2_k(b: Bytes) -> Codes:
    """16 bytes, one per 16 values, with a scale (low half) and an offset (high half); codes of two bits; d, dmin."""
    return _with_minima(_quarters(b[:, 16:80]), _halves(b, 80, 82), b[:, :16] & 15, b[:, :16] >> 4)


def _q3_k(b: Bytes) -> Codes:
    """256 third bits; codes of two bits; 16 scales of six bits; d. A value is d (s - 32) (q - 4)."""
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    low, high = _nibbles(b[:, 96:104]), b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | high.reshape(-1, 16) << 4).view(np.int8) - 32
    return Codes(_quarters(b[:, 32:96]) | third << 2, _halves(b, 108), scales[..., None].astype(np.int8))


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[count, 12] -> eight scales and eight offsets of six bits."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, last & 15 | first >> 6 << 4), axis=1)
    return scales, np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=1)


def _pairs(packed: Bytes) -> Bytes:
    """[count, 128] -> [count, 256]: from each 32 bytes, the low four bits of each byte, then the high four bits."""
    return np.stack((packed.reshape(-1, 4, 32) & 15, packed.reshape(-1, 4, 32) >> 4), axis=2).reshape(-1, 256)


def _q4_k(b: Bytes) -> Codes:
    """d, dmin; eight scales and offsets, one per 32 values; codes of four bits."""
    return _with_minima(_pairs(b[:, 16:]), _halves(b, 0, 2), *_six_bits(b[:, 4:16]))


def _q5_k(b: Bytes) -> Codes:
    """As Q4_K, and 32 bytes before the codes have each value's fifth bit: bit j of byte l is of value 32 * j + l."""
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    return _with_minima(_pairs(b[:, 48:]) | fifth << 4, _halves(b, 0, 2), *_six_bits(b[:, 4:16]))


def _q6_k(b: Bytes) -> Codes:
    """Low four bits, then the high two; 16 signed scales, one per 16 values; d. A value is d s (q - 32)."""
    halves = b[:, :128].reshape(-1, 2, 2, 32)
    low = np.stack((halves & 15, halves >> 4), axis=2).reshape(-1, 256)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 256)
    return Codes(low | high << 4, _halves(b, 208), b[:, 192:208, None].view(np.int8))


def _iq4_xs(b: Bytes) -> Codes:
    """d; eight scales of six bits, the high two bits of all scales first; codes: 16 bytes per 32 values, as Q4_0."""
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - 32
    codes = np.stack((b[:, 8:].reshape(-1, 8, 16) & 15, b[:, 8:].reshape(-1, 8, 16) >> 4), axis=2)
    return Codes(codes.reshape(-1, 256), _halves(b, 0), scales[..., None].astype(np.int8))


def _mxfp4(b: Bytes) -> Codes:
    """One byte of exponent e; four-bit codes in the order of Q4_0. A code stands for a four-bit float f, and a value is
    2^(e - 128) * 2 f.
    """
    return Codes(_nibbles(b[:, 1:]), b[:, :1, None])


def _type(name: str, num_values: int, num_bytes: int, split: Callable[[Bytes], Codes]) -> Blocks:
    return Blocks(num_values, num_bytes, FORMATS[name], split)


BLOCKS: Mapping[int, Blocks] = {
    0: Blocks(1, 4, CodeFormat("F32", (), scale="none"), lambda b: Codes(b, None)),
    1: _type("F16", 1, 2, _whole),
    2: _type("Q4_0", 32, 18, _q4_0),
    3: _type("Q4_1", 32, 20, _q4_1),
    6: _type("Q5_0", 32, 22, _q5_0),
    7: _type("Q5_1", 32, 24, _q5_1),
    8: _type("Q8_0", 32, 34, _q8_0),
    10: _type("Q2_K", 256, 84, _q2_k),
    11: _type("Q3_K", 256, 110, _q3_k),
    12: _type("Q4_K", 256, 144, _q4_k),
    13: _type("Q5_K", 256, 176, _q5_k),
    14: _type("Q6_K", 256, 210, _q6_k),
    20: _type("IQ4_NL", 32, 18, _q4_0),
    23: _type("IQ4_XS", 256, 136, _iq4_xs),
    30: _type("BF16", 1, 2, _whole),
    39: _type("MXFP4", 32, 17, _mxfp4),
}
"""Number by which files name a type of blocks -> the type."""

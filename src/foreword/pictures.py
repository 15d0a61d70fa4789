"""Pictures: checks and decodes callers' files and images, names them by their pixels, and places them in prompts.

Any thread may call this module.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import KeyedSpan
from foreword.engine import Prompt
from foreword.errors import InvalidRequestError, PromptTooLongError, TooManyPicturesError
from foreword.request import HeldBytes, PlacedPicture
from foreword.text.conversation import MARK, PICTURES

if TYPE_CHECKING:
    from PIL.Image import Image

    from foreword.model.vision.encoded import Vision

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES = 32 * 2**20
MAX_URL = 4096
"""Most characters of an address."""
MAX_PIXELS = 2**25
"""Limit of the pixels of one picture. Without a limit, a file of a few kilobytes could hold billions of pixels."""
MAX_RATIO = 100
"""The longer side may be at most this number of times as long as the shorter side."""
MAX_SCANS = 64
"""Most scans of a JPEG. A scan may have few bytes, but it costs time for all pixels. Usual files have about ten."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker of a JPEG, except for markers inside a scan's data."""
MAX_SEGMENTS = 10_000
"""Most segments of a JPEG. Cameras and programs write about a hundred at most."""
_TURNS: Mapping[int, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF's orientation -> a `PIL.Image.Transpose` as a number, because Pillow is not imported yet."""
_ON_ITS_SIDE = range(5, 9)
"""Orientations that swap height and width."""
Pixels = npt.NDArray[np.uint8]
MOST_KNOWN = 4096
"""The most files whose digests are remembered."""
_KINDS = ("image", "image_pil", "image_url")


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture as a caller gives it: a file's bytes, or an image of Pillow that is decoded already."""

    data: Any = field(repr=False)
    url: str | None = None
    """The address from which to fetch the bytes; `data` is None until they are fetched. None: nothing to fetch."""

    def fill(self, data: bytes) -> None:
        """Set the fetched bytes, once. All holders of this object see them."""
        assert self.data is None
        object.__setattr__(self, "data", data)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the file, or of the pixels of an image of Pillow; 0 until the file is fetched."""
        if self.data is None:
            return 0
        return len(self.data) if isinstance(self.data, bytes) else 3 * self.data.width * self.data.height


class _FewReads(io.BytesIO):
    """A file that limits the number of reads by its size, because Pillow loops over small pieces in slow Python."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left = 10_000 + len(data) // (40 if data[:3] == b"GIF" else 500)  # GIFs have pieces of 255 bytes

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise _in_pieces()
        return super().read(size)


def file_of_url(url: object) -> PictureFile:
    """Read the picture in a data URL.

    An http address is only stored: the picture must be fetched from there later. Raises InvalidRequestError.
    """
    if not isinstance(url, str):
        raise InvalidRequestError(f"the URL of a picture is a {type(url).__name__}, not a text")
    scheme = url[:8].lower().partition(":")[0]
    if scheme in ("http", "https"):
        if len(url) > MAX_URL:
            raise InvalidRequestError(
                f"the URL of a picture, {url!r:.80}, has {len(url)} characters; at most {MAX_URL} are taken, send the "
                "picture's bytes as data:image/png;base64,..."
            )
        return PictureFile(None, url)
    if scheme != "data":
        raise _not_fetched(url)
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequestError(f"the data URL {url!r:.60} has no base64 data; send data:image/png;base64,...")
    return file_of_base64(text)


def file_of_base64(text: str) -> PictureFile:
    """The picture whose bytes are given in base64. Raises InvalidRequestError."""
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise _too_large(len(text) * 3 // 4)
    try:
        data = text.encode("ascii").translate(None, b" \t\r\n").rstrip(b"=")  # line ends and padding change nothing
        return PictureFile(base64.b64decode(data + b"=" * (-len(data) % 4), validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"a picture's data is not base64 ({error}); send the file's bytes in the standard alphabet, with + and /"
        ) from error


def _not_fetched(url: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the picture at {url!r:.80} is not fetched: only a server that was started with --allow-media-domain fetches "
        "pictures, by http or https; send its bytes as data:image/png;base64,..."
    )


def upright_copy(image: Image) -> PictureFile:
    """Copy and decode a caller's image of Pillow, turned upright. Raises InvalidRequestError."""
    from PIL import ImageOps

    _check_size(image.width, image.height)
    try:
        return PictureFile(ImageOps.exif_transpose(image))  # always a copy: the caller may change the image
    except Exception as error:  # decoders may raise any error
        raise _unreadable(error) from error


def size_of(file: PictureFile) -> tuple[int, int]:
    """Height and width of a picture in pixels, checked before its pixels are decoded. Raises InvalidRequestError."""
    image = _opened(file)
    return (image.width, image.height) if _orientation(file, image) in _ON_ITS_SIDE else (image.height, image.width)


def pixels_of(file: PictureFile) -> Pixels:
    """A picture's pixels [height, width, 3], upright and on white. Raises InvalidRequestError."""
    image = _opened(file)
    turn = _TURNS.get(_orientation(file, image))
    try:
        if isinstance(file.data, bytes):
            image.load()
            _check_size(image.width, image.height)  # some formats give the size twice
        rgb = _rgb(image)
        return np.asarray(rgb if turn is None else rgb.transpose(turn), np.uint8)
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders may raise any error
        raise _unreadable(error) from error


def _opened(file: PictureFile) -> Image:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InvalidRequestError("pictures need Pillow; run `pip install foreword[vision]`") from error
    if file.data is None:
        raise _not_fetched(file.url or "")
    if not isinstance(file.data, bytes):
        _check_size(file.data.width, file.data.height)
        decoded: Image.Image = file.data
        return decoded
    if len(file.data) > MAX_FILE_BYTES:
        raise _too_large(len(file.data))
    if file.data[:2] == b"\xff\xd8" and (num_scans := _num_scans(file.data)) > MAX_SCANS:
        raise InvalidRequestError(
            f"a picture's JPEG has {num_scans} scans; at most {MAX_SCANS} are taken, write it anew with fewer"
        )
    try:
        image = Image.open(_FewReads(file.data), formats=FORMATS)
        is_animated = bool(getattr(image, "is_animated", False)) and image.format != "MPO"  # MPO: a JPEG with previews
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_many_pixels("more than twice as many") from error
    except Exception as error:
        raise _unreadable(error) from error
    _check_size(image.width, image.height)
    if is_animated:
        raise InvalidRequestError("a picture is an animation; send one of its frames")
    return image


def _num_scans(data: bytes) -> int:
    """The number of scans of a JPEG, up to its end marker: phones may store a video after the marker."""
    place = num_scans = 0
    for _ in range(MAX_SEGMENTS):
        marker = _MARKER.search(data, place)
        if marker is None or data[marker.start() + 1] == 0xD9:
            return num_scans
        kind, place = data[marker.start() + 1], marker.end()
        num_scans += kind == 0xDA
        if kind not in (0x01, 0xD8):  # these have no length
            place += max(2, int.from_bytes(data[place : place + 2], "big"))
    raise _in_pieces()


def _in_pieces() -> InvalidRequestError:
    return InvalidRequestError("a picture's file is in too many small pieces; write it anew, as a plain PNG")


def _orientation(file: PictureFile, image: Image) -> int:
    """The orientation in the EXIF data before the pixels; 1 without such data."""
    if not isinstance(file.data, bytes) or "exif" not in image.info:  # a PNG's EXIF after the pixels is ignored
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # EXIF data that cannot be read is ignored
        return 1


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode in ("I", "F"):  # the value of white is not known
        kind = "float" if image.mode == "F" else "32-bit integer"
        raise InvalidRequestError(f"a picture has pixels of the type {kind}; send 8 bits for each colour")
    if image.mode in ("I;16", "I;16L", "I;16B"):
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _too_many_pixels(f"{width} x {height}")
    if not width or not height or max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidRequestError(
            f"a picture has {width} x {height} pixels; a side may be at most {MAX_RATIO} times the other one"
        )


def _too_many_pixels(size: str) -> InvalidRequestError:
    return InvalidRequestError(f"a picture has {size} pixels; at most {MAX_PIXELS} are taken, send a smaller one")


def _too_large(num_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"a picture's file has {num_bytes} bytes; at most {MAX_FILE_BYTES} are taken, send a smaller one"
    )


def _unreadable(error: Exception) -> InvalidRequestError:
    line = str(error).partition("\n")[0][:100]
    return InvalidRequestError(
        f"a picture cannot be read ({type(error).__name__}: {line}); send a whole file of {', '.join(FORMATS)}"
    )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReadPicture:
    """A picture whose size was checked and whose digest is known."""

    digest: str
    shape: Any
    file: PictureFile = field(repr=False)

    def pixels(self) -> Pixels:
        """Decode the picture again. Returns its pixels, [height, width, 3]."""
        return pixels_of(self.file)


class Placeholders(NamedTuple):
    """The tokens that stand for a picture."""

    token_ids: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    """Indices of the tokens that the picture's rows replace, in `token_ids`."""


class Pictures:
    """Reads and places pictures for one model."""

    def __init__(
        self, vision: Vision, encode: Callable[[str], Sequence[int]], *, max_pictures: int, max_tokens: int
    ) -> None:
        """`encode`: returns the tokens of a part of a text. `max_tokens`: most tokens of all pictures in a prompt."""
        self._vision, self._encode = vision, encode
        self._max_pictures, self._max_tokens = max_pictures, max_tokens
        self._digests: OrderedDict[tuple[str, bytes], tuple[str, tuple[int, int]]] = OrderedDict()
        """(Owner, digest of a file) -> (digest of the file's picture, (height, width) of the picture)."""
        self._lock = threading.Lock()
        self.held = HeldBytes()
        """The bytes of the files that requests hold."""
        self._placeholders = lru_cache(1024)(self._make_placeholders)

    def read(self, files: Sequence[PictureFile], owner: str = "") -> list[ReadPicture]:
        """Check and name pictures. All sizes and tokens are checked before the first decoding.

        The digest of a file is remembered for its `owner` only. Otherwise the time of a request would tell others that
        the file was sent before. Raises InvalidRequestError.
        """
        if len(files) > self._max_pictures:
            raise TooManyPicturesError(
                f"the prompt has {len(files)} pictures; at most {self._max_pictures} are taken (max_pictures), "
                "send fewer"
            )
        names = [
            (owner, hashlib.sha256(file.data).digest()) if isinstance(file.data, bytes) else None for file in files
        ]
        with self._lock:
            entries = [None if name is None else self._digests.get(name) for name in names]
        sizes = [size_of(file) if entry is None else entry[1] for file, entry in zip(files, entries, strict=True)]
        shapes = [self._vision.shape(*size) for size in sizes]
        num_tokens = sum(len(self._placeholders(shape).token_ids) for shape in shapes)
        if num_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"the pictures take {num_tokens} tokens; a prompt has room for {self._max_tokens}, send fewer or "
                "smaller ones",
                num_tokens,
                self._max_tokens,
            )
        read = []
        for file, name, entry, size, shape in zip(files, names, entries, sizes, shapes, strict=True):
            digest = self._digest(file, size, shape) if entry is None else entry[0]
            read.append(ReadPicture(digest, shape, file))
            self.held.hold(read[-1], file.num_bytes)
            if name is not None:
                self._note(name, digest, size)
        return read

    def shown(self, prompt: Prompt, pictures: Sequence[ReadPicture]) -> Prompt:
        """Replace each picture's placeholder token in a prompt by the picture's tokens. Raises InvalidRequestError."""
        token_ids = prompt.token_ids
        signs = np.flatnonzero(token_ids == self._vision.sign_id)
        if len(signs) != len(pictures):
            raise InvalidRequestError(
                f"the prompt has {len(pictures)} pictures, but {len(signs)} signs of pictures; the chat template must "
                "write one for each, and a text none"
            )
        if not pictures:
            return prompt
        placeholders = [self._placeholders(picture.shape) for picture in pictures]
        pieces, placed, at, length = list[npt.NDArray[np.int32]](), list[PlacedPicture](), 0, 0
        for sign, picture, tokens in zip(signs.tolist(), pictures, placeholders, strict=True):
            pieces += [token_ids[at:sign], tokens.token_ids]
            places = tokens.places + np.int32(length + sign - at)
            placed.append(PlacedPicture(picture, places, self._vision.grid(picture.shape), self._vision.sees_ahead))
            length += sign - at + len(tokens.token_ids)
            at = sign + 1
        pieces.append(token_ids[at:])
        added = np.concatenate(([0], np.cumsum([len(tokens.token_ids) - 1 for tokens in placeholders])))

        def moved(end: int) -> int:
            return end + int(added[np.searchsorted(signs, end)])

        spans = tuple(KeyedSpan("media", entry.picture.digest, entry.offset, entry.num_tokens) for entry in placed)
        return replace(
            prompt,
            token_ids=np.concatenate(pieces).astype(np.int32),
            extra_keys=replace(prompt.extra_keys, spans=spans),
            message_ends=tuple(map(moved, prompt.message_ends)),
            marks=tuple(replace(mark, end=moved(mark.end)) for mark in prompt.marks),
            pictures=tuple(placed),
        )

    def _digest(self, file: PictureFile, size: tuple[int, int], shape: Any) -> str:
        """The digest of a file's pixels and of the way in which they are prepared."""
        pixels = pixels_of(file)
        if pixels.shape[:2] != size:
            raise InvalidRequestError("a picture has another size than its file's beginning says; write the file anew")
        digest = hashlib.sha256(f"{self._vision.digest} {size[0]} x {size[1]} as {shape}\n".encode())
        digest.update(np.ascontiguousarray(pixels).data)
        return digest.hexdigest()

    def _note(self, name: tuple[str, bytes], digest: str, size: tuple[int, int]) -> None:
        """Remember the digest and size of a file's picture, by the file's owner and the digest of the file's bytes."""
        with self._lock:
            self._digests[name] = digest, size
            self._digests.move_to_end(name)
            while len(self._digests) > MOST_KNOWN:
                self._digests.popitem(last=False)

    def _make_placeholders(self, shape: Any) -> Placeholders:
        token_ids = np.array(self._encode(self._vision.text(shape)), np.int32)
        places = np.flatnonzero(token_ids == self._vision.token_id).astype(np.int32)
        if len(places) != self._vision.num_rows(shape):
            raise InvalidRequestError("the model's tokenizer has no sign for pictures, so the model takes none")
        return Placeholders(token_ids, places)


def taken_apart(messages: Sequence[Any]) -> list[Any]:
    """Replace the pictures in messages by the text `MARK`. Messages without pictures stay the same objects."""
    return [_taken_apart(message) for message in messages]


def _taken_apart(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str) or not isinstance(content, Sequence):
        return message
    files = [_file(part) for part in content if _is_picture(part)]
    if not files:
        return message
    texts = [{"type": "text", "text": MARK} if _is_picture(part) else part for part in content]
    return {**message, "content": texts, PICTURES: files}


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _file(part: Mapping[str, Any]) -> PictureFile:
    kind = part["type"]
    content = part.get(kind)
    if kind == "image_url":
        return file_of_url(content.get("url") if isinstance(content, Mapping) else content)
    return picture_file(content)


def picture_file(source: Any) -> PictureFile:
    """Read a picture from Python: an image of Pillow, a file's bytes, or a path. Raises InvalidRequestError."""
    if isinstance(source, bytes):
        return PictureFile(source)
    if isinstance(source, str | Path):
        try:
            with Path(os.path.expanduser(source)).open("rb") as file:
                return PictureFile(file.read(MAX_FILE_BYTES + 1))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"the picture {str(source)!r:.100} cannot be read: {error}") from error
    if hasattr(source, "width") and hasattr(source, "convert"):
        return upright_copy(source)
    raise InvalidRequestError(f"a picture is a {type(source).__name__}; give an image of Pillow, a path or bytes")

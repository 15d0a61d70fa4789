"""Files of pictures: checked by their headers, then decoded to RGB.

Whatever is wrong with a file raises InvalidRequestError in a line. Pillow is imported with the first picture.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 2**25
"""Of one picture: a file of a few kilobytes may hold billions."""
MAX_RATIO = 100
"""Of the longer side to the shorter one."""
MAX_SCANS = 64
"""Of a JPEG: each goes over all pixels, though it may have a few bytes. Cameras and programs write ten or so."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""In a JPEG, but for those that stand among a scan's pixels."""
MAX_SEGMENTS = 10_000
"""Of a JPEG. Cameras and programs write some hundred at most."""
_TURNS: Mapping[int, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF's orientation -> `PIL.Image.Transpose`, which is not imported yet."""
_ON_ITS_SIDE = range(5, 9)
"""Those by which height and width change places."""
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture as a caller gives it: a file's bytes, or an image of Pillow that is decoded already."""

    data: Any = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of a file; of an image, of its pixels."""
        return len(self.data) if isinstance(self.data, bytes) else 3 * self.data.width * self.data.height


class _FewReads(io.BytesIO):
    """A file that refuses more reads than its size explains: Pillow's Python loops over chunks, segments and runs."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = 10_000 + len(data) // (40 if data[:3] == b"GIF" else 500)  # a GIF has pieces of 255 bytes

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise _in_pieces()
        return super().read(size)


def file_of_url(url: object) -> PictureFile:
    """The picture in a data URL. Raises InvalidRequestError, also for places that would have to be fetched."""
    if not isinstance(url, str):
        raise InvalidRequestError(f"the URL of a picture is a {type(url).__name__}, not a text")
    scheme = url[:8].lower().partition(":")[0]
    if scheme != "data":
        raise InvalidRequestError(
            f"the picture at {url!r:.80} is not fetched, because a server must not be sent to addresses by its "
            "clients; send its bytes as data:image/png;base64,..."
        )
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequestError(f"the data URL {url!r:.60} has no base64 data; send data:image/png;base64,...")
    return file_of_base64(text)


def file_of_base64(text: str) -> PictureFile:
    """The picture whose bytes are given in base64. Raises InvalidRequestError."""
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise _too_large(len(text) * 3 // 4)
    try:
        data = text.encode("ascii").translate(None, b" \t\r\n").rstrip(b"=")  # lines and missing padding leave no doubt
        return PictureFile(base64.b64decode(data + b"=" * (-len(data) % 4), validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"a picture's data is not base64 ({error}); send the file's bytes in the standard alphabet, with + and /"
        ) from error


def upright_copy(image: Image) -> PictureFile:
    """A caller's image of Pillow, which may be a file that is not decoded yet. Raises InvalidRequestError."""
    from PIL import ImageOps

    _check_size(image.width, image.height)
    try:
        return PictureFile(ImageOps.exif_transpose(image))  # a copy in any case: the caller may draw on
    except Exception as error:  # decoders raise whatever they like
        raise _unreadable(error) from error


def size_of(file: PictureFile) -> tuple[int, int]:
    """Height and width that a picture will have, checked before anything is decoded. Raises InvalidRequestError."""
    image = _opened(file)
    return (image.width, image.height) if _orientation(file, image) in _ON_ITS_SIDE else (image.height, image.width)


def pixels_of(file: PictureFile) -> Pixels:
    """A picture's pixels [height, width, 3], upright and on white. Raises InvalidRequestError."""
    image = _opened(file)
    turn = _TURNS.get(_orientation(file, image))
    try:
        if isinstance(file.data, bytes):
            image.load()
            _check_size(image.width, image.height)  # some formats say it twice
        rgb = _rgb(image)
        return np.asarray(rgb if turn is None else rgb.transpose(turn), np.uint8)
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise _unreadable(error) from error


def _opened(file: PictureFile) -> Image:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InvalidRequestError("pictures need Pillow; run `pip install foreword[vision]`") from error
    if not isinstance(file.data, bytes):
        _check_size(file.data.width, file.data.height)
        found: Image.Image = file.data
        return found
    if len(file.data) > MAX_FILE_BYTES:
        raise _too_large(len(file.data))
    if file.data[:2] == b"\xff\xd8" and (num_scans := _num_scans(file.data)) > MAX_SCANS:
        raise InvalidRequestError(
            f"a picture's JPEG has {num_scans} scans; at most {MAX_SCANS} are taken, write it anew with fewer"
        )
    try:
        image = Image.open(_FewReads(file.data), formats=FORMATS)
        is_animated = bool(getattr(image, "is_animated", False)) and image.format != "MPO"  # a camera's JPEG, previews
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
    """The scans of a JPEG, as decoders find them: up to its end: phones put a film after it."""
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
    """How the camera was held, as EXIF says it before the pixels."""
    if not isinstance(file.data, bytes) or "exif" not in image.info:  # a PNG would be decoded to look for more
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # as if it said nothing
        return 1


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode in ("I", "F"):  # which value is white, nobody says
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

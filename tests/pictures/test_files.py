"""Files of pictures that are too large, broken or hostile: a line each, and little memory."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from foreword.errors import InvalidRequestError
from foreword.pictures import MAX_FILE_BYTES, PictureFile, file_of_url, picture_file, pixels_of, size_of
from picture_models import file_of, noise, png_of


def broken() -> Iterator[Any]:
    whole = file_of(noise(64, 48))
    yield pytest.param(b"", "cannot be read", id="empty")
    yield pytest.param(b"not a picture", "cannot be read", id="text")
    yield pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read", id="svg")
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = file_of(noise(64, 48), kind)
        yield pytest.param(data[: len(data) // 2], "cannot be read", id=f"half of a {kind}")
    yield pytest.param(whole[:-40] + b"\0" * 40, "cannot be read", id="damaged end")
    yield pytest.param(png_of(20_000, 20_000, zlib.compress(b"\0" * 1000)), "pixels", id="bomb")
    yield pytest.param(png_of(2**31 - 1, 2**31 - 1), "pixels|cannot be read", id="largest sides")
    yield pytest.param(png_of(20_000, 100), "200 times|100 times", id="long side")
    yield pytest.param(png_of(0, 10), "cannot be read|pixels", id="no side")
    frames = [noise(20, 20, seed) for seed in range(2)]
    for kind in ("GIF", "WEBP", "PNG"):
        moving = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        yield pytest.param(moving, "animation", id=f"moving {kind}")
    yield pytest.param(file_of(noise(20, 20), "TIFF"), "cannot be read", id="TIFF")
    yield pytest.param(b"\x89PNG" + b"\0" * MAX_FILE_BYTES, "bytes", id="long file")
    empty = struct.pack(">I4sI", 0, b"prIv", zlib.crc32(b"prIv"))
    jpeg = file_of(noise(20, 20).convert("L"), "JPEG", progressive=True)
    scan = jpeg.rindex(b"\xff\xda")
    yield pytest.param(jpeg[:-2] + jpeg[scan:-2] * 100 + jpeg[-2:], "scans", id="scans")
    yield pytest.param(jpeg[:2] + b"\xff\xe9\0\2" * 20_000 + jpeg[2:], "small pieces", id="empty segments")
    yield pytest.param(jpeg[:20] + b"\0" * 40_000 + jpeg[20:], "small pieces", id="junk between segments")
    yield pytest.param(whole[:33] + empty * 20_000 + whole[33:], "small pieces", id="empty chunks")
    runs = b"\1\1" * 20_000
    header = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 0, 0, 0, 1078, 40, 100, 200, 1, 8, 1, len(runs), 0, 0, 256, 0)
    yield pytest.param(header + bytes(1024) + runs, "small pieces", id="runs of a BMP")


@pytest.mark.parametrize(("data", "match"), list(broken()))
def test_a_file_that_is_no_picture_is_refused_in_a_line(data: bytes, match: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=match) as raised:
            assert size_of(PictureFile(data)) == pixels_of(PictureFile(data)).shape[:2]
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (4 << 20)
    finally:
        tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://127.0.0.1/a.png", "not fetched"),
        ("https://example.com/a.png", "--allow-media-domain"),
        ("https://example.com/" + "a" * 5000, "has 5020 characters; at most 4096"),
        ("file:///etc/passwd", "not fetched"),
        ("/etc/passwd", "not fetched"),
        ("data:image/png,abc", "no base64"),
        ("data:image/png;base64,***", "not base64"),
        ("data:image/png;base64," + "A" * (MAX_FILE_BYTES * 4 // 3 + 8), "bytes"),
        (7, "not a text"),
    ],
)
def test_only_data_urls_are_pictures(url: object, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as raised:
        size_of(file_of_url(url))
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_pixels_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray((np.arange(600, dtype=np.uint16) * 100).reshape(20, 30))
    else:
        image = noise(30, 20).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    found = pixels_of(PictureFile(file_of(image, kind)))
    assert found.shape == (20, 30, 3)
    assert found.std() > 20
    if mode == "I;16":
        assert found[..., 0].ravel().tolist() == [value * 100 >> 8 for value in range(600)]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_turned_as_pillow_turns_them_and_their_size_needs_no_pixels(kind: str) -> None:
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = file_of(noise(30, 20), kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        found = pixels_of(PictureFile(data))
        assert (found == np.asarray(upright)).all()
        assert size_of(PictureFile(data)) == found.shape[:2]
    assert size_of(PictureFile(png_of(3000, 2000, b"no pixels"))) == (2000, 3000)


def test_what_nobody_sees_is_no_part_of_a_picture() -> None:
    hidden = np.zeros((2, 8, 8, 4), np.uint8)
    hidden[1, ..., :3] = 200
    one, other = (pixels_of(PictureFile(file_of(Image.fromarray(one)))) for one in hidden)
    assert (one == other).all()
    assert (one == 255).all()


def test_base64_of_a_url_may_have_any_type() -> None:
    data = file_of(noise(20, 20), "JPEG")
    for text in (base64.b64encode(data).decode(), base64.encodebytes(data).decode()):
        assert file_of_url("DATA:image/png;BASE64," + text).data == data
        assert file_of_url("data:image/png;base64," + text.rstrip("=\n")).data == data


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {"progressive": True}), ("PNG", {}), ("GIF", {}), ("WEBP", {}), ("BMP", {})],
)
def test_large_files_of_ordinary_programs_are_read(kind: str, options: dict[str, Any]) -> None:
    assert pixels_of(PictureFile(file_of(noise(600, 500), kind, **options))).shape == (500, 600, 3)


def test_a_photograph_with_a_preview_is_a_picture() -> None:
    data = file_of(noise(40, 30), "MPO", save_all=True, append_images=[noise(8, 6, 1)])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert (pixels_of(PictureFile(data)) == pixels_of(PictureFile(file_of(noise(40, 30), "JPEG")))).all()


def test_what_lies_behind_a_photograph_or_in_its_comments_is_no_scan() -> None:
    photograph = file_of(noise(64, 48), "JPEG")
    film, comment = b"\xff\xda\0\2" * 200, b"\xff\xfe\3\x22" + b"\xff\xda" * 400
    for data in (
        photograph + film,
        photograph[:2] + comment + photograph[2:],
        photograph[:-2] + b"\xff" + photograph[-2:],
    ):
        assert np.array_equal(pixels_of(PictureFile(data)), pixels_of(PictureFile(photograph)))
    hidden = photograph[:2] + b"\xff\xfe\0\4\xff\xd9" + photograph[2:-2] + film + b"\xff\xd9"
    with pytest.raises(InvalidRequestError, match="201 scans"):
        size_of(PictureFile(hidden))


def test_images_of_pillow_are_checked_and_turned_as_files_are(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (path := tmp_path / "turned.png").write_bytes(data := file_of(noise(50, 70), "PNG", exif=exif))
    with Image.open(path) as image:
        assert (pixels_of(picture_file(image)) == pixels_of(PictureFile(data))).all()
    path.write_bytes(data[: len(data) // 2])
    with Image.open(path) as image, pytest.raises(InvalidRequestError, match="cannot be read"):
        picture_file(image)
    path.write_bytes(png_of(9000, 9000))
    with Image.open(path) as image, pytest.raises(InvalidRequestError, match="9000 x 9000 pixels"):
        picture_file(image)
    for mode in ("I", "F"):
        with pytest.raises(InvalidRequestError, match="send 8 bits"):
            pixels_of(picture_file(Image.new(mode, (9, 9), 200)))

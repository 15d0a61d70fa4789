"""Messages of `LLM.chat` with pictures: the pictures apart, and marks in their places.

Knows the parts that vLLM, OpenAI and transformers' templates name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.errors import InvalidRequestError
from foreword.pictures.files import MAX_FILE_BYTES, PictureFile, file_of_url, upright_copy
from foreword.text.picture_marks import MARK, PICTURES

_KINDS = ("image", "image_pil", "image_url")


def taken_apart(messages: Sequence[Any]) -> list[Any]:
    """Messages in which marks stand for pictures; those without pictures are the same objects."""
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
    given = part.get(kind)
    if kind == "image_url":
        return file_of_url(given.get("url") if isinstance(given, Mapping) else given)
    return picture_file(given)


def picture_file(given: Any) -> PictureFile:
    """A picture of a Python caller: an image of Pillow, bytes of a file, or a path. Raises InvalidRequestError."""
    if isinstance(given, bytes):
        return PictureFile(given)
    if isinstance(given, str | Path):
        try:
            with Path(given).expanduser().open("rb") as file:
                return PictureFile(file.read(MAX_FILE_BYTES + 1))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"the picture {str(given)!r:.100} cannot be read: {error}") from error
    if hasattr(given, "width") and hasattr(given, "convert"):
        return upright_copy(given)
    raise InvalidRequestError(f"a picture is a {type(given).__name__}; give an image of Pillow, a path or bytes")

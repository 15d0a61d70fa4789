"""Pictures of one model: read within limits, named by what they show, and placed in prompts.

Any thread may call it.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache import KeyedSpan
from foreword.engine import Prompt
from foreword.errors import InvalidRequestError, PicturesBusyError, PromptTooLongError
from foreword.pictures.files import PictureFile, Pixels, pixels_of, size_of
from foreword.request import PlacedPicture

MOST_KNOWN = 4096
"""Files of which is remembered what they show."""


class Vision(Protocol):
    """The half of a model that sees, as this room knows it."""

    token_id: int
    digest: str

    def shape(self, height: int, width: int) -> Any: ...
    def num_rows(self, shape: Any) -> int: ...
    def text(self, shape: Any) -> str: ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReadPicture:
    """A picture that was checked."""

    digest: str
    shape: Any
    file: PictureFile = field(repr=False)

    def pixels(self) -> Pixels:
        """Its pixels, [height, width, 3], decoded anew."""
        return pixels_of(self.file)


class Placeholders(NamedTuple):
    """The tokens that stand for a picture."""

    token_ids: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    """Those that its rows replace."""


class Pictures:
    """Reads and places pictures for one model."""

    def __init__(
        self, vision: Vision, encode: Callable[[str], Sequence[int]], *, max_pictures: int, max_tokens: int
    ) -> None:
        """`encode`: the tokenizer's, for a part of a text. `max_tokens`: of all pictures of a prompt."""
        self._vision, self._encode = vision, encode
        self._max_pictures, self._max_tokens = max_pictures, max_tokens
        self._known: OrderedDict[bytes, tuple[str, tuple[int, int]]] = OrderedDict()
        """Digest of a file -> that of what it shows, and its height and width."""
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self.num_held_bytes = 0
        """Bytes of the files that requests hold."""
        self.most_held_bytes: int | None = None
        """Of all requests together. None: those of a Python caller are held by the caller in any case."""
        self._placeholders = lru_cache(1024)(self._make_placeholders)

    def read(self, files: Sequence[PictureFile]) -> list[ReadPicture]:
        """Check and name pictures: sizes and tokens of all before any is decoded. Raises InvalidRequestError."""
        if len(files) > self._max_pictures:
            raise InvalidRequestError(
                f"the prompt has {len(files)} pictures; at most {self._max_pictures} are taken (max_pictures), "
                "send fewer"
            )
        names = [hashlib.sha256(file.data).digest() if isinstance(file.data, bytes) else None for file in files]
        with self._lock:
            found = [None if name is None else self._known.get(name) for name in names]
        sizes = [size_of(file) if one is None else one[1] for file, one in zip(files, found, strict=True)]
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
        for file, name, one, size, shape in zip(files, names, found, sizes, shapes, strict=True):
            digest = self._digest(file, size, shape) if one is None else one[0]
            read.append(self._hold(ReadPicture(digest, shape, file)))
            self._note(name, digest, size)
        return read

    def _hold(self, picture: ReadPicture) -> ReadPicture:
        """Count a picture until it is freed. Raises PicturesBusyError if requests hold too many bytes."""
        num_bytes = picture.file.num_bytes
        with self._lock:
            if self.most_held_bytes is not None and self.num_held_bytes + num_bytes > self.most_held_bytes:
                raise PicturesBusyError(
                    f"requests hold pictures of {self.num_held_bytes} bytes, and {self.most_held_bytes} may be held; "
                    "try again when some have ended"
                )
            self.num_held_bytes += num_bytes
        weakref.finalize(picture, self._release, num_bytes).atexit = False
        return picture

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self.num_held_bytes -= num_bytes

    def shown(self, prompt: Prompt, pictures: Sequence[ReadPicture]) -> Prompt:
        """The prompt with each sign of a picture replaced by its tokens. Raises InvalidRequestError."""
        token_ids = prompt.token_ids
        signs = np.flatnonzero(token_ids == self._vision.token_id)
        if len(signs) != len(pictures):
            raise InvalidRequestError(
                f"the prompt has {len(pictures)} pictures, but {len(signs)} signs of pictures; the chat template must "
                "write one for each, and a text none"
            )
        if not pictures:
            return prompt
        own = [self._placeholders(picture.shape) for picture in pictures]
        pieces, placed, at, length = list[npt.NDArray[np.int32]](), list[PlacedPicture](), 0, 0
        for sign, picture, tokens in zip(signs.tolist(), pictures, own, strict=True):
            pieces += [token_ids[at:sign], tokens.token_ids]
            placed.append(PlacedPicture(picture, tokens.places + np.int32(length + sign - at)))
            length += sign - at + len(tokens.token_ids)
            at = sign + 1
        pieces.append(token_ids[at:])
        added = np.concatenate(([0], np.cumsum([len(tokens.token_ids) - 1 for tokens in own])))

        def moved(end: int) -> int:
            return end + int(added[np.searchsorted(signs, end)])

        spans = tuple(KeyedSpan("media", one.picture.digest, one.offset, one.num_tokens) for one in placed)
        return replace(
            prompt,
            token_ids=np.concatenate(pieces).astype(np.int32),
            extra_keys=replace(prompt.extra_keys, spans=spans),
            message_ends=tuple(map(moved, prompt.message_ends)),
            marks=tuple(replace(mark, end=moved(mark.end)) for mark in prompt.marks),
            pictures=tuple(placed),
        )

    def _digest(self, file: PictureFile, size: tuple[int, int], shape: Any) -> str:
        """The digest of what a file shows, and of how it is prepared."""
        pixels = pixels_of(file)
        if pixels.shape[:2] != size:
            raise InvalidRequestError("a picture has another size than its file's beginning says; write the file anew")
        digest = hashlib.sha256(f"{self._vision.digest} {size[0]} x {size[1]} as {shape}\n".encode())
        digest.update(np.ascontiguousarray(pixels).data)
        return digest.hexdigest()

    def _note(self, name: bytes | None, digest: str, size: tuple[int, int]) -> None:
        """Remember what a file shows, by the digest of its bytes."""
        if name is None:
            return
        with self._lock:
            self._known[name] = digest, size
            self._known.move_to_end(name)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _make_placeholders(self, shape: Any) -> Placeholders:
        token_ids = np.array(self._encode(self._vision.text(shape)), np.int32)
        places = np.flatnonzero(token_ids == self._vision.token_id).astype(np.int32)
        if len(places) != self._vision.num_rows(shape):
            raise InvalidRequestError("the model's tokenizer has no sign for pictures, so it takes none")
        return Placeholders(token_ids, places)

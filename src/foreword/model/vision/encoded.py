"""The rows of pictures, encoded and kept.

Encoders and image processors are transformers'. A picture's rows depend on no other picture: each is encoded alone, and
its tiles, where a family has them, one after the other. Encoded pictures are kept by the digest of what they show and
the salt of who shows them; the engine's thread alone may ask for them, so a new picture of several requests is encoded
once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foreword.request import Picture


class Vision(Protocol):
    """The half of a model that sees. Families inherit what they do not say themselves."""

    token_id: int
    """The token that rows of pictures replace."""
    digest: str
    """Of all besides pixels and weights on which a picture's rows depend."""
    num_added: int = 0
    """The number of layers after which more is added to its rows."""
    sees_ahead: bool = False
    """Whether tokens of a picture see each other, also the later ones."""
    written_sign: tuple[str, str] | None = None
    """The sign of a picture in chat templates, and what transformers' processor makes of it before it is encoded."""

    @property
    def sign_id(self) -> int:
        """The token that chat templates write for a picture."""
        return self.token_id

    @property
    def most_whole(self) -> int:
        """Most tokens that one step must compute."""
        return 0

    def shape(self, height: int, width: int) -> Any:
        """How a picture of this size is cut."""

    def num_rows(self, shape: Any) -> int:
        """The number of rows of a picture that is cut so."""

    def text(self, shape: Any) -> str:
        """What stands in a prompt for a picture that is cut so."""

    def grid(self, shape: Any) -> tuple[int, int] | None:
        """Rows and columns in which its tokens turn; None: they turn as text does."""
        return None

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """The rows of a picture [height, width, 3]: [rows, (1 + num_added) * width]."""


class EncodedPictures:
    """The rows of the pictures that were shown last."""

    def __init__(self, vision: Vision, max_bytes: int) -> None:
        """`max_bytes`: most memory of kept rows; the last picture stays in any case, for its next chunk."""
        self.vision, self.max_bytes = vision, max_bytes
        self._kept: OrderedDict[tuple[str | None, str], Tensor] = OrderedDict()
        self.num_bytes = self.num_encoded = self.num_found = 0
        """Memory of kept rows; how often a picture was encoded, and how often its rows were there."""
        self.seconds = 0.0
        """Time that encoding took."""

    def rows(self, picture: Picture, salt: str | None = None) -> Tensor:
        """The rows of a picture, [rows, width]; of those kept under `salt` alone, lest time tell who else showed it."""
        key = salt, picture.digest
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self.num_found += 1
            return found
        started = time.monotonic()
        made = self.vision.encode(picture.pixels())
        assert len(made) == self.vision.num_rows(picture.shape), "the image processor cuts pictures otherwise"
        self.seconds += time.monotonic() - started
        self.num_encoded += 1
        self._kept[key] = made
        self.num_bytes += made.nbytes
        while self.num_bytes > self.max_bytes and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

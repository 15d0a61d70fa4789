"""Pictures as requests hold them: whose they are, and which tokens their rows replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Picture(Protocol):
    """A picture that was read and checked. A request keeps it alive until it ends."""

    @property
    def digest(self) -> str:
        """A digest of its pixels, its size and how it is prepared, which is part of block keys."""

    @property
    def shape(self) -> Any:
        """How it is cut for the encoder; its family of models knows the form."""

    def pixels(self) -> npt.NDArray[np.uint8]:
        """Its pixels, [height, width, 3]: decoded anew at each call, so that waiting pictures take no room."""


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a prompt."""

    picture: Picture
    places: npt.NDArray[np.int32]
    """[rows]: the index of the token that each row of its encoding replaces, ascending."""

    @property
    def offset(self) -> int:
        """The index of the first of these tokens."""
        return int(self.places[0])

    @property
    def num_tokens(self) -> int:
        """The number of tokens from the first of them to the last."""
        return int(self.places[-1]) + 1 - self.offset

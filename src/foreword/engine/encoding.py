"""The budget for encoding pictures: a step encodes some, and requests that run meanwhile wait for a part at most."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foreword.cache import PrefixHit
from foreword.engine.runner import Encoder
from foreword.request import Request

_Piece = tuple[str | None, str, int]
"""Salt, picture and first row."""


class EncoderBudget:
    """Ends spans before rows of pictures that a step has no time to encode.

    A step encodes pieces, which are whole pictures or tiles, of at most `most` rows together; one piece in any case.
    """

    def __init__(self, encoder: Encoder | None, most: int) -> None:
        """`encoder`: None if the model takes no pictures."""
        self._encoder, self._most = encoder, most
        self._left = most
        self._planned: set[_Piece] = set()
        """The pieces that this step encodes."""

    def begin_step(self) -> None:
        """Begin to plan a step."""
        self._left = self._most
        self._planned.clear()

    def cut(self, request: Request, start: int, end: int) -> int:
        """The end of a span from `start`, before the first row that this step cannot have; `end` if it has all.

        Books nothing: the request may not start.
        """
        planned, left = set(self._planned), self._left
        for key, num_rows, place in self._pieces(request, start, end):
            if key not in planned:
                if planned and num_rows > left:
                    self._left = 0  # no later request passes this one with a smaller picture
                    return place
                planned.add(key)
                left -= num_rows
        return end

    def book(self, request: Request, start: int, end: int) -> None:
        """Note that this step computes a span, and so encodes the rows that it lacks."""
        for key, num_rows, _ in self._pieces(request, start, end):
            if key not in self._planned:
                self._planned.add(key)
                self._left -= num_rows

    def _pieces(self, request: Request, start: int, end: int) -> Iterator[tuple[_Piece, int, int]]:
        """What a span would have encoded: the name and the rows of each piece, and the first token that needs it."""
        if self._encoder is None or start >= request.num_prompt_tokens:
            return
        salt = request.sequence.extra_keys.salt
        for placed in request.pictures:
            first, last = np.searchsorted(placed.places, (start, end)).tolist()
            for piece in self._encoder.missing(placed.picture, range(first, last), salt) if first < last else ():
                name = salt, placed.picture.digest, piece.start
                yield name, len(piece), int(placed.places[max(first, piece.start)])

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether this step cannot have the row after a waiting request's hit."""
        return self.cut(request, hit.num_tokens, hit.num_tokens + 1) == hit.num_tokens

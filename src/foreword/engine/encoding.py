"""The budget for encoding pictures: a step encodes some, and requests that run meanwhile wait for a part at most."""

from __future__ import annotations

import numpy as np

from foreword.cache import PrefixHit
from foreword.engine.runner import Encoder
from foreword.request import Request


class EncoderBudget:
    """Ends spans before rows of pictures that a step has no time to encode.

    A step encodes pieces, which are whole pictures or tiles, of at most `most` rows together; one piece in any case.
    """

    def __init__(self, encoder: Encoder | None, most: int) -> None:
        """`encoder`: None if the model takes no pictures."""
        self._encoder, self._most = encoder, most
        self._left = most
        self._planned: set[tuple[str | None, str, int]] = set()
        """Salt, picture and first row of the pieces that this step encodes."""

    def begin_step(self) -> None:
        """Begin to plan a step."""
        self._left = self._most
        self._planned.clear()

    def cut(self, request: Request, start: int, end: int) -> int:
        """The end of a span from `start`, before the first row that this step cannot have; `end` if it has all."""
        if self._encoder is None or start >= request.num_prompt_tokens:
            return end
        salt = request.sequence.extra_keys.salt
        for placed in request.pictures:
            first, last = np.searchsorted(placed.places, (start, end)).tolist()
            for piece in self._encoder.missing(placed.picture, range(first, last), salt) if first < last else ():
                key = salt, placed.picture.digest, piece.start
                if key in self._planned:
                    continue
                if self._planned and len(piece) > self._left:
                    self._left = 0  # no later request passes this one with a smaller picture
                    return int(placed.places[max(first, piece.start)])
                self._planned.add(key)
                self._left -= len(piece)
        return end

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether this step cannot have the row after a waiting request's hit."""
        return self.cut(request, hit.num_tokens, hit.num_tokens + 1) == hit.num_tokens

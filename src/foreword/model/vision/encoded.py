"""The rows of pictures, encoded and kept.

Encoders and image processors are transformers'. A picture's rows depend on no other picture: each picture is encoded
alone, and its tiles, if its family has tiles, one after the other. Encoded pictures are kept under their digest and the
salt of the user who shows them. Only the engine's thread may ask for rows, so a new picture of several requests is
encoded once. A tile is encoded when a step first needs one of its rows, unless the tiers below the pool have it. A step
asks the tiers once, for all its pictures.
"""

from __future__ import annotations

import copy
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.request import Alone, Picture

Key = tuple[str | Alone | None, str]
"""The salt of the user who shows a picture, and the picture's digest. Rows are kept under both, so that the time of an
answer does not tell who else showed the picture."""


class Vision(Protocol):
    """The half of a model that encodes pictures. Families inherit the defaults that they do not override."""

    token_id: int
    """The token that rows of pictures replace."""
    digest: str
    """A digest of everything besides pixels and weights on which a picture's rows depend."""
    num_added: int = 0
    """n: after each of the decoder's first n layers, further terms are added to a picture's rows."""
    sees_ahead: bool = False
    """Whether tokens of a picture see each other, also later tokens."""
    written_sign: tuple[str, str] | None = None
    """A picture's placeholder in chat templates, and the text by which transformers' processor replaces it."""

    @property
    def sign_id(self) -> int:
        """The placeholder token that chat templates write for a picture."""
        return self.token_id

    @property
    def most_whole(self) -> int:
        """The most tokens that one step must compute together; 0: a step may end at any token."""
        return 0

    def shape(self, height: int, width: int) -> Any:
        """The tiles into which a picture of this size is cut."""

    def num_rows(self, shape: Any) -> int:
        """The number of rows of a picture that is cut into this shape."""

    def text(self, shape: Any) -> str:
        """The text that stands in a prompt for a picture that is cut into this shape."""

    def grid(self, shape: Any) -> tuple[int, int] | None:
        """Rows and columns of the grid that gives a picture's tokens rotary positions; None: positions as in text."""
        return None

    def without_weights(self) -> Self:
        """A copy that cuts and names pictures but encodes no picture; it can be pickled."""
        clone = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.nn.Module):
                setattr(clone, name, None)
        return clone

    def tile_rows(self, shape: Any) -> int:
        """The number of rows that are encoded together, independently of all other rows."""
        return self.num_rows(shape)

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        """The rows of a picture [height, width, 3], or of some of its tiles: [rows, (1 + num_added) * width]."""


@dataclass(slots=True)
class _EncodedTiles:
    """The encoded tiles of one picture."""

    rows: Tensor
    """[rows, width]; rows of tiles that are not encoded are meaningless."""
    tiles: set[int]
    """Numbers of the tiles that are encoded."""


class RowsOfPictures(NamedTuple):
    """The width and type of the rows that a picture is encoded into."""

    width: int
    dtype: torch.dtype


class Below(Protocol):
    """The tiers below memory, which keep rows longer than the process runs."""

    def load(self, names: Sequence[str], payloads: Sequence[memoryview], compute_s: float | None) -> Sequence[bool]:
        """Fill the payloads of names that tiers have; return for each name whether its payload was filled.

        `compute_s`: the seconds that it would take to compute all payloads; None if unknown. This time limits the wait
        for tiers.
        """

    def store(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Begin to store payloads. The caller must not change them any more."""


class PictureRows(NamedTuple):
    """Some rows of a picture that a step needs."""

    picture: Picture
    rows: range
    salt: str | Alone | None = None

    @property
    def key(self) -> Key:
        return self.salt, self.picture.digest


class EncodedPictures:
    """Encodes pictures, and keeps the rows of the pictures that were shown most recently."""

    def __init__(self, vision: Vision, form: RowsOfPictures, max_bytes: int) -> None:
        """`max_bytes`: most bytes of kept rows between steps. The picture used last stays even if it is larger, because
        a prompt's next chunk may need it.

        Newly encoded rows take their memory twice while tiers write them.
        """
        self.vision, self.max_bytes, self._form = vision, max_bytes, form
        self.below: Below | None = None
        """The tiers below; None: there are no tiers."""
        self._pictures: OrderedDict[Key, _EncodedTiles] = OrderedDict()
        self.num_bytes = self.num_encoded = self.num_rows = self.num_found_rows = self.num_loaded_rows = 0
        """The bytes of kept rows; the number of pictures whose encoding began; and the numbers of rows that were
        encoded, that steps found in memory, and that tiers gave.
        """
        self.seconds = 0.0
        """Seconds that encoding took."""

    def without_weights(self) -> EncodedPictures:
        """A copy for another process, which encodes nothing."""
        return EncodedPictures(self.vision.without_weights(), self._form, 0)

    def counts(self) -> Counter[str]:
        """The numbers of rows that were encoded, found in memory, and loaded from a tier."""
        return Counter(encoder=self.num_rows, memory=self.num_found_rows, tier=self.num_loaded_rows)

    def missing(self, picture: Picture, rows: range, salt: str | Alone | None = None) -> list[range]:
        """The tiles that must be encoded for these rows of a picture, as ranges of its rows.

        The tiles from the first missing tile to the last, with kept tiles between, because one call encodes all of
        them.
        """
        picture_tiles, size = self._pictures.get((salt, picture.digest)), self.vision.tile_rows(picture.shape)
        tiles = range(rows.start // size, -(-rows.stop // size))
        lacking = [tile for tile in tiles if picture_tiles is None or tile not in picture_tiles.tiles]
        encoded = range(lacking[0], lacking[-1] + 1) if lacking else ()
        return [range(size * tile, size * (tile + 1)) for tile in encoded]

    def of_step(self, needed: Sequence[PictureRows]) -> list[Tensor]:
        """The rows of pictures that one step needs, [rows, width] each. Tiles that are kept nowhere are encoded."""
        self.num_found_rows += sum(len(part.rows) for part in needed if not self.missing(*part))
        if self.below is not None:
            self._load(self.below, needed)
        rows = []
        for part in needed:
            missing = self.missing(*part)
            if missing:
                self._encode(part.picture, part.key, missing)
            self._pictures.move_to_end(part.key)
            rows.append(self._pictures[part.key].rows[part.rows.start : part.rows.stop])
        if self.num_bytes > self.max_bytes:
            self._make_room({part.key for part in needed})
        return rows

    def _make_room(self, in_use: set[Key]) -> None:
        """Drop rows until `max_bytes` holds the rest. Rows of requests that skip the cache go first: no other finds
        them.
        """
        for key in sorted(self._pictures, key=lambda key: key in in_use or not isinstance(key[0], Alone))[:-1]:
            if self.num_bytes <= self.max_bytes:
                break
            self.num_bytes -= self._pictures.pop(key).rows.nbytes

    def _load(self, below: Below, needed: Sequence[PictureRows]) -> None:
        """Find the tiles that a step needs and that memory lacks; load and keep those that the tiers have."""
        tiles = {
            _name(part.key, tile): (part, tile, torch.empty((len(tile), self._form.width), dtype=self._form.dtype))
            for part in needed
            if not isinstance(part.salt, Alone)
            for tile in self.missing(*part)
        }
        if not tiles:
            return
        rows = [memory for *_, memory in tiles.values()]
        compute_s = self.seconds / self.num_rows * sum(map(len, rows)) if self.num_rows else None
        loaded = below.load(list(tiles), [payload for memory in rows for payload in _payloads(memory, 1)], compute_s)
        for (part, tile, memory), is_there in zip(tiles.values(), loaded, strict=True):
            if is_there:
                self._keep(part.picture, part.key, tile.start, memory)
                self.num_loaded_rows += len(tile)

    def _encode(self, picture: Picture, key: Key, missing: list[range]) -> None:
        """Encode tiles that stand side by side. Tiles among them that are already kept get the same bits again."""
        started, size = time.monotonic(), self.vision.tile_rows(picture.shape)
        first, end = missing[0].start, missing[-1].stop
        rows = self.vision.encode(picture.pixels(), slice(first // size, end // size))
        assert len(rows) == end - first, "the image processor cuts pictures otherwise"
        assert (rows.shape[1], rows.dtype) == self._form, "the encoder makes other rows"
        self.num_encoded += key not in self._pictures
        self._keep(picture, key, first, rows)
        self.seconds += time.monotonic() - started
        self.num_rows += len(rows)
        if self.below is not None and not isinstance(key[0], Alone):
            self.below.store([_name(key, tile) for tile in missing], _payloads(rows, len(missing)))

    def _keep(self, picture: Picture, key: Key, first: int, rows: Tensor) -> None:
        """Keep rows of whole tiles, from a picture's row `first` on."""
        if key not in self._pictures:
            whole = rows.new_empty(self.vision.num_rows(picture.shape), self._form.width)
            self._pictures[key] = _EncodedTiles(whole, set())
            self.num_bytes += whole.nbytes
        encoded, size = self._pictures[key], self.vision.tile_rows(picture.shape)
        encoded.rows[first : first + len(rows)] = rows
        encoded.tiles.update(range(first // size, (first + len(rows)) // size))


def _name(key: Key, tile: range) -> str:
    """The name of a tile in tiers: the salt of its owner, its picture's digest, and its range of the picture's rows."""
    return json.dumps(["picture", *key, tile.start, tile.stop])


def _payloads(rows: Tensor, count: int) -> list[memoryview]:
    """Cut some rows into `count` equal pieces, and return the memory of each piece."""
    pieces = rows.contiguous().view(torch.uint8).numpy().reshape(count, -1)
    return [memoryview(piece) for piece in pieces]  # type: ignore[arg-type]

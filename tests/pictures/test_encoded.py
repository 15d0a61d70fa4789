"""Which rows of pictures are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from doors import kept_digests
from foreword.model.vision.encoded import EncodedPictures, PictureRows, RowsOfPictures, Vision
from foreword.request import Alone

ROWS, WIDTH = 4, 2


@dataclass
class Shown:
    digest: str
    shape: Any = None

    def pixels(self) -> npt.NDArray[np.uint8]:
        return np.full((1, 1, 3), int(self.digest), np.uint8)


class Plain(Vision):
    """Rows are the picture's first pixel."""

    token_id, digest = 0, "plain"

    def num_rows(self, shape: Any) -> int:
        return ROWS

    def encode(self, pixels: npt.NDArray[np.uint8], tiles: slice = slice(None)) -> Tensor:
        return torch.full((ROWS, WIDTH), float(pixels[0, 0, 0]))


def test_rows_that_no_other_request_finds_go_first() -> None:
    kept = EncodedPictures(Plain(), RowsOfPictures(WIDTH, torch.float32), 3 * ROWS * WIDTH * 4)
    alone = [Alone() for _ in range(4)]

    def step(*shown: tuple[int, str | Alone | None]) -> list[int]:
        wanted = [PictureRows(Shown(str(number)), range(ROWS), salt) for number, salt in shown]
        rows = kept.of_step(wanted)
        assert [own.unique().tolist() for own in rows] == [[number] for number, _ in shown]
        return sorted(int(digest) for digest in kept_digests(kept))

    assert step((1, None), (2, "salt")) == [1, 2]
    for number, own in enumerate(alone, 3):
        assert step((number, own)) == [1, 2, number]
    assert step((6, alone[3]), (7, None)) == [2, 6, 7]  # what a step needs is of use to the next chunk
    assert step((8, None)) == [2, 7, 8]
    assert step((9, None)) == [7, 8, 9]
    assert step((3, Alone()), (4, Alone()), (5, Alone()), (6, Alone())) == [4, 5, 6]
    assert kept.num_bytes == 3 * ROWS * WIDTH * 4

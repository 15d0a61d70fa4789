"""Bytes that callers send beside tokens count while requests hold them, and no longer."""

from __future__ import annotations

import gc

import pytest

from foreword.errors import MediaBusyError
from foreword.request import HeldBytes


class Picture:
    pass


class Failed:
    """A request that refers to itself, as an exception and its traceback do."""

    def __init__(self, picture: Picture) -> None:
        self.own, self.picture = self, picture


def test_what_is_only_garbage_takes_no_room() -> None:
    held, kept = HeldBytes(limit=100), Picture()
    held.hold(kept, 40)
    gc.disable()
    try:
        picture = Picture()
        held.hold(picture, 60)
        Failed(picture)
        del picture
        assert held.num_bytes == 100, "only the collector finds it"
        held.hold(picture := Picture(), 60)
        assert held.num_bytes == 100
        with pytest.raises(MediaBusyError, match="of 100 bytes, and 100 may be held; try again"):
            held.hold(Picture(), 1)
    finally:
        gc.enable()
    del picture, kept
    assert held.num_bytes == 0

"""Reads `cache_control` into the marks of a chat.

Knows Anthropic's rules for marks: their number, the order of their times, and which block the mark of the whole body
falls on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from foreword.engine import BREAKPOINT, Keep
from foreword.server.api_errors import bad_request
from foreword.server.dialects.anthropic.fields import CacheControl
from foreword.server.service import ChatMark
from foreword.text.conversation import Place

TTL_S = {"5m": 300.0, "1h": 3600.0}
MOST_MARKS = 4


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that can have a mark."""

    where: str
    control: CacheControl | None
    place: Place | None
    """None: no part of the prompt."""

    @property
    def ttl(self) -> str:
        return (self.control and self.control.ttl) or "5m"


class Marks:
    """The marks of one body. Give it all blocks that can have one, in Anthropic's order: tools, system, messages."""

    def __init__(self) -> None:
        self._marked: list[_Block] = []
        self._last: _Block | None = None

    def see(self, where: str, control: CacheControl | None, place: Place | None) -> None:
        """Take the next block."""
        self._last = _Block(where, control, place)
        if control is not None:
            self._marked.append(self._last)

    def checked(self, automatic: CacheControl | None) -> list[ChatMark]:
        """The marks, with that of the whole body. Raises APIError 400 with Anthropic's words."""
        marked, last = self._marked, self._last
        if automatic is not None and last is not None:
            automatic_block = _Block(last.where, automatic, last.place)
            if last.control is None:
                marked = [*marked, automatic_block]
            elif last.ttl != automatic_block.ttl:
                raise bad_request(
                    f"cache_control.ttl: {automatic_block.ttl!r} differs from the ttl {last.ttl!r} of the last block, "
                    f"{last.where}; give both the same"
                )
        if len(marked) > MOST_MARKS:
            raise bad_request(
                f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. Found {len(marked)}."
            )
        for before, block in pairwise(marked):
            if (before.ttl, block.ttl) == ("5m", "1h"):
                raise bad_request(
                    f"{block.where}.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
                    "cache_control block. Note that blocks are processed in the following order: `tools`, `system`, "
                    "`messages`."
                )
        return [ChatMark(one.place, Keep(TTL_S[one.ttl], BREAKPOINT)) for one in marked if one.place is not None]

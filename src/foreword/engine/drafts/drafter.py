"""The protocol of drafters, which guess how an answer goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foreword.batch import IntArray
from foreword.request import Request


@dataclass(frozen=True, slots=True)
class Proposal:
    """How an answer may go on."""

    token_ids: IntArray
    """[tokens], at least one."""
    source: str
    """The drafter's name."""
    num_matched: int
    """The number of last tokens that the answer and its model have in common: the more, the likelier."""


class Drafter(Protocol):
    """Guesses the next tokens of answers. A wrong guess costs time, never a bit of an answer.

    It uses nothing but the request itself and what was computed in the request's own cache namespace.
    """

    name: str
    """The source of its drafts, for statistics."""

    def propose(self, request: Request, most: int) -> Proposal | None:
        """Guess at most `most` tokens that follow the request's known tokens; None: no idea."""

    def leave(self, request: Request) -> None:
        """A request has ended; `request.finish_reason` says how."""

    def forget(self) -> None:
        """Forget what requests that have ended left behind."""

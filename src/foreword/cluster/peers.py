"""How several routers share their reservations: by numbered updates, and by a whole state after a gap.

If a router falls silent, its reservations end. Routers share load but not blocks: each reads the replicas' events.

Routers that decide at the same moment take turns, so that each knows the choices of the others before its own.

Time is cut into slots of equal length. The routers own them one after the other (`time_to_turn`):

    clock_s   |-- a --|-- b --|-- c --|-- a --|-- b --| ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from foreword.cluster.decision import Reservation


class Change(StrEnum):
    """What happened to a reservation."""

    RESERVED = "reserved"
    PREFILLED = "prefilled"
    RELEASED = "released"
    ALIVE = "alive"
    """No change; the update only says that the router still runs."""


class LoadUpdate(NamedTuple):
    """One change of one router's reservations."""

    router: str
    life: str
    """Identifies one life of the router's process."""
    number: int
    """Consecutive from 0 in each life."""
    change: Change
    reservation: Reservation
    prompt_tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """All open reservations of one router."""

    router: str
    life: str
    number: int
    """The number of the last update that is included; -1 before the first."""
    updates: tuple[LoadUpdate, ...]
    """Updates that make these reservations; their `number` has no meaning."""


@dataclass(slots=True)
class Peer:
    """Another router, and how far its updates have arrived."""

    heard_at: float
    life: str | None = None
    next_number: int = 0
    is_synced: bool = False

    def follows(self, update: LoadUpdate, now: float) -> bool:
        """Whether this is the next update. At a gap, or after a restart, the peer is no longer synced."""
        self.heard_at = now
        if update.life == self.life and update.number < self.next_number:
            return False  # a duplicate
        if update.life != self.life and update.number == 0:
            self.life, self.next_number, self.is_synced = update.life, 0, True
        elif update.life != self.life or update.number > self.next_number:
            self.is_synced = False
        if self.is_synced:
            self.next_number += 1
        return self.is_synced


class Outbox:
    """This router's updates for its peers, until the caller takes them."""

    def __init__(self, router: str, life: str) -> None:
        self.router, self.life = router, life
        self.next_number = 0
        self._updates: list[LoadUpdate] = []

    def put(self, change: Change, reservation: Reservation, prompt_tokens: int = 0, computed_tokens: int = 0) -> None:
        """Add an update with the next number."""
        self._updates.append(
            LoadUpdate(self.router, self.life, self.next_number, change, reservation, prompt_tokens, computed_tokens)
        )
        self.next_number += 1

    def take(self) -> list[LoadUpdate]:
        updates, self._updates = self._updates, []
        return updates

    def whole(self, changes: Iterable[tuple[Change, Reservation, int, int]]) -> RouterLoad:
        """Pack changes that make the whole state, as of the newest update."""
        updates = tuple(LoadUpdate(self.router, self.life, -1, *change) for change in changes)
        return RouterLoad(self.router, self.life, self.next_number - 1, updates)


def time_to_turn(router: str, peers: Iterable[str], turn_s: float, clock_s: float) -> float:
    """Seconds until the router's next slot of `turn_s` seconds; 0.0 in its slot, or if it is alone."""
    routers = sorted({router, *peers})
    if len(routers) == 1 or not turn_s:
        return 0.0
    slot = math.floor(clock_s / turn_s)
    slots_ahead = (routers.index(router) - slot) % len(routers)
    return max(0.0, (slot + slots_ahead) * turn_s - clock_s)

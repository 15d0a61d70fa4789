"""Routers that decide at the same moment do so in turn, each after it has heard what the others have chosen.

Time is cut into slots, router after router:

    clock_s   |-- a --|-- b --|-- c --|-- a --|-- b --| ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def time_to_turn(router: str, peers: Iterable[str], turn_s: float, clock_s: float) -> float:
    """Seconds until the router's next slot of `turn_s` seconds; 0.0 in its slot, or if it is alone."""
    routers = sorted({router, *peers})
    if len(routers) == 1 or not turn_s:
        return 0.0
    slot = math.floor(clock_s / turn_s)
    slots_ahead = (routers.index(router) - slot) % len(routers)
    return max(0.0, (slot + slots_ahead) * turn_s - clock_s)

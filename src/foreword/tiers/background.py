"""Background: threads whose work nobody waits for.

Knows threads; knows nothing of tiers. On a machine of few cores, a thread that hashes and writes blocks takes a core
from a step that is being computed. Linux gives each thread a priority of its own (sched(7), nice(2)).
"""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

NICE = 19
"""The lowest priority: beside a busy thread, about 1.5% of a core; a free core is all its own."""


def give_way() -> None:
    """Let the calling thread run when no other wants its core. Where threads have no priorities, do nothing."""
    if sys.platform != "linux":
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError as error:
        logger.info("a background thread keeps its priority: %s", error)

"""Waits for what a subscriber hears."""

from __future__ import annotations

import time
from collections.abc import Callable

from foreword.events.subscriber import Subscriber


def poll_until(subscriber: Subscriber, condition: Callable[[Subscriber], bool], timeout_s: float = 30.0) -> bool:
    """Poll until a condition holds; False if it does not within the time."""
    end = time.monotonic() + timeout_s
    while not condition(subscriber):
        if time.monotonic() > end:
            return False
        subscriber.poll(0.05)
    return True

"""Runs work that recurses as deeply as its input is nested, on a stack that is large enough.

Knows threads. Compiled code that overflows its stack ends the process without an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 * 2**20
"""Address space of the thread; only the used part takes memory."""

T = TypeVar("T")

_starting = threading.Lock()


def with_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread of its own. Raises what it raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the waiting thread raises it
            result.set_exception(error)

    thread = threading.Thread(target=run, name="foreword-deep-stack", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result.result()

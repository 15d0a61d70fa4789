"""Log lines that say how much of a model's weights has been read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


class WeightsLog:
    """Counts tensors as they are read, and logs their number every few seconds."""

    def __init__(self, model: str, num_tensors: int, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> None:
        self._model, self._of, self._read = model, num_tensors, 0
        self._seconds, self._last = seconds_between_lines, time.monotonic()

    def note(self) -> None:
        """One more tensor has been read."""
        self._read += 1
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            logger.info(
                "%s: %.0f%% of the weights (%d of %d tensors)",
                self._model,
                100 * self._read / self._of,
                self._read,
                self._of,
                extra={"fields": {"event": "weights", "read": self._read, "of": self._of}},
            )


@contextmanager
def weights_progress(model: str, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> Iterator[None]:
    """Log the number of tensors read so far every few seconds, instead of showing transformers' progress bar."""
    from transformers.utils import logging as transformers_logging

    set_hook: Callable[[Any], Any] | None = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items: Any = args[0] if args else options.get("iterable")
        if not hasattr(items, "__iter__") or not hasattr(items, "__len__"):
            return factory(*args, **options)
        return _counted(items, WeightsLog(model, len(items), seconds_between_lines))

    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def _counted(items: Any, log: WeightsLog) -> Iterator[Any]:
    for item in items:
        yield item
        log.note()

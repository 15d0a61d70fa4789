"""Log lines that say how much of a model's weights has been read.

Knows transformers' hook for progress bars; knows nothing of checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def weights_progress(model: str, seconds_between_lines: float = SECONDS_BETWEEN_LINES) -> Iterator[None]:
    """Log the number of tensors read so far every few seconds, instead of showing transformers' progress bar."""
    set_hook: Callable[[Any], Any] | None = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items = args[0] if args else options.get("iterable")
        if not hasattr(items, "__iter__") or not hasattr(items, "__len__"):
            return factory(*args, **options)
        return _counted(model, items, seconds_between_lines)

    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def _counted(model: str, items: Any, seconds_between_lines: float) -> Iterator[Any]:
    last = time.monotonic()
    for number, item in enumerate(items):
        now = time.monotonic()
        if now - last >= seconds_between_lines:
            last = now
            fields = {"event": "weights", "read": number, "of": len(items)}
            share = 100 * number / len(items)
            logger.info(
                "%s: %.0f%% of the weights (%d of %d tensors)",
                model,
                share,
                number,
                len(items),
                extra={"fields": fields},
            )
        yield item

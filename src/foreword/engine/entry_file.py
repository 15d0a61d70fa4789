"""The file of entries: what a restarted process is still to keep.

An entry is written without its tokens: the key of its last block tells whether a prompt begins with it.

    CACHE_DIR/v1/<namespace, 32 hex>.entries     {"entries": [{"name", "owner", "source", "refresh_s", ...}, ...]}
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """An entry, as a later process can keep it again."""

    name: str
    owner: str | None
    source: str
    num_tokens: int
    last_key: str
    """The key of its last whole block, in hexadecimal digits."""
    until: float
    """Seconds since 1970."""
    refresh_s: float | None

    def __post_init__(self) -> None:
        """Raises ValueError or OverflowError for values that no entry has."""
        texts, refresh_s = (self.name, self.source, self.last_key), 1.0 if self.refresh_s is None else self.refresh_s
        if not all(isinstance(one, str) for one in texts) or not isinstance(self.owner, str | None):
            raise ValueError("a name is no text")
        for number in (self.num_tokens, self.until, refresh_s):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{number!r:.40} is no finite number")
        if not isinstance(self.num_tokens, int) or self.num_tokens < 1 or refresh_s <= 0:
            raise ValueError("a number is too small")
        bytes.fromhex(self.last_key)


class EntryFile:
    """The entries of one model in a cache directory. Of two processes that write, the last one wins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[SavedEntry]:
        """What was written; nothing if there is no file, or if it is damaged, which is logged."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return [SavedEntry(**entry) for entry in json.loads(self.path.read_bytes())["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            logger.warning("the cache entries in %s cannot be read, and are forgotten: %s", self.path, error)
            return []

    def write(self, entries: Sequence[SavedEntry]) -> None:
        """Replace the file. A failure is logged: the entries of this process live on."""
        text = json.dumps({"entries": [asdict(entry) for entry in entries]})
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent)  # mode 0600 whatever the umask
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("the cache entries cannot be written to %s: %s", self.path, error)

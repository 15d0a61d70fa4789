"""A file of facts that the user's programs found and can find again, such as digests and times.

The file is a JSON object. A file that another user could have written is not believed. If the file cannot be written,
nothing is kept. If two processes write at once, the entries of one of them may be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path with the home folder in place of "~". The "~" of an unknown user stays, so that errors name the path."""
    return Path(os.path.expanduser(path))


@dataclass(frozen=True, slots=True)
class UserFile:
    """The newest `most_entries` entries by name."""

    path: Path
    most_entries: int = 512

    def read(self) -> dict[str, Any]:
        """All entries; none if the file is damaged, or if another user could have written it."""
        with contextlib.suppress(OSError, ValueError), open(self.path, encoding="utf-8", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                entries = json.load(file)
                return entries if isinstance(entries, dict) else {}
        return {}

    def keep(self, new: Mapping[str, Any]) -> None:
        """Add entries to the file. A new entry replaces an old entry of the same name."""
        entries = {name: entry for name, entry in self.read().items() if name not in new} | dict(new)
        text = json.dumps(dict(list(entries.items())[-self.most_entries :]))
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)  # mode 0600 whatever the umask
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)

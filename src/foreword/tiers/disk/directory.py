"""The cache's directory: a private folder for each process, and the rules of who may write or tidy a folder.

    CACHE_DIR/v1/JANITOR                     locked for a moment by whoever takes over a dead process's folder
    CACHE_DIR/v1/<process, 32 hex>/LOCK      locked while its process lives
                                  /000001-9f3a1c07.fwseg ...
                                  /index     the snapshot

A process reads every folder, but writes and unlinks only in its own. When it starts, it takes the folder of a process
that has died, if there is such a folder, so that a restart finds its own snapshot. It moves the segments of other dead
processes into its folder. Names of files contain no block keys and no text.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import uuid
from pathlib import Path

from foreword.config import user_path
from foreword.errors import ConfigError
from foreword.tiers.disk.files import RealFiles, physical_bytes
from foreword.tiers.disk.segments import segment_number

logger = logging.getLogger(__name__)

VERSION = "v1"
LOCK_NAME = "LOCK"
JANITOR_NAME = "JANITOR"
SNAPSHOT_NAME = "index"
_HOME = re.compile("[0-9a-f]{32}")


class CacheDirectory:
    """A directory that processes of one user share. Raises ConfigError if it is not safe or cannot be written.

    `close` releases our folder's lock; then another process may take the folder.
    """

    def __init__(self, files: RealFiles, path: Path) -> None:
        self._files = files
        self.lock_fd = -1
        """The descriptor of our folder's lock. The lock is ours while the descriptor is open; -1: it is not."""
        self.path = Path(os.path.realpath(user_path(path)))
        try:
            self._open_top()
            self.root = self.path / VERSION
            self._make_private(self.root)
            self.home = self._take_home()
        except OSError as error:
            self.close()
            raise unusable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release our lock. May be called twice."""
        if self.lock_fd >= 0:
            lock_fd, self.lock_fd = self.lock_fd, -1
            self._files.close(lock_fd)

    def other_homes(self) -> list[Path]:
        """Folders of other processes, dead or alive. Raises OSError."""
        return [home for home in homes_in(self._files, self.root) if home != self.home]

    def physical_bytes(self, homes: list[Path]) -> int:
        """The bytes that segments and snapshots occupy in these folders. Raises OSError."""
        total = 0
        for home in homes:
            for path in [*segments_in(self._files, home), home / SNAPSHOT_NAME]:
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    total += physical_bytes(self._files.stat(path))
        return total

    def adopt(self) -> int:
        """Move the segments of dead processes into our folder; returns their number. Errors are logged.

        Does nothing while another process does the same.
        """
        moved = 0
        try:
            janitor = self._files.open_lock(self.root / JANITOR_NAME)
        except OSError as error:
            logger.warning("the cache directory cannot be tidied: %s", error)
            return 0
        try:
            if self._files.try_lock(janitor):
                for home in self.other_homes():
                    try:
                        moved += self._adopt_home(home)
                    except OSError as error:  # it must not keep others from being taken over
                        logger.warning("the folder %s of a dead process cannot be taken over: %s", home, error)
        except OSError as error:
            logger.warning("the cache directory cannot be tidied: %s", error)
        finally:
            self._files.close(janitor)
        return moved

    # ------------------------------------------------------------------------------ within

    def _open_top(self) -> None:
        try:
            status = self._files.stat(self.path)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._make_private(self.path)
            status = self._files.stat(self.path)
        check_top(self.path, status)
        if self._files.space(self.path).is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def _make_private(self, path: Path) -> None:
        """Make a folder of mode 0700, or check that an existing folder is private and ours."""
        try:
            self._files.make_folder(path)
        except FileExistsError:
            check_private(path, self._files.stat(path))

    def _take_home(self) -> Path:
        """Take a dead process's folder, or make a new one. The folder's lock is then ours."""
        janitor = self._files.open_lock(self.root / JANITOR_NAME)
        try:
            if self._files.try_lock(janitor):
                for home in homes_in(self._files, self.root):
                    if (lock := self._lock_of_dead(home)) is not None:
                        self.lock_fd = lock
                        return home
        finally:
            self._files.close(janitor)
        return self._new_home()

    def _new_home(self) -> Path:
        # The folder gets its name once its lock is held, so no process takes it for a dead process's folder.
        name = uuid.uuid4().hex
        unfinished = self.root / f"new-{name}"
        self._files.make_folder(unfinished)
        self.lock_fd = self._files.open_lock(unfinished / LOCK_NAME)
        if not self._files.try_lock(self.lock_fd):
            raise OSError(errno.ENOLCK, "this file system grants no lock")
        self._files.rename(unfinished, self.root / name)
        return self.root / name

    def _lock_of_dead(self, home: Path) -> int | None:
        """Take the lock of a dead process's folder; None if the process lives or the folder is not ours to take."""
        try:
            status = self._files.stat(home)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                return None
            lock = self._files.open_lock(home / LOCK_NAME)
        except OSError:
            return None
        try:
            if self._files.try_lock(lock):
                return lock
        except OSError as error:
            logger.warning("the lock of %s cannot be tried: %s", home, error)
        self._files.close(lock)
        return None

    def _adopt_home(self, home: Path) -> int:
        lock = self._lock_of_dead(home)
        if lock is None:
            return 0
        moved = 0
        try:
            for path in segments_in(self._files, home):
                self._files.rename(path, self.home / path.name)
                moved += 1
            for name in self._files.list_folder(home):
                self._files.unlink(home / name)
            self._files.remove_folder(home)
        finally:
            self._files.close(lock)
        logger.info("took over %d segments of a process that has ended", moved)
        return moved


def homes_in(files: RealFiles, root: Path) -> list[Path]:
    """The folders of processes, dead or alive, in `root`, the folder CACHE_DIR/v1. Raises OSError."""
    return [root / name for name in sorted(files.list_folder(root)) if _HOME.fullmatch(name)]


def segments_in(files: RealFiles, home: Path) -> list[Path]:
    """The segment files in a folder, oldest first; empty if the folder is gone. Raises OSError."""
    try:
        names = files.list_folder(home)
    except FileNotFoundError:
        return []
    numbered = [(number, name) for name in names if (number := segment_number(name)) is not None]
    return [home / name for _, name in sorted(numbered)]


def check_top(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError unless a cache directory is ours and nobody else can write it."""
    _check_ours(path, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the cache directory {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so other users "
            f"could put blocks into it; run `chmod go-w {path}`, or give another directory"
        )


def check_private(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError unless a folder of a cache is ours and nobody else can enter it."""
    _check_ours(path, status)
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the folder {str(path)!r} of the cache has mode {stat.S_IMODE(status.st_mode):04o}, but it must "
            f"be private; run `chmod 700 {path}`"
        )


def _check_ours(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the cache directory {str(path)!r} is not a directory; give another path")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the cache directory {str(path)!r} belongs to user {status.st_uid}, and this process runs as user "
            f"{os.geteuid()}; give a directory of its own"
        )


def unusable(path: Path, error: OSError) -> ConfigError:
    """The error that tells a user that the system refuses the cache directory."""
    return ConfigError(
        f"the cache directory {str(path)!r} cannot be used: {error.strerror or error}; give a directory on a local "
        "disk that this user can write"
    )

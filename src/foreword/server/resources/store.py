"""CachedContents: the cached contents of all tenants, limited in number and bytes, and the folder of their files.

In the folder, cached contents outlive the process. Each has a file:

    CACHE_DIR/cached_contents/<model, 32 hex>/<id, 32 hex>

    magic | cipher's id (16 bytes) | SHA-256 of the rest (32 bytes) | fields as a line of JSON, source

If the cache has a key file, fields and source are sealed with its key. Servers of one model share the folder. So before
each answer, a server looks whether another server changed or ended a resource. A file gets its name only when it is
complete and on disk, so no lock is needed: a reader finds the old content, the new content, or no file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from foreword import __version__
from foreword.config import TierConfig, user_path
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.tiers.cipher import AesGcm, Cipher, read_secret
from foreword.tiers.disk.directory import check_private
from foreword.tiers.disk.files import RealFiles, close_quietly, read_fully, write_fully

OVERHEAD_BYTES = 1024
"""Estimated bytes of a resource without its source."""
_ID = re.compile(r"[0-9a-f]{32}")
logger = logging.getLogger(__name__)
FOLDER_NAME = "cached_contents"
UNFINISHED = "new-"
UNFINISHED_S = 3600.0
"""Age in seconds from which an unfinished file is deleted, because its writer counts as dead."""
FORMAT, MAGIC = re.compile(rb"foreword cached content (\d{1,9})\n"), b"foreword cached content 1\n"
HEAD_BYTES = len(MAGIC) + 16 + 32
MAX_FILE_BYTES = 256 * 2**20
MOST_OF_ALL = 16
"""The limit of the resources of all tenants together, in multiples of one tenant's limit."""
MAX_BYTES_OF_TENANT, MAX_BYTES = 64 * 2**20, 256 * 2**20


@dataclass(frozen=True, slots=True)
class CachedContent:
    """One resource. Times are in microseconds since 1970."""

    id: str
    tenant: str
    model: str
    """The served model's name as its creator gave it."""
    display_name: str
    cache_salt: str | None
    source: bytes
    """The beginning of conversations, as JSON text in UTF-8."""
    created_us: int
    updated_us: int
    expires_us: int
    num_tokens: int = 0
    """The number of tokens that the source has in a prompt."""

    @property
    def num_bytes(self) -> int:
        names = (self.id, self.tenant, self.model, self.display_name, self.cache_salt or "")
        return len(self.source) + sum(map(sys.getsizeof, names)) + OVERHEAD_BYTES


def new_content_id() -> str:
    """Make an id that nobody can guess."""
    return secrets.token_hex(16)


def is_content_id(name: str) -> bool:
    """Say whether a name is a possible id, and so a safe part of a path."""
    return _ID.fullmatch(name) is not None


_CONTENT = TypeAdapter(CachedContent)


Version = tuple[int, int, int]
"""The version of a file: modification time in ns, bytes, inode. If the content may differ, the versions differ."""


def _version(status: os.stat_result) -> Version:
    return status.st_mtime_ns, status.st_size, status.st_ino


def open_folder(options: TierConfig, model_id: str) -> ContentFolder | None:
    """Open the folder of a model's cached contents; None without a cache directory, or if it cannot be used.

    Raises ConfigError for a folder that is not safe, or a key file that cannot be used.
    """
    if options.cache_dir is None:
        return None
    key_file = options.cache_key_file
    cipher = Cipher() if key_file is None else AesGcm(read_secret(user_path(key_file)))
    folder = ContentFolder(RealFiles(), cipher)
    try:
        folder.open(user_path(options.cache_dir), model_id[:32])
    except OSError as error:
        logger.warning("cached contents will not outlive this process: %s", error)
        return None
    return folder


class ContentFolder:
    """Reads and writes cached contents. Any thread may call it, but only one thread at a time."""

    def __init__(self, files: RealFiles, cipher: Cipher) -> None:
        self._files = files
        self._cipher = cipher
        self._path = Path()

    def open(self, cache_dir: Path, model: str) -> None:
        """Make the folder if it does not exist. Raises OSError, or ConfigError if other users can reach it."""
        path = Path(os.path.realpath(cache_dir))
        for name in (FOLDER_NAME, model):
            path = path / name
            try:
                self._files.make_folder(path)
            except FileExistsError:
                check_private(path, self._files.stat(path))
        self._path = path
        for name in self._files.list_folder(path):  # unfinished files of processes that were killed
            with suppress(FileNotFoundError):  # another process has finished or removed it
                if name.startswith(UNFINISHED) and self._files.stat(path / name).st_mtime < time.time() - UNFINISHED_S:
                    self._files.unlink(path / name)

    def versions(self) -> dict[str, Version]:
        """Return the versions of all files by id; empty if the folder is gone. Raises OSError."""
        try:
            names = self._files.list_folder(self._path)
        except FileNotFoundError:
            return {}
        versions = ((name, self.version(name)) for name in names if is_content_id(name))
        return {name: version for name, version in versions if version is not None}

    def version(self, content_id: str) -> Version | None:
        """Return the version of a file; None if there is no such file."""
        try:
            return _version(self._files.stat(self._path / content_id))
        except OSError:
            return None

    def read(self, content_id: str) -> CachedContent | None:
        """Read a file; None if it is gone. A file that is damaged or has another key is logged, and gives None too.

        Raises OSError, or APIError 409 if a newer version of foreword wrote the file.
        """
        path = self._path / content_id
        try:
            return self._opened(content_id, self._bytes(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning("the cached content %s is left out: %s; delete the file if nobody needs it", path, error)
            return None

    def write(self, item: CachedContent) -> Version:
        """Write a resource, which is on disk when this returns.

        If it raises OSError, the folder has the old file or the whole new file.
        """
        stored = self._sealed(item)
        unfinished = self._path / f"{UNFINISHED}{secrets.token_hex(8)}"
        fd = self._files.create(unfinished)
        try:
            write_fully(self._files, fd, memoryview(stored), 0, uncached=False)
            self._files.sync(fd)
            status = self._files.fstat(fd)
            self._files.rename(unfinished, self._path / item.id)
        except OSError:
            with suppress(OSError):
                self._files.unlink(unfinished)
            raise
        finally:
            close_quietly(self._files, fd)
        self._sync_names()
        return _version(status)

    def delete(self, content_id: str) -> None:
        """Delete a file if it exists. An error is logged."""
        try:
            self._files.unlink(self._path / content_id)
            self._sync_names()
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("the cached content %s cannot be deleted: %s", content_id, error)

    def _sync_names(self) -> None:
        fd = self._files.open_for_reading(self._path)
        try:
            self._files.sync(fd)
        finally:
            close_quietly(self._files, fd)

    def _bytes(self, path: Path) -> bytearray:
        fd = self._files.open_for_reading(path)
        try:
            num_bytes = self._files.fstat(fd).st_size
            if num_bytes > MAX_FILE_BYTES:
                raise ValueError(f"the file has {num_bytes} bytes")
            content = bytearray(num_bytes)
            return content[: read_fully(self._files, fd, memoryview(content), 0, uncached=False)]
        finally:
            close_quietly(self._files, fd)

    def _sealed(self, item: CachedContent) -> bytes:
        fields = {name: value for name, value in dataclasses.asdict(item).items() if name != "source"}
        payload = json.dumps(fields).encode() + b"\n" + item.source
        stored = bytearray(len(payload) + self._cipher.overhead_bytes)
        self._cipher.seal(_sealed_as(item.id), memoryview(payload), memoryview(stored))
        return MAGIC + self._cipher.cipher_id + hashlib.sha256(stored).digest() + stored

    def _opened(self, content_id: str, content: bytearray) -> CachedContent:
        """Read a file's content. Raises ValueError for content that `_sealed` did not write under this id."""
        head, stored = bytes(content[:HEAD_BYTES]), memoryview(content)[HEAD_BYTES:]
        written = FORMAT.match(head)
        if written is not None and int(written[1]) > 1:
            raise newer_content(content_id, f"in format {written[1].decode()}")
        if not head.startswith(MAGIC) or not head.endswith(hashlib.sha256(stored).digest()):
            raise ValueError("the file is damaged")
        if head[len(MAGIC) :][:16] != self._cipher.cipher_id:
            raise ValueError("the file was written with another key file, or without one")
        payload = self._cipher.open(_sealed_as(content_id), stored, memoryview(bytearray(len(stored))))
        if payload is None:
            raise ValueError("the file is not what was written under its name")
        fields, _, source = bytes(payload).partition(b"\n")
        try:
            item = _CONTENT.validate_python({**json.loads(fields), "source": source})
        except (ValueError, TypeError) as error:  # pydantic's message would repeat the file's content
            raise ValueError("the file has other fields") from error
        if item.id != content_id:
            raise ValueError("the file has the content of another")
        return item


def newer_content(content_id: str, what: str) -> APIError:
    """Return error 409: a newer version of foreword wrote the content. `what`: what this version cannot read."""
    return APIError(
        409,
        f"The cached content {content_id!r} was written {what} by a newer version of foreword, which this server "
        f"({__version__}) cannot read; update the server, or create the content again.",
        code="newer_version",
    )


def _sealed_as(content_id: str) -> bytes:
    return MAGIC + content_id.encode()


News = tuple[str, Version | None, CachedContent | APIError | None]


class CachedContents:
    """Cached contents by id. Only the event loop may call it. Threads read and write the files."""

    def __init__(self, clock: Callable[[], float], most_of_tenant: int, folder: ContentFolder | None = None) -> None:
        """Read the folder. `clock` returns seconds since 1970."""
        self._clock = clock
        self._most_of_tenant = most_of_tenant
        self._folder = folder
        self._contents: dict[str, CachedContent] = {}
        self._newer: dict[str, str] = {}
        """Id -> error, for each content that a newer version of foreword wrote."""
        self._versions: dict[str, Version] = {}
        """Id -> the version of the file when it was last read or written. Unwritten resources have none."""
        self._coming: list[CachedContent] = []
        self._writing = asyncio.Lock()
        if folder is not None:
            self._take(self._news(folder))
            for item in self._expired():
                self._forget(item.id)
                folder.delete(item.id)

    @property
    def now_us(self) -> int:
        """The wall clock in microseconds since 1970."""
        return int(self._clock() * 1e6)

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self._contents.values())

    # ------------------------------------------------------------------- asking

    async def find(self, tenant: Tenant, content_id: str) -> CachedContent | None:
        """Find a tenant's resource; None if it is unknown, expired, deleted or another tenant's.

        Raises APIError 409 if a newer version of foreword wrote the content.
        """
        if not is_content_id(content_id):
            return None
        if self._folder is not None and self._folder.version(content_id) != self._versions.get(content_id):
            await self._refresh()
        await self._end_expired()
        if content_id in self._newer:
            raise APIError(409, self._newer[content_id], code="newer_version")
        return self.now(tenant, content_id)

    def now(self, tenant: Tenant, content_id: str) -> CachedContent | None:
        """Return the result of `find` without a look at the folder."""
        item = self._contents.get(content_id)
        return item if item is not None and item.tenant == tenant.name and item.expires_us > self.now_us else None

    async def of_tenant(self, tenant: Tenant) -> list[CachedContent]:
        """Return a tenant's resources, the oldest first."""
        await self.tidy()
        items = (self.now(tenant, content_id) for content_id in self._contents)
        return sorted(filter(None, items), key=lambda item: (item.created_us, item.id))

    # ----------------------------------------------------------------- changing

    @contextmanager
    def room_for(self, item: CachedContent) -> Iterator[None]:
        """Reserve room for a resource while the context is open. Raises APIError 429 if there is no room."""
        others = [*self._contents.values(), *self._coming]
        siblings = [other for other in others if other.tenant == item.tenant]
        for items, limit, most_bytes in (
            (siblings, self._most_of_tenant, MAX_BYTES_OF_TENANT),
            (others, self._most_of_tenant * MOST_OF_ALL, MAX_BYTES),
        ):
            if len(items) >= limit or sum(other.num_bytes for other in items) + item.num_bytes > most_bytes:
                whose = "this tenant" if items is siblings else "all tenants together"
                message = (
                    f"Too many cached contents: {whose} may have {limit} of {most_bytes >> 20} MiB (the server's "
                    "max_cached_contents); delete one, or wait until one expires."
                )
                raise APIError(429, message, code="too_many_cached_contents")
        self._coming.append(item)
        try:
            yield
        finally:
            self._coming.remove(item)

    async def tidy(self) -> None:
        """Read changes that other servers made in the folder, and end expired resources."""
        await self._refresh()
        await self._end_expired()

    async def add(self, item: CachedContent) -> None:
        """Keep a resource. If there is a folder, the resource is on disk when this returns, or a warning was logged."""
        async with self._writing:
            self._contents[item.id] = item
            await self._write(item)

    async def set_end(self, item: CachedContent, expires_us: int, now_us: int) -> CachedContent | None:
        """Change the time at which a resource ends. Returns the changed resource; None if it has ended meanwhile."""
        async with self._writing:
            current = self._contents.get(item.id)
            if current is None or current.expires_us <= self.now_us:  # `now_us` may have been long ago
                return None
            changed = self._contents[item.id] = replace(current, expires_us=expires_us, updated_us=now_us)
            await self._write(changed)
            return changed

    async def delete(self, item: CachedContent) -> None:
        async with self._writing:
            self._forget(item.id)
            if self._folder is not None:
                await asyncio.to_thread(self._folder.delete, item.id)

    async def _end_expired(self) -> None:
        if self._expired():
            await self._refresh()  # another server may have moved an end
        for item in self._expired():
            await self.delete(item)

    def _expired(self) -> list[CachedContent]:
        now_us = self.now_us
        return [item for item in self._contents.values() if item.expires_us <= now_us]

    # ------------------------------------------------------------------- folder

    async def _write(self, item: CachedContent) -> None:
        if self._folder is None:
            return
        try:
            self._versions[item.id] = await asyncio.to_thread(self._folder.write, item)
        except OSError as error:
            logger.warning("a cached content will not outlive this process, it cannot be written: %s", error)

    async def _refresh(self) -> None:
        """Read the changes that other servers made in the folder."""
        folder = self._folder
        if folder is None:
            return
        async with self._writing:
            self._take(await asyncio.to_thread(self._news, folder))

    def _news(self, folder: ContentFolder) -> list[News]:
        """Return name, version and content of each file that is new, changed or gone. A gone file has the version None.

        Files that cannot be read now are left out.
        """
        try:
            there = folder.versions()
        except OSError as error:
            logger.warning("cached contents cannot be listed: %s", error)
            return []
        news: list[News] = [(name, None, None) for name in self._versions.keys() - there.keys()]
        for name, version in there.items():
            if version != self._versions.get(name):
                try:
                    news.append((name, version, folder.read(name)))
                except OSError as error:
                    logger.warning("a cached content cannot be read: %s", error)
                except APIError as error:
                    logger.warning("%s", error)
                    news.append((name, version, error))
        return news

    def _take(self, news: list[News]) -> None:
        for name, version, item in news:
            self._forget(name)
            if version is not None:
                self._versions[name] = version  # damaged files have a version too, so that each is read only once
            if isinstance(item, APIError):
                self._newer[name] = str(item)  # the error itself would keep the file's bytes
            elif item is not None:
                self._contents[name] = item

    def _forget(self, content_id: str) -> None:
        for by_id in (self._contents, self._newer, self._versions):
            by_id.pop(content_id, None)

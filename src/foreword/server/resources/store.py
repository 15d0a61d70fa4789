"""CachedContents: the cached contents of all tenants, bounded in number and bytes.

The folder may belong to several servers, so it is asked before each answer whether another one changed or ended a
resource.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.resources.folder import CachedContent, ContentFolder, Version, is_content_id

logger = logging.getLogger(__name__)

MOST_OF_ALL = 16
"""All tenants together may have this many times what one may have."""
MAX_BYTES_OF_TENANT, MAX_BYTES = 64 * 2**20, 256 * 2**20


class CachedContents:
    """Resources by id. Belongs to the event loop; files are read and written in threads."""

    def __init__(self, clock: Callable[[], float], most_of_tenant: int, folder: ContentFolder | None = None) -> None:
        """Reads what the folder holds. `clock`: seconds since 1970."""
        self._clock = clock
        self._most_of_tenant = most_of_tenant
        self._folder = folder
        self._kept: dict[str, CachedContent] = {}
        self._versions: dict[str, Version] = {}
        """The files that `_kept` agrees with; a resource that could not be written has none."""
        self._coming: list[CachedContent] = []
        self._writing = asyncio.Lock()
        if folder is not None:
            self._take(self._news(folder))
            for one in self._expired():
                self._forget(one.id)
                folder.delete(one.id)

    @property
    def now_us(self) -> int:
        """The wall clock in microseconds."""
        return int(self._clock() * 1e6)

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of everything that is kept."""
        return sum(one.num_bytes for one in self._kept.values())

    # ------------------------------------------------------------------- asking

    async def find(self, tenant: Tenant, content_id: str) -> CachedContent | None:
        """A tenant's resource; None if it is unknown, expired, deleted or another tenant's."""
        if not is_content_id(content_id):
            return None
        if self._folder is not None and self._folder.version(content_id) != self._versions.get(content_id):
            await self._refresh()
        await self._end_expired()
        return self.now(tenant, content_id)

    def now(self, tenant: Tenant, content_id: str) -> CachedContent | None:
        """What `find` would return, by what this process knows."""
        one = self._kept.get(content_id)
        return one if one is not None and one.tenant == tenant.name and one.expires_us > self.now_us else None

    async def of_tenant(self, tenant: Tenant) -> list[CachedContent]:
        """A tenant's resources, the oldest first."""
        await self._refresh()
        await self._end_expired()
        found = (one for one in self._kept.values() if one.tenant == tenant.name and one.expires_us > self.now_us)
        return sorted(found, key=lambda one: (one.created_us, one.id))

    # ----------------------------------------------------------------- changing

    @contextmanager
    def room_for(self, one: CachedContent) -> Iterator[None]:
        """Hold room for a resource until it is added. Raises APIError 429 if there is none."""
        others = [*self._kept.values(), *self._coming]
        own = [other for other in others if other.tenant == one.tenant]
        for kept, most, most_bytes in (
            (own, self._most_of_tenant, MAX_BYTES_OF_TENANT),
            (others, self._most_of_tenant * MOST_OF_ALL, MAX_BYTES),
        ):
            if len(kept) >= most or sum(other.num_bytes for other in kept) + one.num_bytes > most_bytes:
                whose = "this tenant" if kept is own else "all tenants together"
                raise APIError(
                    429,
                    f"Too many cached contents: {whose} may have {most} of {most_bytes >> 20} MiB (the server's "
                    "max_cached_contents); delete one, or wait until one expires.",
                    kind="rate_limit_error",
                    code="too_many_cached_contents",
                )
        self._coming.append(one)
        try:
            yield
        finally:
            self._coming.remove(one)

    async def tidy(self) -> None:
        """End what has expired, and learn what other servers of the folder did."""
        await self._refresh()
        await self._end_expired()

    async def add(self, one: CachedContent) -> None:
        """Keep a resource; it is on disk when this returns, if there is a folder."""
        async with self._writing:
            self._kept[one.id] = one
            await self._write(one)

    async def set_end(self, one: CachedContent, expires_us: int, now_us: int) -> CachedContent | None:
        """Move the end of a resource; returns it as it is then, None if it has ended meanwhile."""
        async with self._writing:
            known = self._kept.get(one.id)
            if known is None or known.expires_us <= now_us:
                return None
            changed = self._kept[one.id] = known.until(expires_us, now_us)
            await self._write(changed)
            return changed

    async def delete(self, one: CachedContent) -> None:
        """End a resource now."""
        async with self._writing:
            self._forget(one.id)
            if self._folder is not None:
                await asyncio.to_thread(self._folder.delete, one.id)

    async def _end_expired(self) -> None:
        if self._expired():
            await self._refresh()  # another server may have moved an end
        for one in self._expired():
            await self.delete(one)

    def _expired(self) -> list[CachedContent]:
        now_us = self.now_us
        return [one for one in self._kept.values() if one.expires_us <= now_us]

    # ------------------------------------------------------------------- folder

    async def _write(self, one: CachedContent) -> None:
        if self._folder is None:
            return
        try:
            self._versions[one.id] = await asyncio.to_thread(self._folder.write, one)
        except OSError as error:
            logger.warning("a cached content will not outlive this process, it cannot be written: %s", error)

    async def _refresh(self) -> None:
        """Learn what other servers of the folder did."""
        folder = self._folder
        if folder is None:
            return
        async with self._writing:
            self._take(await asyncio.to_thread(self._news, folder))

    def _news(self, folder: ContentFolder) -> list[tuple[str, Version | None, CachedContent | None]]:
        """The files that differ from what is known, and what they hold; those are left out that cannot be read now."""
        try:
            there = folder.versions()
        except OSError as error:
            logger.warning("cached contents cannot be listed: %s", error)
            return []
        news: list[tuple[str, Version | None, CachedContent | None]] = [
            (name, None, None) for name in self._versions.keys() - there.keys()
        ]
        for name, version in there.items():
            if version != self._versions.get(name):
                try:
                    news.append((name, version, folder.read(name)))
                except OSError as error:
                    logger.warning("a cached content cannot be read: %s", error)
        return news

    def _take(self, news: list[tuple[str, Version | None, CachedContent | None]]) -> None:
        for name, version, one in news:
            self._forget(name)
            if version is not None:
                self._versions[name] = version  # of damaged ones too, so that they are read once
            if one is not None:
                self._kept[name] = one

    def _forget(self, content_id: str) -> None:
        self._kept.pop(content_id, None)
        self._versions.pop(content_id, None)

"""Fetches pictures at URLs, only from the domains that the operator allows.

A client's URL could reach into the server's own network. So a name is resolved once, and each of its addresses must be
public. The connection goes to an address that was checked, so a name that resolves to another address a moment later
(DNS rebinding) does no harm. Redirects are not followed and no proxy is used. Bytes and time are limited before
anything is decoded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import NoReturn

import httpx

from foreword.errors import ConfigError, InvalidRequestError
from foreword.pictures import MAX_FILE_BYTES, PictureFile
from foreword.request import HeldBytes
from foreword.server.crews import Crew

FETCH_S = 10.0
"""Limit of a fetch in seconds, from the resolution of the name to the picture's last byte."""
MOST_ADDRESSES = 3
"""The number of a name's addresses that are tried, in the order of the resolver."""
RESOLVERS = 8
"""The number of threads that resolve names. A thread may take longer than `FETCH_S`."""
_PORTS = {"http": 80, "https": 443}
_EMBEDDING = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that stand for an IPv4 address (RFC 6052)."""
_GLOBAL = ipaddress.IPv6Network("2000::/3")
"""The range of the IPv6 addresses of all machines on the internet."""
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")
"""Addresses for documentation, which no machine has (RFC 9637). Older versions of Python do not know this range."""


def is_public(address: str) -> bool:
    """Say whether an IP address belongs to a machine on the internet, not to this machine or a private network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped or ip in _EMBEDDING:
            ip = ip.ipv4_mapped or ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip not in _GLOBAL or ip in _DOCUMENTATION or ip.sixtofour or ip.teredo:
            return False
    return ip.is_global and not ip.is_multicast


def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a name. Raises OSError or UnicodeError."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class MediaDomains:
    """Fetches pictures from the allowed domains. Any thread may call it."""

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        crew: Crew,
        held: HeldBytes,
        *,
        seconds: float = FETCH_S,
        resolve: Callable[[str, int], list[str]] = resolve,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        """`domains`: names that clients may give, each perhaps with a port (host:port).

        `max_bytes`: limit of the pictures that one call fetches; `crew`: threads that fetch; `held`: counts the bytes
        of all requests. Only tests change `seconds`, `resolve` and `is_allowed`. Raises ConfigError.
        """
        self._places = {place for domain in domains for place in _places(domain)}
        self._max_bytes, self._crew, self._held = max_bytes, crew, held
        self._seconds, self._resolve, self._is_allowed = seconds, resolve, is_allowed
        self._resolvers = ThreadPoolExecutor(RESOLVERS, "resolve")

    async def fill(self, files: Sequence[PictureFile], fetched: ExitStack) -> None:
        """Fetch the pictures that have a URL and no bytes yet. Their bytes are counted until `fetched` is closed.

        Raises InvalidRequestError, MediaBusyError, or APIError 429.
        """
        bytes_left = self._max_bytes
        for file in files:
            url = file.url
            if url is None or file.data is not None:
                continue
            data = await self._crew.run(partial(self._fetch, url, min(bytes_left, MAX_FILE_BYTES)))
            fetched.enter_context(self._held.holding(len(data)))
            bytes_left -= len(data)
            file.fill(data)

    def _fetch(self, text: str, max_bytes: int) -> bytes:
        """Return the bytes of a file, at most `max_bytes`. Raises InvalidRequestError or MediaBusyError."""
        try:
            url = httpx.URL(text)
            place = url.raw_host.decode().lower(), url.port or _PORTS[url.scheme]
            if url.userinfo or place not in self._places:
                raise KeyError
        except (httpx.InvalidURL, KeyError, ValueError):
            _refuse(text, "its domain is not one that the server fetches from (--allow-media-domain)")
        try:
            with self._held.holding(max_bytes):
                return asyncio.run(self._bounded(url, place, max_bytes))
        except TimeoutError:
            _refuse(text, f"it took more than {self._seconds:g} s")
        except httpx.HTTPError as error:
            _refuse(text, f"the connection failed ({type(error).__name__})")

    async def _bounded(self, url: httpx.URL, place: tuple[str, int], max_bytes: int) -> bytes:
        async with asyncio.timeout(self._seconds):
            try:
                addresses = await asyncio.wrap_future(self._resolvers.submit(self._resolve, *place))
            except (OSError, UnicodeError):
                _refuse(str(url), "its domain has no address")
            if not addresses or not all(map(self._is_allowed, addresses)):
                _refuse(str(url), "its domain leads to an address that is not public")
            addresses = addresses[:MOST_ADDRESSES]
            limits = httpx.Timeout(self._seconds, connect=self._seconds / (len(addresses) + 1))
            for address in addresses[:-1]:
                with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await self._read(url, address, max_bytes, limits)
            return await self._read(url, addresses[-1], max_bytes, limits)

    async def _read(self, url: httpx.URL, address: str, max_bytes: int, limits: httpx.Timeout) -> bytes:
        """Read the file from the machine at `address`. HTTP and TLS still use the name in the URL."""
        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        request = httpx.Request(
            "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": url.raw_host.decode()}
        )
        data = bytearray()
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=limits) as client:
            answer = await client.send(request, stream=True)
            if answer.status_code != 200:
                _refuse(str(url), f"its server answers {answer.status_code}, and redirects are not followed")
            if answer.headers.get("content-encoding", "identity") != "identity":
                _refuse(str(url), "its server compresses it, though it was asked not to")
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > max_bytes:
                    _refuse(str(url), f"it has more than the {max_bytes} bytes that are left for it")
        return bytes(data)


def _places(domain: str) -> list[tuple[str, int]]:
    """Return the host of an allowed domain with each of its ports. Raises ConfigError."""
    match = re.fullmatch(r"([a-z0-9.-]+)(?::(\d{1,5}))?", domain.lower())
    if match is None:
        raise ConfigError(
            f"allow_media_domain={domain!r} is not a domain; use a whole name such as images.example.com, or host:port"
        )
    return [(match[1], int(match[2]))] if match[2] else [(match[1], port) for port in _PORTS.values()]


def _refuse(url: str, reason: str) -> NoReturn:
    raise InvalidRequestError(
        f"the picture at {url!r:.80} is not fetched: {reason}; send its bytes as data:image/png;base64,..."
    )

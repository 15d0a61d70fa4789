"""Operators: callers that may see all prompts and change what all tenants share.

The rule (decision 0012):

    with an operator key                  callers that show this key, from anywhere
    without, server asks for keys         nobody, because keys are tenants' keys, and a local caller may be a proxy
    without, server asks for no keys      callers from this machine, under one of its own names
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from foreword.server.access.tenants import digest, shown_key
from foreword.server.api_errors import APIError

COOKIE = "foreword_operator"
SESSION_S = 12 * 3600.0
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Operators:
    """Decides whether a caller is an operator. Only the event loop may use it."""

    def __init__(
        self, operator_key: str | None, *, asks_for_keys: bool, is_tenants: Callable[[str], bool] = lambda _: False
    ) -> None:
        """`is_tenants` says whether a key belongs to a tenant."""
        self._key = None if operator_key is None else digest(operator_key)
        self._asks_for_keys = asks_for_keys
        self._is_tenants = is_tenants
        self._sessions: dict[bytes, float] = {}

    @property
    def have_a_key(self) -> bool:
        return self._key is not None

    def check(self, scope: Scope) -> None:
        """Raise APIError 401 or 403 unless the connection (HTTP or WebSocket) is an operator's."""
        headers = Headers(scope=scope)
        if self._key is not None:
            key = shown_key(headers)
            if not (self._is_key(key) or self._has_session(headers)):
                if self._is_tenants(key or ""):
                    raise _closed("this key is a tenant's; send the operator's")
                raise APIError(
                    401,
                    "This needs the operator's key: send 'Authorization: Bearer KEY' with it.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif self._asks_for_keys:
            raise _closed("start the server with --operator-key (or FOREWORD_OPERATOR_KEY) to open it")
        elif not _is_local(scope, headers):
            raise _closed("it is open to this machine alone; start the server with --operator-key to reach it remotely")
        if not _is_same_origin(headers):
            raise _closed("another web page asked for it")

    def is_operator(self, scope: Scope) -> bool:
        """Say whether `check` accepts the connection."""
        try:
            self.check(scope)
        except APIError:
            return False
        return True

    def open_session(self, key: str) -> str | None:
        """Open a session for a caller that knows the key. Returns the cookie's value; None for other callers."""
        if not self._is_key(key):
            return None
        now = time.monotonic()
        self._sessions = {session: end for session, end in self._sessions.items() if end > now}
        token = secrets.token_urlsafe(32)
        self._sessions[digest(token)] = now + SESSION_S
        return token

    def _is_key(self, key: str | None) -> bool:
        return key is not None and self._key is not None and hmac.compare_digest(digest(key), self._key)

    def _has_session(self, headers: Mapping[str, str]) -> bool:
        token = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return self._sessions.get(digest(token), 0.0) > time.monotonic()


def _closed(remedy: str) -> APIError:
    return APIError(403, f"This is for operators of the server only: {remedy}.", code="operators_only")


def _is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Say whether the caller is on this machine, without a proxy, and uses a name that only this machine has.

    The name matters, because a web page can let its own name resolve to 127.0.0.1, and could then read the answers.
    """
    client = scope.get("client")
    if client is None or not is_loopback(client[0]) or any(name in headers for name in _FORWARDED):
        return False
    host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    return is_loopback(host)


def is_loopback(host: str) -> bool:
    """Say whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Say whether the call comes from this server's own web page, or from no web page, by the header `Origin`."""
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")

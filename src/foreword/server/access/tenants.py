"""Tenants: the owner of each key, and the namespace in which a tenant's prefixes are cached.

A keys file is TOML, one table per tenant:

    [alice]
    keys = ["sk-alice-1", "sk-alice-2"]
    max_cached_blocks = 2000          # optional: the server evicts blocks beyond this number, in eviction order
    priorities = [0, 10]              # optional: the lowest and the highest `priority` that its requests may have
    adapters = ["sql"]                # optional: the names of the adapters that it may use; without it, all

    [bob]
    keys = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]

A namespace is a keyed hash of the tenant's name with the server's secret, so nobody can guess another tenant's
namespace. A client cannot reach another tenant's blocks by any `cache_salt` or name that it chooses. A client's
`cache_salt` makes namespaces within its tenant's namespace.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.cache import common_length
from foreword.errors import ConfigError
from foreword.server.api_errors import bad_request
from foreword.server.engine_thread import Ended

logger = logging.getLogger(__name__)
ANYBODY = "default"
"""The tenant of a server that asks for no key, or has only one key."""
DASHBOARD = "(dashboard)"
"""The tenant of the dashboard's chat on a server that asks for keys."""
_HASHED = "sha256:"
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user or group whose cached prompts other tenants cannot find."""

    name: str
    max_cached_blocks: int | None = None
    priorities: tuple[int, int] | None = None
    """The lowest and the highest priority that the tenant's requests may have; None: any priority."""
    adapters: frozenset[str] | None = None
    """The names of the adapters that the tenant may use; None: all adapters."""

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters

    def check_priority(self, priority: int) -> None:
        """Raise APIError 400 for a priority that is not permitted."""
        if self.priorities is not None and not self.priorities[0] <= priority <= self.priorities[1]:
            raise bad_request(
                f"priority={priority} is not permitted to this key; use {self.priorities[0]} to {self.priorities[1]}",
                param="priority",
            )


class Tenants:
    """The keys of a server. Only one thread may use an instance."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        keys_file: Path | None = None,
        server_secret: str | None = None,
        quotas_work: bool = True,
    ) -> None:
        """Read the keys file. Raises ConfigError if it cannot be read, or has quotas while `quotas_work` is false."""
        has_keys = api_key is not None or keys_file is not None
        # Without keys there is one tenant. Its salts name the same prefixes after a restart, and on other servers.
        self._secret = (server_secret or (secrets.token_hex(32) if has_keys else "")).encode()
        self._always = {} if api_key is None else {digest(api_key): Tenant(ANYBODY)}
        self._file = keys_file
        self._quotas_work = quotas_work
        self._version: tuple[int, ...] | None = None
        self._complaint: str | None = None
        """Why the last attempt to read the file again failed; None if it succeeded."""
        self._tenant_of: Mapping[bytes, Tenant] = self._always
        if keys_file is not None:
            self._version = _version(keys_file)
            self._tenant_of = {**self._read(keys_file), **self._always}

    def _read(self, path: Path) -> dict[bytes, Tenant]:
        tenant_of = read_keys(path)
        limited = next((t.name for t in tenant_of.values() if t.max_cached_blocks is not None), None)
        if limited is not None and not self._quotas_work:
            raise ConfigError(
                f"keys file {str(path)!r}, tenant {limited!r}: max_cached_blocks needs the cache's account of what it "
                "holds; leave explain_misses on, or the quota out"
            )
        return tenant_of

    @property
    def asks_for_keys(self) -> bool:
        return self._file is not None or bool(self._always)

    def tenant_of(self, key: str | None) -> Tenant | None:
        """Return the tenant of a key; None for an unknown key.

        Keys are compared by their hashes, so the time of a comparison reveals nothing about a key.
        """
        if not self.asks_for_keys:
            return Tenant(ANYBODY)
        self._reload()
        return None if key is None else self._tenant_of.get(digest(key))

    def has_key(self, key: str) -> bool:
        return self.asks_for_keys and self.tenant_of(key) is not None

    def namespace(self, tenant: Tenant, cache_salt: str | None) -> str | None:
        """Return the salt of a tenant's prefixes: TENANT, or TENANT/CLIENT with a `cache_salt`. Both parts are hashes.

        Returns None if the server asks for no keys and the client gives no `cache_salt`.
        """
        if not self.asks_for_keys and cache_salt is None:
            return None
        namespace = self.namespace_of_all(tenant)
        return namespace if cache_salt is None else f"{namespace}/{self._keyed_hash('salt', tenant.name, cache_salt)}"

    def owner(self, tenant: Tenant) -> str | None:
        """Return the owner whose budget a tenant's cache entries use; None if all clients are one tenant."""
        return tenant.name if self.asks_for_keys else None

    def namespace_of_all(self, tenant: Tenant) -> str:
        """Return the beginning of all namespaces of a tenant. No other tenant's namespace begins with it."""
        return self._keyed_hash("tenant", tenant.name)

    def _keyed_hash(self, *parts: str) -> str:
        message = b"".join(
            len(data).to_bytes(8, "little") + data for data in (part.encode("utf-8", "surrogatepass") for part in parts)
        )
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:32]

    def _reload(self) -> None:
        """Read the keys file again if it has changed. If it cannot be read, the keys stay as they are."""
        if self._file is None:
            return
        try:
            version = _version(self._file)
            if version == self._version:
                return
            self._version = version
            self._tenant_of = {**self._read(self._file), **self._always}
        except ConfigError as error:
            if str(error) != self._complaint:  # every request finds the same error, so log it once
                self._complaint = str(error)
                logger.error("the keys stay as they were: %s", error)
        else:
            self._complaint = None
            logger.info("read %d keys from %s", len(self._tenant_of), self._file)


def shown_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request from `Authorization: Bearer KEY`, or else `x-api-key: KEY`; None without a key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """Read a keys file: SHA-256 of each key -> its tenant. Raises ConfigError if the file is not valid."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unreadable(path, error) from error
    tenant_of: dict[bytes, Tenant] = {}
    for name, table in tables.items():
        tenant, digests = _read_tenant(path, name, table)
        for key in digests:
            if tenant_of.setdefault(key, tenant) is not tenant:
                raise ConfigError(f"keys file {str(path)!r}: {name!r} has another tenant's key; give it its own")
    return tenant_of


def _unreadable(path: Path, error: Exception) -> ConfigError:
    remedy = "--keys-file takes a TOML file that the server may read, with a table such as [alice] for each tenant"
    return ConfigError(f"keys file {str(path)!r} cannot be read: {error}; {remedy}")


def _read_tenant(path: Path, name: str, table: Any) -> tuple[Tenant, list[bytes]]:
    where = f"keys file {str(path)!r}, tenant {name!r}"
    if name in (ANYBODY, DASHBOARD):
        raise ConfigError(f"{where}: this name is the server's own, and would share its cache; choose another")
    if not isinstance(table, dict) or set(table) - {"keys", "max_cached_blocks", "priorities", "adapters"}:
        raise ConfigError(
            f"{where}: give a table with 'keys' and, if you like, 'max_cached_blocks', 'priorities' and 'adapters'"
        )
    keys, quota = table.get("keys"), table.get("max_cached_blocks")
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        raise ConfigError(f"{where}: 'keys' must be a list of strings that are not empty")
    if quota is not None and (type(quota) is not int or quota < 0):
        raise ConfigError(f"{where}: max_cached_blocks={quota!r} is not a number of blocks; use 0 or more")
    priorities, adapters = _priorities(where, table.get("priorities")), table.get("adapters")
    if adapters is not None:
        if not isinstance(adapters, list) or not all(isinstance(adapter, str) for adapter in adapters):
            raise ConfigError(f"{where}: adapters={adapters!r:.80} must be a list of names such as ['sql'], or []")
        adapters = frozenset(adapters)
    try:
        return Tenant(name, quota, priorities, adapters), [_stored_digest(key) for key in keys]
    except ValueError as error:
        raise ConfigError(f"{where}: what follows 'sha256:' must be 64 hexadecimal digits") from error


def _priorities(where: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or [type(number) for number in value] != [int, int] or not value[0] <= 0 <= value[1]:
        raise ConfigError(
            f"{where}: priorities={value!r} must be two numbers with 0, the default, between them, such as [-5, 5]"
        )
    return value[0], value[1]


def _stored_digest(key: str) -> bytes:
    if not key.startswith(_HASHED):
        return digest(key)
    stored = bytes.fromhex(key.removeprefix(_HASHED))
    if len(stored) != hashlib.sha256().digest_size:
        raise ValueError(key)
    return stored


def digest(key: str) -> bytes:
    """Return a key's SHA-256. Keys are compared by their hashes, so that the time of a comparison reveals nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


SETTLED_S = 2.0
"""Seconds after a change during which a file may change again without a new date."""


def _version(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    # A file may change twice within a tick of the kernel's clock, with the same date. So a file that changed a moment
    # ago has a new version at each call, and is read again.
    settled = 0 if time.time() - status.st_ctime > SETTLED_S else time.time_ns()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, settled


class Quotas:
    """Evicts the blocks beyond a tenant's quota whenever one of the tenant's requests ends.

    Blocks that requests hold stay. Free blocks are evicted in the usual order. Blocks of public prefixes count for no
    tenant.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.shrink: Callable[[str, int], None] = lambda namespace, max_blocks: None
        """Shrinks a namespace's share of each engine's cache to this number of blocks."""
        self._tenants = tenants
        self._limits: dict[str, tuple[str, int]] = {}

    def note(self, tenant: Tenant) -> None:
        """Record a tenant's quota. Called on the event loop. The engine's thread reads the quota at a later step."""
        if tenant.max_cached_blocks is not None:
            self._limits[tenant.name] = (self._tenants.namespace_of_all(tenant), tenant.max_cached_blocks)
        else:
            self._limits.pop(tenant.name, None)

    def enforce(self, ended: Sequence[Ended]) -> None:
        """For each tenant with an ended request, evict the cached blocks beyond the tenant's quota."""
        for name in {request.job.record.tenant for request in ended}:
            limit = self._limits.get(name)
            if limit is not None:
                self.shrink(*limit)


def read_prefix(path: Path) -> str:
    """Read the text of a public prefix. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"shared prefix {str(path)!r} cannot be read as UTF-8 text: {error}") from error


def num_shared(prompt: TokenIds, prefixes: Sequence[TokenIds]) -> int:
    """Return the number of a prompt's public tokens: the length of the longest of `prefixes` that begins the prompt.

    Only whole prefixes count. If a prompt ends or differs inside a public prefix, no token of this prefix is shared.
    """
    return max((len(prefix) for prefix in prefixes if np.array_equal(prompt[: len(prefix)], prefix)), default=0)


def common_beginning(encodings: Sequence[TokenIds]) -> TokenIds:
    """Return the common prefix of encodings of a text with different continuations.

    A text's last tokens depend on its continuation, but the common tokens of these encodings do not.
    """
    first = encodings[0]
    for other in encodings[1:]:
        first = first[: common_length(first, other)]
    return first

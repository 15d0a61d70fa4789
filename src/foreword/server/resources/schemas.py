"""KeptSchemas: the schemas of prompt modules that tenants have given, limited in number, tokens and bytes.

It keeps texts and token ids. The KV of modules is in the cache like the KV of any prompt, in the tenant's namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foreword.pml.library import Library, LoadedSchema
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError

MAX_SCHEMAS = 256
"""Limit of a tenant's schemas."""
MOST_OF_ALL = 16
"""The limit of the tokens of all tenants together, in multiples of one tenant's limit."""
MAX_BYTES_OF_TENANT, MAX_BYTES = 64 * 2**20, 256 * 2**20


@dataclass(frozen=True, slots=True)
class ServedSchema:
    """A schema, and its report as JSON text. The report is kept, because making it takes long."""

    schema: LoadedSchema
    report: bytes

    @property
    def num_bytes(self) -> int:
        return self.schema.layout.num_bytes + len(self.report)


class KeptSchemas:
    """Schemas by tenant and name. Only the event loop may call methods other than `load`."""

    def __init__(self, open_library: Callable[[], Library], max_tokens: int) -> None:
        """`max_tokens`: the limit of the tokens of one tenant's schemas."""
        self._open_library, self._max_tokens = open_library, max_tokens
        self._library: Library | None = None
        self._schemas: dict[str, dict[str, ServedSchema]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(schema.num_bytes for schema in self._all())

    def load(self, text: str, go_on: Callable[[], object] = lambda: None) -> LoadedSchema:
        """Lay out a schema. Call it in a thread, because it may take long.

        Calls `go_on` repeatedly. If `go_on` raises an exception, the work ends. Raises InvalidRequestError with the
        place of a mistake.
        """
        if self._library is None:
            self._library = self._open_library()
        library = self._library
        bounds = replace(library.bounds, max_tokens=self._max_tokens, go_on=go_on)
        return replace(library, bounds=bounds).load_text(text)

    def add(self, tenant: Tenant, new: ServedSchema) -> None:
        """Keep a schema, which replaces a schema of the same name. Raises APIError 429 if there is no room."""
        name, of_tenant = new.schema.name, self._schemas.get(tenant.name, {})
        others = [schema for schema in of_tenant.values() if schema.schema.name != name]
        replaced = of_tenant.get(name)
        tokens, num_bytes = _totals([*others, new])
        if tokens > self._max_tokens:
            raise _no_room(f"this tenant's would have {tokens:,} tokens, and may have {self._max_tokens:,}")
        if num_bytes > MAX_BYTES_OF_TENANT:
            raise _no_room(f"this tenant's would take {num_bytes:,} bytes, and may take {MAX_BYTES_OF_TENANT:,}")
        tokens, num_bytes = _totals([*(schema for schema in self._all() if schema is not replaced), new])
        if tokens > MOST_OF_ALL * self._max_tokens:
            raise _no_room(f"those of all tenants would have more than {MOST_OF_ALL * self._max_tokens:,} tokens")
        if num_bytes > MAX_BYTES:
            raise _no_room(f"those of all tenants would take more than {MAX_BYTES:,} bytes")
        if len(others) >= MAX_SCHEMAS:
            raise _no_room(f"this tenant has {len(others)}, the most that one may have")
        self._schemas.setdefault(tenant.name, {})[name] = new

    def _all(self) -> list[ServedSchema]:
        return [schema for schemas in self._schemas.values() for schema in schemas.values()]

    def of_tenant(self, tenant: Tenant, name: str) -> ServedSchema:
        """Return a tenant's schema. Raises APIError 404, also for other tenants' schemas."""
        schema = self._schemas.get(tenant.name, {}).get(name)
        if schema is None:
            message = f"There is no schema {name!r:.100} here; POST /v1/pml/schemas takes one."
            raise APIError(404, message, code="schema_not_found")
        return schema

    def all_of_tenant(self, tenant: Tenant) -> list[ServedSchema]:
        """Return a tenant's schemas, the oldest first."""
        return list(self._schemas.get(tenant.name, {}).values())

    def drop(self, tenant: Tenant, name: str) -> None:
        """Forget a schema. Raises APIError 404."""
        self.of_tenant(tenant, name)
        del self._schemas[tenant.name][name]


def _totals(schemas: Sequence[ServedSchema]) -> tuple[int, int]:
    return sum(each.schema.num_tokens for each in schemas), sum(each.num_bytes for each in schemas)


def _no_room(what: str) -> APIError:
    message = f"There is no room for this schema: {what} (the server's max_schema_tokens); delete another one."
    return APIError(429, message, code="too_many_schemas")

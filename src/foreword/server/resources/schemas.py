"""KeptSchemas: the schemas of prompt modules that tenants have given, bounded in number and tokens.

Knows tenants and schemas; knows nothing of prompts. What is kept are texts and token ids: the KV of modules lies in the
cache like that of any other prompt, in the tenant's own namespace.
"""

from __future__ import annotations

from collections.abc import Callable

from foreword.pml.library import Library, LoadedSchema
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError

MAX_SCHEMAS = 256
"""Most schemas of one tenant."""
MOST_OF_ALL = 16
"""All tenants together may have this many times what one may have."""


class KeptSchemas:
    """Schemas by tenant and name. Belongs to the event loop, except `load`."""

    def __init__(self, open_library: Callable[[], Library], max_tokens: int) -> None:
        """`max_tokens`: most tokens of one tenant's schemas."""
        self._open_library, self._max_tokens = open_library, max_tokens
        self._library: Library | None = None
        self._kept: dict[str, dict[str, LoadedSchema]] = {}

    def load(self, text: str) -> LoadedSchema:
        """Lay out a schema, which may take long: call it in a thread. Raises InvalidRequestError, with the place."""
        if self._library is None:
            self._library = self._open_library()
        return self._library.load_text(text)

    def add(self, tenant: Tenant, schema: LoadedSchema) -> None:
        """Keep a schema under its name, in place of one of the same name. Raises APIError 429 if there is no room."""
        own = self._kept.get(tenant.name, {})
        others = [one for name, one in own.items() if name != schema.name]
        of_all = sum(one.num_tokens for schemas in self._kept.values() for one in schemas.values())
        replaced = own[schema.name].num_tokens if schema.name in own else 0
        tokens = sum(one.num_tokens for one in others) + schema.num_tokens
        if tokens > self._max_tokens:
            raise _no_room(f"this tenant's would have {tokens:,} tokens, and may have {self._max_tokens:,}")
        most_of_all = MOST_OF_ALL * self._max_tokens
        if of_all - replaced + schema.num_tokens > most_of_all:
            raise _no_room(f"those of all tenants would have more than {most_of_all:,} tokens")
        if len(others) >= MAX_SCHEMAS:
            raise _no_room(f"this tenant has {len(others)}, the most that one may have")
        self._kept.setdefault(tenant.name, {})[schema.name] = schema

    def of_tenant(self, tenant: Tenant, name: str) -> LoadedSchema:
        """A tenant's schema. Raises APIError 404, for those of others too."""
        schema = self._kept.get(tenant.name, {}).get(name)
        if schema is None:
            raise APIError(
                404, f"There is no schema {name!r:.100} here; POST /v1/pml/schemas takes one.", code="schema_not_found"
            )
        return schema

    def all_of_tenant(self, tenant: Tenant) -> list[LoadedSchema]:
        """A tenant's schemas, the oldest first."""
        return list(self._kept.get(tenant.name, {}).values())

    def drop(self, tenant: Tenant, name: str) -> None:
        """Forget a schema. Raises APIError 404."""
        self.of_tenant(tenant, name)
        del self._kept[tenant.name][name]


def _no_room(what: str) -> APIError:
    return APIError(
        429,
        f"There is no room for this schema: {what} (the server's max_schema_tokens); delete another one.",
        kind="rate_limit_error",
        code="too_many_schemas",
    )

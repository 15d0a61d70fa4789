"""Kept schemas: room in number and tokens, of one tenant and of all."""

from __future__ import annotations

import pytest

from foreword.pml.library import LoadedSchema
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.resources.schemas import MAX_SCHEMAS, MOST_OF_ALL, KeptSchemas
from pml.words import library

ALICE = Tenant("alice")


def kept(max_tokens: int = 10) -> KeptSchemas:
    return KeptSchemas(library, max_tokens)


def schema(name: str, num_tokens: int = 0) -> LoadedSchema:
    return library().load_text(f'<schema name="{name}">{"x " * num_tokens}</schema>')


def test_the_number_of_a_tenants_schemas_is_bounded() -> None:
    schemas = kept()
    for number in range(MAX_SCHEMAS):
        schemas.add(ALICE, schema(f"s{number}"))
    schemas.add(ALICE, schema("s0"))
    with pytest.raises(APIError, match=f"this tenant has {MAX_SCHEMAS}, the most"):
        schemas.add(ALICE, schema("more"))
    schemas.add(Tenant("bob"), schema("more"))
    schemas.drop(ALICE, "s7")
    schemas.add(ALICE, schema("more"))


def test_tokens_are_counted_without_the_schema_that_is_replaced() -> None:
    schemas = kept()
    schemas.add(ALICE, schema("a", 6))
    schemas.add(ALICE, schema("b", 4))
    schemas.add(ALICE, schema("a", 6))
    with pytest.raises(APIError, match="would have 11 tokens, and may have 10"):
        schemas.add(ALICE, schema("a", 7))
    assert schemas.of_tenant(ALICE, "a").num_tokens == 6


def test_all_tenants_together_have_room_for_some_that_use_theirs() -> None:
    schemas = kept()
    for number in range(MOST_OF_ALL):
        schemas.add(Tenant(f"t{number}"), schema("a", 10))
    schemas.add(Tenant("t0"), schema("a", 10))
    with pytest.raises(APIError, match="those of all tenants would have more than 160 tokens"):
        schemas.add(ALICE, schema("a", 1))
    schemas.drop(Tenant("t3"), "a")
    schemas.add(ALICE, schema("a", 1))


def test_no_room_keeps_nothing() -> None:
    with pytest.raises(APIError, match="may have 0"):
        kept(0).add(ALICE, schema("a", 1))

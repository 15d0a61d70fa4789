"""Kept schemas: room in number and tokens, of one tenant and of all."""

from __future__ import annotations

import pytest

from foreword.errors import SchemaError
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.resources.schemas import MAX_BYTES_OF_TENANT, MAX_SCHEMAS, MOST_OF_ALL, KeptSchemas, ServedSchema
from pml.words import library

ALICE = Tenant("alice")


def kept(max_tokens: int = 10) -> KeptSchemas:
    return KeptSchemas(library, max_tokens)


def schema(name: str, num_tokens: int = 0) -> ServedSchema:
    return ServedSchema(library().load_text(f'<schema name="{name}">{"x " * num_tokens}</schema>'), b"")


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
    assert schemas.of_tenant(ALICE, "a").schema.num_tokens == 6


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


def test_the_memory_of_a_tenants_schemas_is_bounded_and_shown() -> None:
    schemas = kept(1000)
    large = schema("a", 1)
    most = MAX_BYTES_OF_TENANT - large.schema.layout.num_bytes
    schemas.add(ALICE, ServedSchema(large.schema, bytes(most)))
    assert schemas.num_bytes == MAX_BYTES_OF_TENANT
    with pytest.raises(APIError, match="bytes, and may take 67,108,864"):
        schemas.add(ALICE, schema("b", 1))
    schemas.add(Tenant("bob"), schema("b", 1))
    schemas.drop(ALICE, "a")
    schemas.add(ALICE, schema("b", 1))
    assert schemas.num_bytes == 2 * schema("b", 1).num_bytes


def test_a_schema_with_more_tokens_than_a_tenant_may_keep_is_not_laid_out_to_its_end() -> None:
    with pytest.raises(SchemaError, match="more than 10 tokens"):
        kept().load(f'<schema name="a">{"x " * 6}<module name="m">{"x " * 5}</module></schema>')


def test_work_on_a_schema_ends_when_it_is_told_to() -> None:
    class EnoughError(Exception):
        pass

    calls = []

    def go_on() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise EnoughError

    modules = "".join(f'<module name="m{number}">x</module>' for number in range(9))
    with pytest.raises(EnoughError):
        kept().load(f'<schema name="a">{modules}</schema>', go_on)

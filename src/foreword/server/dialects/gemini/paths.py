"""Google's paths: versions, and the queries of lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter

from foreword.server.api_errors import bad_request
from foreword.server.bodies.fields import Body
from foreword.server.intake import takes

VERSIONS = ("v1", "v1beta", "v1alpha")
PAGE_SIZE, MAX_PAGE_SIZE = 50, 1000

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def served(
    router: APIRouter, method: str, path: str, model: type[Body] | None = None
) -> Callable[[Endpoint], Endpoint]:
    """Make an endpoint of a function, in all versions. `model`: of its body."""

    def add(function: Endpoint) -> Endpoint:
        for version in VERSIONS:
            extra = None if model is None else takes(model)
            router.add_api_route(f"/{version}/{path}", function, methods=[method], openapi_extra=extra)
        return function

    return add


def page_size(query: Mapping[str, str]) -> int:
    """The number of items that a list's page may have."""
    return min(number_in(query, "pageSize") or PAGE_SIZE, MAX_PAGE_SIZE)


def number_in(query: Mapping[str, str], name: str) -> int:
    """A number in a query; 0 if it is not there. Raises APIError 400."""
    given = query.get(name, "") or "0"
    if not given.isdecimal() or len(given) > 9:
        raise bad_request(f"{name}={given!r:.60} is not valid; send a number, or leave it out", param=name)
    return int(given)

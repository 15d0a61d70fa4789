"""Kept responses stay within their bytes, whatever the conversations are made of."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from foreword.pictures import PictureFile
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.kept_responses import KeptResponses
from foreword.text.conversation import PICTURES


def of_lists() -> Any:
    return {"a": [[] for _ in range(20_000)]}


def of_keys() -> Any:
    return {f"{number}" * 50: 1 for number in range(5_000)}


def of_numbers() -> Any:
    return {"a": [{"b": float(number)} for number in range(10_000)]}


@pytest.mark.parametrize("arguments", [of_lists, of_keys, of_numbers])
def test_the_estimate_is_no_less_than_the_memory_that_calls_take(arguments: Any) -> None:
    kept = KeptResponses()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5):
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments()}}
            messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
            kept.keep(Tenant("t"), messages, {"id": f"r{number}"})
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept.num_bytes > 0.8 * grown > 100_000


def test_a_picture_of_several_turns_counts_once() -> None:
    kept, file = KeptResponses(max_bytes=2**20), PictureFile(b"x" * 300_000)
    message = {"role": "user", "content": "What is this?", PICTURES: [file]}
    for number in range(20):
        kept.keep(Tenant("t"), [message] * (number + 1), {"id": f"r{number}"})
    assert 300_000 < kept.num_bytes < 600_000
    kept.keep(Tenant("t"), [{**message, PICTURES: [PictureFile(b"x" * 300_000)]}], {"id": "other"})
    assert kept.num_bytes > 600_000
    for name in ("other", *(f"r{number}" for number in range(20))):
        kept.delete(Tenant("t"), name)
    assert kept.num_bytes == 0


@pytest.mark.parametrize("limits", [{"max_responses": 20}, {"max_bytes": 20_000}])
def test_a_tenant_that_keeps_many_responses_pushes_out_its_own(limits: dict[str, int]) -> None:
    kept = KeptResponses(**limits)
    for number in range(3):
        kept.keep(Tenant("a"), [{"role": "user", "content": "x" * 500}], {"id": f"a{number}"})
    for number in range(100):
        kept.keep(Tenant("b"), [{"role": "user", "content": "x" * 500}], {"id": f"b{number}"})
    for number in range(3):
        assert kept.get(Tenant("a"), f"a{number}")
    assert kept.get(Tenant("b"), "b99")
    with pytest.raises(APIError, match=r"'b0' not found.*Send the whole conversation as input instead"):
        kept.get(Tenant("b"), "b0")
    for number in range(3):
        kept.delete(Tenant("a"), f"a{number}")
    for number in range(100):
        with suppress(APIError):
            kept.delete(Tenant("b"), f"b{number}")
    assert kept.num_bytes == 0

"""Whose KV a cache holds: what changes an identity, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreword.tiers.identity import CacheIdentity

MODEL: dict[str, Any] = {"weights": "w", "dtype": "torch.float32", "config": {"layers": 3, "eps": 1e-6}}
ARITHMETIC: dict[str, Any] = {"version": 1, "probe": "p"}
LAYOUT: dict[str, Any] = {"block_size": 16, "groups": [0, 1]}
IDENTITY = CacheIdentity.of(MODEL, ARITHMETIC, LAYOUT)


def test_equal_facts_in_any_order_are_one_identity() -> None:
    again = CacheIdentity.of(dict(reversed(MODEL.items())), dict(reversed(ARITHMETIC.items())), dict(LAYOUT))
    assert again == IDENTITY
    assert again.namespace == IDENTITY.namespace
    assert len(again.namespace) == 16


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "change", [{"weights": "v"}, {"config": {"layers": 3, "eps": 1e-5}}, {"dtype": "torch.bfloat16"}]
)
def test_another_model_is_another_namespace(change: dict[str, Any], exact: bool) -> None:
    own = CacheIdentity.of(MODEL, ARITHMETIC, LAYOUT, exact=exact)
    other = CacheIdentity.of(MODEL | change, ARITHMETIC, LAYOUT, exact=exact)
    assert other.model_id != own.model_id
    assert other.namespace != own.namespace
    assert (other.arithmetic_id, other.layout) == (own.arithmetic_id, own.layout)


@pytest.mark.parametrize("exact", [True, False])
def test_another_layout_is_another_model_and_says_so(exact: bool) -> None:
    own = CacheIdentity.of(MODEL, ARITHMETIC, LAYOUT, exact=exact)
    other = CacheIdentity.of(MODEL, ARITHMETIC, LAYOUT | {"block_size": 32}, exact=exact)
    assert other.layout != own.layout
    assert other.model_id != own.model_id
    assert other.namespace != own.namespace


def test_other_arithmetic_shares_blocks_only_in_a_namespace_of_its_own() -> None:
    others = [ARITHMETIC, ARITHMETIC | {"probe": "q"}]
    exact = [CacheIdentity.of(MODEL, one, LAYOUT).namespace for one in others]
    shared = [CacheIdentity.of(MODEL, one, LAYOUT, exact=False).namespace for one in others]
    assert shared[0] == shared[1]
    assert len({*exact, *shared}) == 3


def test_a_description_is_json_that_names_every_digest_and_leaves_the_configuration_out() -> None:
    described = json.loads(json.dumps(IDENTITY.description()))
    assert described["namespace"] == IDENTITY.namespace.hex()
    assert (described["model_id"], described["arithmetic_id"]) == (IDENTITY.model_id, IDENTITY.arithmetic_id)
    assert (described["layout"], described["exact"]) == (IDENTITY.layout, True)
    assert described["model"] == {"weights": "w", "dtype": "torch.float32"}
    assert described["arithmetic"] == ARITHMETIC

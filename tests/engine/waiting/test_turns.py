"""Turns of tenants, in computed tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.engine.waiting.queue import Turns


def serve(turns: Turns, tenant: str | None, num_tokens: int) -> None:
    turns.charge(tenant, num_tokens)
    turns.check_integrity(["a", "b", "c"])


def turns_of_a(turns: Turns) -> int:
    """Turns of tenant a among ten, each of which costs a quantum."""
    served = []
    for _ in range(10):
        served.append(turns.next(()))
        turns.charge(served[-1], 10)
    return served.count("a")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 300)] * 3), min_size=1, max_size=80), st.sampled_from([1, 10, 100]))
def test_tenants_that_always_wait_differ_by_a_quantum_and_their_largest_request(costs, quantum) -> None:
    turns = Turns(quantum)
    served = dict.fromkeys("abc", 0)
    for tenant in served:
        turns.join(tenant)
    for of_each in costs:
        tenant = turns.next(())
        cost = dict(zip("abc", of_each, strict=True))[tenant]
        served[tenant] += cost
        serve(turns, tenant, cost)
        assert max(served.values()) - min(served.values()) <= 2 * (quantum + 300)


def test_a_skipped_tenant_gets_no_credit_for_it() -> None:
    turns = Turns(10)
    turns.join("a")
    turns.join("b")
    for _ in range(50):
        assert turns.next({"a"}) == "b"
        turns.charge("b", 10)
    assert turns_of_a(turns) == 5


def test_a_debt_outlives_a_pause_while_others_wait_but_credit_does_not() -> None:
    turns = Turns(10)
    turns.join("a")
    turns.join("b")
    assert turns.next(()) == "a"
    turns.charge("a", 100)
    turns.leave("a")
    turns.join("a")
    assert [turns.next(()) for _ in range(3)] == ["b"] * 3
    turns.leave("b")
    turns.leave("a")
    turns.join("a")
    turns.join("b")
    assert turns_of_a(turns) == 5

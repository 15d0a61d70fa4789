"""Routers that decide in turn."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cluster import EventBatch, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.cluster.peers import time_to_turn
from foreword.errors import ConfigError


@settings(deadline=None)
@given(
    st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=6, unique=True),
    st.sampled_from([0.001, 0.005, 0.02]),
    st.floats(0, 2e9, allow_nan=False),
)
def test_one_router_at_a_time_decides_and_every_other_one_soon(routers: list[str], turn_s: float, clock_s: float):
    waits = {}
    for router in routers:
        waits[router] = time_to_turn(router, set(routers) - {router}, turn_s, clock_s)
    waiting = [wait for wait in waits.values() if wait > 0]
    assert len(waiting) >= len(routers) - 1
    assert max(waiting) <= (len(routers) - 1) * turn_s + 1e-6
    ordered = sorted(waiting)
    assert all(later - sooner == pytest.approx(turn_s, abs=1e-6) for sooner, later in pairwise(ordered))


def core_named(router: str, **options: float) -> RoutingCore:
    core = RoutingCore(RoutingOptions(4, share_load=True, **options), router=router)
    core.join("r", ReplicaSpec(50, 1000.0))
    core.install_snapshot("r", EventBatch(b"life", -1), 0.0)
    return core


def test_a_long_prompt_waits_for_its_router_s_turn_and_a_short_one_does_not():
    one, other = core_named("a"), core_named("b")
    long, short = RoutingRequest("long", [], 2000), RoutingRequest("short", [], 100)
    assert one.wait_s(long, 0.006) == 0.0, "nobody else is known"
    other.beat()
    one.merge(other.take_updates(), 0.0)
    assert [one.wait_s(long, at) for at in (0.001, 0.007, 0.011)] == pytest.approx([0.0, 0.003, 0.0])
    assert one.wait_s(short, 0.007) == 0.0, "3 ms are more than a hundredth of its 100 ms"
    one.forget_router("b", 0.0)
    assert one.wait_s(long, 0.007) == 0.0


def test_turns_can_be_left_out():
    one, other = core_named("a", turn_s=0.0), core_named("b")
    other.beat()
    one.merge(other.take_updates(), 0.0)
    assert one.wait_s(RoutingRequest("long", [], 2000), 0.007) == 0.0
    with pytest.raises(ConfigError, match="turn_s=-1"):
        RoutingOptions(turn_s=-1.0)
    assert RoutingCore(RoutingOptions(4)).wait_s(RoutingRequest("q", [], 9), 0.007) == 0.0, "without replicas too"

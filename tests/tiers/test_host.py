"""The host tier: what its own memory adds to what every tier promises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from foreword.errors import ConfigError
from foreword.tiers.host.host_tier import HostTier
from foreword.tiers.tier import EXACT, PINNED, BlockRun, Buffers
from tiers.block_world import BLOCK_BYTES, WAIT_S, keys_of, load, payloads_of, store

NUM_PLACES = 20


@pytest.fixture
def buffer() -> npt.NDArray[np.uint8]:
    return np.zeros(NUM_PLACES * BLOCK_BYTES + 7, np.uint8)


@pytest.fixture
def tier(buffer) -> Iterator[HostTier]:
    with HostTier(buffer, BLOCK_BYTES) as made:
        yield made
        made.check_integrity()


def test_the_least_recently_used_goes_first(tier):
    store(tier, keys_of(range(NUM_PLACES)))
    load(tier, keys_of(range(5)))
    store(tier, keys_of(range(100, 110)))
    assert tier.lookup(keys_of(range(5))).all()
    assert not tier.lookup(keys_of(range(5, 15))).any()
    assert load(tier, keys_of([*range(5), *range(15, 20), *range(100, 110)])).num_done == NUM_PLACES
    assert tier.stats().num_evicted == 10


def test_pins_go_last_and_go_at_last(tier):
    pinned = keys_of(range(NUM_PLACES - 1))
    payloads = payloads_of(pinned)
    run = BlockRun.chain(pinned, BLOCK_BYTES, Buffers([row.data for row in payloads]), flags=EXACT | PINNED)
    assert tier.store(run).wait(WAIT_S)
    store(tier, keys_of(range(100, 110)))
    assert tier.lookup(pinned).all()
    assert tier.lookup(keys_of(range(100, 110))).tolist() == [False] * 9 + [True]
    payloads = payloads_of(keys_of([200, 201]))
    run = BlockRun.chain(keys_of([200, 201]), BLOCK_BYTES, Buffers([row.data for row in payloads]), flags=PINNED)
    assert tier.store(run).wait(WAIT_S)
    assert tier.lookup(keys_of([200, 201])).all()
    assert tier.lookup(pinned).sum() == NUM_PLACES - 2


def test_a_flipped_bit_is_caught_and_the_block_is_forgotten(tier, buffer):
    store(tier, keys_of(range(NUM_PLACES)))
    for place in range(NUM_PLACES):
        buffer[place * BLOCK_BYTES + 97 * place % BLOCK_BYTES] ^= 1 << place % 8
    assert load(tier, keys_of(range(NUM_PLACES))).by_reason() == {"corrupt": NUM_PLACES}
    assert not tier.lookup(keys_of(range(NUM_PLACES))).any()
    assert store(tier, keys_of(range(NUM_PLACES))).num_done == NUM_PLACES


def test_blocks_expire(tier):
    payloads = payloads_of(keys_of([0]))
    run = BlockRun.chain(keys_of([0]), BLOCK_BYTES, Buffers([payloads[0].data]), ttl_s=0.0)
    assert tier.store(run).wait(WAIT_S)
    assert not tier.lookup(keys_of([0])).any()
    assert store(tier, keys_of([0])).by_reason() == {"done": 1}
    assert load(tier, keys_of([0])).num_done == 1


def test_a_block_larger_than_a_place_has_no_room(tier):
    keys = keys_of([0])
    row = np.zeros(BLOCK_BYTES + 1, np.uint8)
    ticket = tier.store(BlockRun.chain(keys, BLOCK_BYTES + 1, Buffers([row.data])))
    assert ticket.wait(WAIT_S)
    assert ticket.report.by_reason() == {"no_room": 1}


def test_a_buffer_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="cache_host_bytes=9 holds no block of 10 bytes; give it more"):
        HostTier(np.zeros(9, np.uint8), 10)

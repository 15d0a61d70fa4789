"""Pins and key options through the engine, with a clock that the tests move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foreword.cache import (
    EntryWish,
    KVCacheManager,
    PinnedPolicy,
    SlidingWindowSpec,
    TokenSequence,
    chain_root,
    make_policy,
    sha256_cbor,
)
from foreword.cache.groups.managers import FullAttentionSpec
from foreword.engine import BlockKeys, Keep, Prompt
from foreword.errors import ConfigError, InvalidRequestError
from foreword.request import SamplingParams
from hash_runner import HashEngine

ONE_TOKEN = SamplingParams(max_tokens=1, seed=0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt_of(*token_ids: int) -> Prompt:
    return Prompt(np.array(token_ids, np.int32))


def engine_of(clock: Clock, **options: Any) -> HashEngine:
    return HashEngine.build(**{"num_blocks": 8, "vocab_size": 1000, "max_pinned_share": 0.5, "clock": clock, **options})


def run(parts: HashEngine, name: str, token_ids: range) -> None:
    parts.add(name, list(token_ids), ONE_TOKEN)
    parts.drain()


def flood(parts: HashEngine, name: str) -> None:
    """Prompts that nobody repeats, enough to evict everything twice."""
    for number in range(4):
        run(parts, f"{name} {number}", range(9 * number + 9, 9 * number + 24))


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
def test_a_pinned_prompt_stays_until_its_time_is_over(prefix_index: str) -> None:
    clock = Clock()
    parts = engine_of(clock, prefix_index=prefix_index)
    run(parts, "pinned", range(9))
    prompt = prompt_of(*range(9))
    assert parts.engine.entries.pin(prompt, Keep(60.0)).num_kept_tokens == (
        9 if prefix_index == "radix" else 8
    )  # a tail of one token
    clock.now += 59.9
    flood(parts, "first")
    assert parts.engine.num_cached_tokens(prompt) >= 8
    clock.now += 0.1
    flood(parts, "second")
    assert parts.engine.num_cached_tokens(prompt) < 8


def test_unpinning_ends_a_pin_at_once() -> None:
    parts = engine_of(Clock())
    run(parts, "pinned", range(9))
    parts.engine.entries.pin(prompt_of(*range(9)), Keep(60.0))
    parts.engine.entries.unpin(prompt_of(*range(9)))
    flood(parts, "then")
    assert parts.engine.num_cached_tokens(prompt_of(*range(9))) == 0


def test_the_budget_keeps_the_head_of_a_long_prompt() -> None:
    parts = engine_of(Clock(), num_blocks=8, max_pinned_share=0.25)
    run(parts, "pinned", range(17))
    assert parts.engine.entries.pin(prompt_of(*range(17)), Keep(60.0)).num_kept_tokens == 8
    assert parts.engine.entries.pin(prompt_of(*range(17)), Keep(90.0)).num_kept_tokens == 8


@pytest.mark.parametrize("ends", ["never", "at once", "by its time"])
def test_a_prefix_that_was_pinned_is_evicted_from_its_end(ends: str) -> None:
    """Without its first block, the rest of a prefix is worth nothing."""
    clock, prompt = Clock(), prompt_of(*range(17))
    parts = engine_of(clock, num_blocks=6, max_pinned_share=1.0)
    run(parts, "pinned", range(17))
    assert parts.engine.entries.pin(prompt, Keep(60.0)).num_kept_tokens == 16
    if ends == "at once":
        parts.engine.entries.unpin(prompt)
    clock.now += 60.0 * (ends == "by its time")
    run(parts, "needs four blocks", range(20, 36))
    assert parts.engine.num_cached_tokens(prompt) == 8


def test_what_is_not_cached_or_shorter_than_a_block_is_not_pinned() -> None:
    parts = engine_of(Clock())
    assert parts.engine.entries.pin(prompt_of(*range(9)), Keep(60.0)).num_kept_tokens == 0
    run(parts, "short", range(3))
    assert parts.engine.entries.pin(prompt_of(*range(3)), Keep(60.0)).num_kept_tokens == 0


def test_pins_never_keep_a_request_from_running() -> None:
    parts = engine_of(Clock(), num_blocks=4, max_pinned_share=1.0)
    run(parts, "pinned", range(16))
    assert parts.engine.entries.pin(prompt_of(*range(16)), Keep(60.0)).num_kept_tokens == 16
    run(parts, "needs all", range(20, 36))
    assert parts.engine.num_cached_tokens(prompt_of(*range(16))) == 0


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("inf"), float("nan"), "60", None, True])
def test_an_impossible_time_is_refused(ttl_s: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"ttl_s=.* is not a time; use a positive, finite number of seconds"):
        engine_of(Clock()).engine.entries.pin(prompt_of(1, 2, 3), Keep(ttl_s))


@pytest.mark.parametrize("token_ids", [(), (1000,), (0, -1)])
def test_an_impossible_prompt_is_refused(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        engine_of(Clock()).engine.entries.pin(prompt_of(*token_ids), Keep(10.0))


def test_without_a_budget_there_are_no_pins() -> None:
    parts = engine_of(Clock(), max_pinned_share=0.0)
    with pytest.raises(ConfigError, match="this cache has no pins; choose a max_pinned_share above 0"):
        parts.engine.entries.pin(prompt_of(1, 2, 3), Keep(60.0))


def test_pins_reach_every_group_of_layers() -> None:
    policy = PinnedPolicy(make_policy("lru", 24), 24)
    manager = KVCacheManager(24, groups=[FullAttentionSpec(2), SlidingWindowSpec(4, 4)], eviction_policy=policy)

    def run_alone(name: str, token_ids: range) -> int:
        sequence = TokenSequence(name, list(token_ids), block_size=manager.block_size)
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, len(sequence), hit) is not None
        manager.free(name)
        manager.check_integrity()
        return hit.num_tokens

    run_alone("pinned", range(13))
    pinned = TokenSequence("any", list(range(13)), block_size=manager.block_size)
    assert manager.keep_prefix(pinned, EntryWish(9.0), now=0.0).num_kept_tokens == 12
    for number in range(9):
        run_alone(f"flood {number}", range(20 * number + 20, 20 * number + 36))
    assert run_alone("again", range(13)) == 12
    manager.expire_pins(9.0)
    for number in range(9):
        run_alone(f"second flood {number}", range(20 * number + 220, 20 * number + 236))
    assert run_alone("too late", range(13)) == 0


def test_requests_have_the_keys_that_the_engine_was_told_to_use() -> None:
    keys = BlockKeys(sha256_cbor, chain_root("a model"))
    parts = HashEngine.build(keys=keys)
    run(parts, "r", range(9))
    own = TokenSequence("same", list(range(9)), block_size=4, hash_fn=sha256_cbor, root=chain_root("a model"))
    assert parts.manager.get_computed_blocks(own).num_tokens == 8
    assert parts.manager.get_computed_blocks(TokenSequence("other", list(range(9)), block_size=4)).num_tokens == 0

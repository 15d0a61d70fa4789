"""Marks in prompts become entries of the cache, through the engine, with a clock that the tests move."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from foreword.cache import (
    BlockState,
    CacheEntry,
    EntryWish,
    ExtraKeys,
    FullAttentionSpec,
    GroupSpec,
    KVCacheManager,
    MambaSpec,
    PinnedPolicy,
    SlidingWindowSpec,
    TokenSequence,
    entry_name,
    make_policy,
)
from foreword.engine import BREAKPOINT, Keep, Mark, Prompt
from foreword.request import SamplingParams
from hash_runner import HashEngine

ONE_TOKEN = SamplingParams(max_tokens=1, seed=0)
TTL_S = 300.0


def prompt_of(tokens: range, owner: str | None = None, **more: Any) -> Prompt:
    return Prompt(np.array(tokens, np.int32), None, ExtraKeys(salt=owner), owner=owner, **more)


class World:
    """An engine of 32 blocks of 4 tokens, whose marks may keep 16 of them, and 8 for each owner."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        given = {"num_blocks": 32, "vocab_size": 2000, "max_pinned_share": 0.5, "clock": lambda: self.now, **options}
        self.parts = HashEngine.build(**given)
        self._number = 0

    def ask(self, tokens: range, *ends: int, owner: str | None = None, ttl_s: float = TTL_S) -> tuple[int, list[int]]:
        """Run a prompt with marks; returns the tokens found in the cache, and the tokens kept by each mark."""
        prompt = prompt_of(tokens, owner, marks=tuple(Mark(end, Keep(ttl_s, BREAKPOINT)) for end in ends))
        self._number += 1
        output = self.parts.engine.add_request(f"r{self._number}", prompt, ONE_TOKEN)
        self.parts.drain()
        self.parts.engine.check_integrity()
        return output.num_cached_tokens, [entry.num_kept_tokens for entry in output.kept]

    def flood(self) -> None:
        """Prompts that nobody repeats: enough to evict everything that is not kept."""
        for _ in range(12):
            start = 1000 + 20 * self._number % 900
            self.ask(range(start, start + 16))

    def entries(self) -> list[CacheEntry]:
        return self.parts.manager.entries()

    def sequence(self, tokens: range, owner: str | None = None) -> TokenSequence:
        return self.parts.engine.check("", prompt_of(tokens, owner), ONE_TOKEN)[0]


def test_a_marked_prefix_survives_a_flood_and_a_use_of_all_of_it_refreshes_it():
    world = World()
    assert world.ask(range(20), 11) == (0, [8]), "whole blocks before the mark"
    world.now += TTL_S - 1
    world.flood()
    assert world.ask(range(10))[0] == 8
    assert [entry.until for entry in world.entries()] == [world.now + TTL_S]
    world.now += TTL_S
    world.flood()
    assert world.ask(range(10))[0] == 0
    assert world.entries() == []


def test_an_unused_mark_ends_at_its_time():
    world = World()
    world.ask(range(20), 12)
    world.now += TTL_S
    world.flood()
    assert world.ask(range(20))[0] == 0


def test_several_marks_share_their_head_and_end_apart():
    world = World()
    assert world.ask(range(20), 8, 16)[1] == [8, 16]
    first, second = world.entries()
    assert (first.num_tokens, second.num_tokens, first.source) == (8, 16, "breakpoint")
    world.parts.manager.drop_entry(second.name)
    world.flood()
    assert world.ask(range(21))[0] == 8
    world.parts.manager.drop_entry(first.name)
    world.flood()
    assert world.ask(range(21))[0] == 0


def test_the_same_mark_again_is_the_same_entry_made_longer():
    world = World()
    world.ask(range(20), 12, ttl_s=60.0)
    world.now += 50
    assert world.ask(range(20), 12, ttl_s=60.0) == (19, [12])
    (entry,) = world.entries()
    assert entry.until == world.now + 60.0


def test_of_two_marks_of_one_place_the_longer_time_counts_from_each_use():
    world = World()
    for ttl_s in (300.0, 3600.0, 300.0):
        world.ask(range(20), 12, ttl_s=ttl_s)
    world.now += 3000
    world.ask(range(13))
    (entry,) = world.entries()
    assert (entry.until, entry.refresh_s) == (world.now + 3600.0, 3600.0)


def test_an_owner_keeps_no_more_than_its_share_and_its_flood_ends_no_other_owners_entries():
    world = World()
    assert world.ask(range(16), 16, owner="ann")[1] == [16]
    for number in range(6):
        world.ask(range(100 + 40 * number, 140 + 40 * number), 40, owner="bob")
    kept = [entry.num_kept_tokens for entry in world.entries() if entry.owner == "bob"]
    assert sum(kept) == 32, "8 blocks"
    world.flood()
    assert world.ask(range(17), owner="ann")[0] == 16
    assert world.ask(range(17), owner="bob")[0] == 0, "what one owner keeps, another cannot find"


def test_marks_never_keep_a_request_from_running_and_what_broke_is_visible():
    world = World(num_blocks=16, max_share_per_tenant=1.0)
    assert world.ask(range(32), 32)[1] == [32]
    assert world.ask(range(100, 160))[0] == 0
    (entry,) = world.entries()
    assert (entry.num_tokens, entry.num_kept_tokens) == (32, 4), "the first block goes last"
    assert world.ask(range(200, 263))[0] == 0
    (entry,) = world.entries()
    assert (entry.num_tokens, entry.num_kept_tokens) == (32, 0)
    assert world.ask(range(33), 32) == (0, [32]), "it is kept again once it is computed again"


def test_a_block_that_is_lost_and_computed_again_counts_again():
    world = World()
    world.ask(range(16), 12)
    manager, sequence = world.parts.manager, world.sequence(range(12))
    middle = manager.cached_blocks(sequence)[0][1:2]
    manager.evict_blocks(middle)
    (entry,) = world.entries()
    assert entry.num_kept_tokens == 4
    world.ask(range(500, 520))  # takes the block that is free now
    assert world.ask(range(16), 12)[1] == [12]
    manager.reset_prefix_cache()
    assert world.entries() == []


def test_marks_are_ignored_where_nothing_can_be_kept():
    assert World(max_pinned_share=0.0).ask(range(20), 12) == (0, [])
    assert World(enable_prefix_caching=False, max_pinned_share=0.0).ask(range(20), 12) == (0, [])


def test_a_mark_before_the_end_of_the_first_block_keeps_nothing():
    world = World()
    assert world.ask(range(20), 3)[1] == [0]
    assert world.entries() == []


def test_an_aborted_request_leaves_no_entry():
    world = World()
    prompt = prompt_of(range(20), marks=(Mark(12, Keep(TTL_S, BREAKPOINT)),))
    world.parts.engine.add_request("x", prompt, ONE_TOKEN)
    world.parts.engine.abort_request("x")
    world.parts.drain()
    assert world.entries() == []
    assert not len(world.parts.engine.entries._marked)


@pytest.mark.parametrize("seed", range(5))
def test_random_entries_are_kept_as_long_as_a_plain_model_says(seed):
    """Creates, uses, shortens, ends and lets time pass. No memory is short, so every entry must be whole."""
    rng = random.Random(seed)
    world = World(num_blocks=128, max_pinned_share=0.4, max_share_per_tenant=0.2)
    manager = world.parts.manager
    plain: dict[str, dict[str, Any]] = {}
    for _ in range(150):
        world.now += rng.choice((0, 1, 40))
        plain = {name: entry for name, entry in plain.items() if entry["until"] > world.now}
        owner, start, end = rng.choice(("ann", "bob")), 200 * rng.randrange(2), 4 * rng.randint(1, 6)
        kind = rng.random()
        if kind < 0.5:
            tokens, is_marked = range(start, start + end + rng.randint(1, 5)), rng.random() < 0.5
            num_found, _ = world.ask(tokens, *([end] if is_marked else []), owner=owner, ttl_s=100.0)
            num_found += num_found == len(tokens) - 1  # its last token is computed, over a block that was found
            for entry in plain.values():
                if (entry["owner"], entry["start"]) == (owner, start) and entry["end"] <= num_found:
                    entry["until"] = max(entry["until"], world.now + 100.0)
            if is_marked:
                name = entry_name(world.sequence(range(start, start + end), owner), owner, "breakpoint")
                until = max(plain.get(name, {"until": 0.0})["until"], world.now + 100.0)
                plain[name] = {"owner": owner, "start": start, "end": end, "until": until}
        elif plain and kind < 0.7:
            name = rng.choice(list(plain))
            manager.drop_entry(name)
            del plain[name]
        elif plain and kind < 0.9:
            name, until = rng.choice(list(plain)), world.now + rng.choice((5.0, 200.0))
            manager.set_entry_end(name, until, world.now)
            plain[name]["until"] = until
        manager.expire_pins(world.now)
        found = {entry.name: entry for entry in world.entries()}
        assert {name: entry.until for name, entry in found.items()} == {n: e["until"] for n, e in plain.items()}
        assert all(entry.num_kept_tokens == plain[name]["end"] for name, entry in found.items())
        pinned = {(e["owner"], e["start"], block) for e in plain.values() for block in range(0, e["end"], 4)}
        assert (manager.block_states() == BlockState.PINNED).sum() == len(pinned)
        world.parts.engine.check_integrity()


def test_an_entry_beyond_the_most_of_an_owner_is_not_made(monkeypatch):
    monkeypatch.setattr("foreword.cache.entries.MAX_ENTRIES_BY_OWNER", 2)
    world = World()
    assert [world.ask(range(20), end, owner="ann")[1] for end in (4, 8, 12)] == [[4], [8], [0]]
    assert world.ask(range(20), 8, owner="ann")[1] == [8], "those that are there can be renewed"
    assert world.ask(range(20), 8)[1] == [8], "no owner, no limit of an owner"
    monkeypatch.setattr("foreword.cache.entries.MAX_ENTRIES", 3)
    wish = EntryWish(world.now + 9.0)
    assert world.parts.manager.keep_prefix(world.sequence(range(12)), wish, world.now).num_kept_tokens == 0


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
@pytest.mark.parametrize("num_tokens", [8, 10], ids=["whole blocks", "a part of a block"])
def test_each_turn_of_a_conversation_refreshes_the_entry_that_it_begins_with(prefix_index: str, num_tokens: int):
    world = World(prefix_index=prefix_index)
    world.ask(range(num_tokens))
    [prefix, keep] = prompt_of(range(num_tokens)), Keep(TTL_S)
    if num_tokens > 8:  # another prompt's block holds the rest of the prefix, too
        world.ask(range(20))
    entry = world.parts.engine.entries.pin(prefix, keep)
    for num_asked in (14, 18, 22, 26):
        world.now += TTL_S / 2
        world.ask(range(num_asked))
        kept = world.parts.manager.entry(entry.name)
        assert kept is not None
        assert kept.until == world.now + TTL_S


@pytest.mark.parametrize("other", [SlidingWindowSpec(4, 4), MambaSpec(4)], ids=["window", "recurrent"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_longer_hit_refreshes_an_entry_of_several_groups(other: GroupSpec, is_first: bool):
    groups = (other, FullAttentionSpec(4)) if is_first else (FullAttentionSpec(4), other)
    manager = KVCacheManager(64, groups=groups, eviction_policy=PinnedPolicy(make_policy("lru", 64), 64))

    def run(name: str, num_tokens: int) -> int:
        sequence = TokenSequence(name, range(num_tokens), block_size=4)
        hit = manager.get_computed_blocks(sequence)
        row = manager.admit(sequence, hit.num_tokens + 4, hit)
        assert row is not None
        for end in range(hit.num_tokens + 8, num_tokens + 1, 4):
            manager.begin_step()
            manager.grow(row, end)
        manager.begin_step()
        manager.free(sequence)
        return hit.num_tokens

    run("first", 32)
    entry = manager.keep_prefix(TokenSequence("", range(17), block_size=4), EntryWish(10.0, refresh_s=10.0), now=0.0)
    assert entry.num_kept_tokens == 16
    manager.expire_pins(5.0)
    assert run("second", 36) == 32
    [kept] = manager.entries()
    assert kept.until == 15.0

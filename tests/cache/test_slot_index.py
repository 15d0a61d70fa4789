"""SlotIndex against a dictionary, under an engine with a memory of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import NO_EXTRA_KEYS, ExtraKeys, PriorityPolicy, SlotIndex, SlotMatch, make_policy
from foreword.cache.testing import ShadowMemory
from foreword.errors import AllocationError, CacheBusyError, ConfigError, InvalidRequestError

KEYS = (NO_EXTRA_KEYS, NO_EXTRA_KEYS, ExtraKeys(salt="a"), ExtraKeys(adapter="x", adapter_offset=2))
NUM_SLOTS = 24


class Engine:
    """An allocator over slots, a memory, an index, and what a plain dictionary says about it."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.index = SlotIndex(NUM_SLOTS, block_size=block_size)
        self.free = list(range(NUM_SLOTS))
        self.kv = np.zeros((NUM_SLOTS, block_size), np.int64)
        self.memory = ShadowMemory(block_size, contents=lambda slot, at: self.kv[slot, at].tobytes())
        self.slot_of: dict[tuple[object, ...], int] = {}
        self.order: list[int] = []
        """The slots that may leave, the next one first."""
        self.locked: list[tuple[SlotMatch, list[int]]] = []
        self.texts: list[list[int]] = [[0]]
        self.num_hits = self.num_evicted = 0

    def names(self, tokens: list[int], keys: ExtraKeys) -> list[tuple[object, ...]]:
        """A name for each block: all that its KV depends on."""
        held = self.memory.held_by(tokens, keys)
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(held[end - 1].prefix, keys.salt) for end in ends]

    def expected(self, tokens: list[int], keys: ExtraKeys) -> list[int]:
        found = []
        for name in self.names(tokens, keys):
            if name not in self.slot_of:
                break
            found.append(self.slot_of[name])
        return found

    def lookup(self, tokens: list[int], keys: ExtraKeys) -> SlotMatch:
        match = self.index.match(tokens, extra_keys=keys)
        assert match.slots.tolist() == self.expected(tokens, keys)
        assert match.num_tokens == len(match.slots) * self.size
        self.memory.read(tokens, 0, match.num_tokens, match.slots, extra_keys=keys)
        self.num_hits += match.num_tokens
        return match

    def lock(self, match: SlotMatch) -> None:
        self.index.lock(match)
        self.locked.append((match, match.slots.tolist()))
        self.order = [slot for slot in self.order if slot not in match.slots]

    def unlock(self, which: int) -> None:
        if self.locked:
            match, slots = self.locked.pop(which % len(self.locked))
            self.index.unlock(match)
            still = {slot for _, others in self.locked for slot in others}
            self.order += [slot for slot in reversed(slots) if slot not in still]

    def serve(self, cut: int, fresh: list[int], keys: ExtraKeys, keep_locked: bool) -> None:
        """Look a prompt up, compute the rest into free slots, and give all of it to the cache."""
        text = self.texts[cut % len(self.texts)]
        tokens = (text[: cut % 13] + fresh)[:16]
        if not tokens:
            return
        self.texts = [*self.texts[-4:], tokens]
        match = self.lookup(tokens, keys)
        self.lock(match)
        num_new = len(tokens) // self.size - len(match.slots)
        if num_new > len(self.free):
            self.evict(min(num_new - len(self.free), self.index.num_evictable))
        if num_new <= len(self.free):
            new, self.free = self.free[:num_new], self.free[num_new:]
            slots = [*match.slots.tolist(), *new]
            end = len(slots) * self.size
            for position in range(match.num_tokens, end):
                self.kv[slots[position // self.size], position % self.size] = hash(
                    (tuple(tokens[: position + 1]), keys)
                )
            self.memory.write(tokens, match.num_tokens, end, slots, extra_keys=keys)
            kept = self.index.insert(tokens, slots, extra_keys=keys)
            given = np.array(slots, np.int32)
            self.free += given[given != kept.slots].tolist()
            for name, slot in zip(self.names(tokens, keys), slots, strict=True):
                self.slot_of.setdefault(name, slot)
            self.order += reversed([slot for slot in new if slot in kept.slots])
            assert kept.slots.tolist() == self.expected(tokens, keys)
        if not keep_locked:
            self.unlock(len(self.locked) - 1)

    def evict(self, count: int) -> None:
        count = min(count, self.index.num_evictable)
        first = set(self.order[:count])
        gone = self.index.evict(count).tolist()
        assert sorted(gone) == sorted(first), "ends leave before beginnings, so none leaves with another"
        self.order = [slot for slot in self.order if slot not in gone]
        self.slot_of = {name: slot for name, slot in self.slot_of.items() if slot not in gone}
        self.free += gone
        self.num_evicted += len(gone)

    def check(self) -> None:
        self.index.check_integrity()
        assert self.index.num_evictable == len(self.order)
        assert self.index.num_locked + self.index.num_evictable == len(self.slot_of)
        assert sorted([*self.free, *self.slot_of.values()]) == list(range(NUM_SLOTS)), "a slot is lost"


prompts = st.tuples(
    st.just("serve"),
    st.integers(0, 63),
    st.lists(st.integers(0, 1), max_size=8),
    st.sampled_from(KEYS),
    st.booleans(),
)
operations = st.one_of(
    prompts,
    prompts,
    st.tuples(st.just("unlock"), st.integers(0, 7)),
    st.tuples(st.just("evict"), st.integers(0, NUM_SLOTS)),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(operations, max_size=30))
def test_the_index_finds_keeps_and_evicts_what_a_dictionary_does(block_size, what):
    engine = Engine(block_size)
    for name, *arguments in what:
        getattr(engine, name)(*arguments)
        engine.check()
    while engine.locked:
        engine.unlock(0)
    engine.free += engine.index.reset().tolist()
    assert sorted(engine.free) == list(range(NUM_SLOTS)), "a slot is lost"
    engine.index.check_integrity()


def test_hits_and_evictions_happen_in_that_test():
    engine = Engine(1)
    for number in range(40):
        engine.serve(number, [number % 3 % 2, number % 2], NO_EXTRA_KEYS, keep_locked=False)
        engine.check()
    assert engine.num_hits > 20
    assert engine.num_evicted > 20


def test_slots_of_a_prefix_are_found_at_any_token_and_leave_from_the_end():
    index = SlotIndex(8)
    kept = index.insert([1, 2, 3, 4], [7, 5, 3, 1])
    assert kept.slots.tolist() == [7, 5, 3, 1]
    assert index.match([1, 2, 9]).slots.tolist() == [7, 5]
    assert index.evict(1).tolist() == [1]
    found = index.match([1, 2])
    index.lock(found)
    assert (index.num_locked, index.num_evictable) == (2, 1)
    assert index.evict(1).tolist() == [3]
    with pytest.raises(AllocationError, match="1 slots cannot be evicted: 0 are"):
        index.evict(1)
    index.unlock(found)
    assert sorted(index.evict(2).tolist()) == [5, 7]


def test_a_second_copy_of_cached_tokens_stays_the_engines():
    index = SlotIndex(8)
    index.insert([1, 2], [0, 1])
    slots = np.array([4, 5, 6])
    kept = index.insert([1, 2, 3], slots)
    assert slots[slots != kept.slots].tolist() == [4, 5]
    assert kept.slots.tolist() == [0, 1, 6]


def test_a_policy_orders_what_leaves():
    policy = make_policy("priority", 8)
    assert isinstance(policy, PriorityPolicy)
    index = SlotIndex(8, eviction_policy=policy)
    important = index.insert([1, 2], [0, 1])
    index.insert([3, 4], [2, 3])
    policy.set_priority(important.slots, 1)
    assert sorted(index.evict(2).tolist()) == [2, 3]


def test_slots_that_could_not_be_found_without_an_evicted_one_come_with_it():
    policy = make_policy("priority", 8)
    assert isinstance(policy, PriorityPolicy)
    index = SlotIndex(8, eviction_policy=policy)
    kept = index.insert([1, 2, 3, 4], [0, 1, 2, 3])
    policy.set_priority(kept.slots[2:], 1)
    assert sorted(index.evict(1).tolist()) == [1, 2, 3]
    assert (index.num_evictable, index.match([1, 2, 3]).slots.tolist()) == (1, [0])
    index.check_integrity()


def test_the_policy_that_learns_runs_on_slots():
    index = SlotIndex(16, block_size=2, eviction_policy="value")
    free = list(range(16))
    for number in range(60):
        tokens = [number % 7, 1, 2, 3, number % 5, 4]
        found = index.match(tokens)
        index.lock(found)
        need = 3 - len(found.slots)
        if need > len(free):
            free += index.evict(need - len(free)).tolist()
        slots = np.array([*found.slots, *free[:need]])
        free = free[need:]
        kept = index.insert(tokens, slots)
        free += slots[slots != kept.slots].tolist()
        index.unlock(found)
        index.check_integrity()


def test_mistakes_name_the_value_and_change_nothing():
    index = SlotIndex(4)
    old = index.match([1, 2])
    kept = index.insert([1, 2], [0, 1])
    for slots in ([2], [[2, 3]], [2, 2], [2, 4], [2, -1], [2, 0]):
        with pytest.raises(AllocationError):
            index.insert([5, 6], slots)
    other = index.insert([3, 4], [2, 3])
    for slots in ([2, 3], [0, 3], [9, 1], [-1, 1], [1, 0], [0.5, 1.0], [2**32, 1]):  # where the cache has both slots
        with pytest.raises(AllocationError):
            index.insert([1, 2], slots)
    assert index.insert([1, 2], [0, 1]).slots.tolist() == [0, 1]
    assert index.match([3, 4]).slots.tolist() == other.slots.tolist()
    with pytest.raises(InvalidRequestError):
        index.match([-1])
    with pytest.raises(AllocationError, match="not locked"):
        index.unlock(kept)
    index.lock(kept)
    with pytest.raises(AllocationError, match="locked already"):
        index.lock(kept)
    with pytest.raises(CacheBusyError, match="1 matches"):
        index.reset()
    index.unlock(kept)
    with pytest.raises(AllocationError, match="not locked"):
        index.unlock(kept)
    index.lock(old)  # it found nothing, and nothing is there that it says is not
    index.unlock(old)
    assert sorted(index.reset().tolist()) == [0, 1, 2, 3]
    with pytest.raises(AllocationError, match="only 0 of the 2 tokens"):
        index.lock(kept)
    index.check_integrity()
    with pytest.raises(ConfigError, match="num_slots=0"):
        SlotIndex(0)
    with pytest.raises(ConfigError, match="fastest"):
        SlotIndex(1, eviction_policy="fastest")

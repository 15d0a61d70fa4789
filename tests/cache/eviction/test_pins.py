"""PinnedPolicy: pins end, keep to their budget and never wedge the pool, around every policy."""

import math
import random

import numpy as np
import pytest

from foreword.cache import BlockPool, KVCacheManager, PinnedPolicy, TokenSequence
from foreword.errors import ConfigError
from foreword.replay.policies import POLICIES, make_policy

NAMES = list(POLICIES)


def ids(*block_ids):
    return np.array(block_ids, np.int32)


def pinnable(name="lru", num_blocks=6, max_share=0.5):
    """A policy all of whose blocks are cached and free, last block first."""
    policy = PinnedPolicy(make_policy(name, num_blocks), num_blocks, max_share=max_share)
    policy.note_cached(policy.popleft(num_blocks), np.arange(num_blocks, dtype=np.int32))
    policy.append(np.arange(num_blocks, dtype=np.int32)[::-1])
    return policy


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fifo"])
def test_pinned_blocks_go_last(name):
    policy = pinnable(name)
    assert policy.pin("a", ids(5, 3), until=10.0, now=0.0).tolist() == [5, 3]
    assert policy.in_order().tolist() == [4, 2, 1, 0, 3, 5], "of the pinned blocks, the head goes last"
    policy.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_when_nothing_else_is_free_pins_break_and_are_counted(name):
    policy = pinnable(name)
    policy.pin("a", ids(0, 1), until=10.0, now=0.0)
    assert set(policy.popleft(5).tolist()) > {2, 3, 4, 5}
    assert (policy.num_pinned, policy.num_broken, len(policy)) == (1, 1, 1)
    policy.check_integrity()
    policy.popleft(1)
    assert (policy.num_pinned, policy.num_broken, len(policy)) == (0, 2, 0)
    policy.append(ids(0, 1))
    policy.expire(20.0)
    policy.check_integrity()


def test_a_pin_ends_at_its_time_and_the_block_is_ordinary_again():
    policy = pinnable()
    policy.pin("a", ids(5), until=10.0, now=0.0)
    policy.expire(9.9)
    assert policy.in_order().tolist() == [4, 3, 2, 1, 0, 5]
    policy.expire(10.0)
    assert policy.pinned_block_ids().tolist() == []
    policy.remove(ids(4))
    policy.append(ids(4))
    assert policy.in_order().tolist() == [3, 2, 1, 0, 5, 4]
    policy.check_integrity()


def test_a_pin_may_be_made_longer_and_is_never_shortened():
    policy = pinnable()
    policy.pin("a", ids(1), until=10.0, now=0.0)
    policy.pin("a", ids(1), until=20.0, now=1.0)
    policy.pin("a", ids(1), until=15.0, now=2.0)
    assert policy.expire(19.0) == []
    assert policy.pinned_block_ids().tolist() == [1]
    assert policy.expire(20.0) == ["a"]
    assert policy.pinned_block_ids().tolist() == []


def test_the_end_of_a_pin_can_be_moved_nearer_and_farther():
    policy = pinnable()
    policy.pin("a", ids(1), until=10.0, now=0.0)
    policy.set_end("a", 5.0, now=1.0)
    policy.pin("b", ids(2), until=10.0, now=1.0)
    policy.set_end("b", 30.0, now=1.0)
    assert policy.expire(5.0) == ["a"]
    assert policy.expire(29.0) == []
    policy.set_end("b", 29.0, now=29.0)
    assert policy.pinned_block_ids().tolist() == []
    policy.set_end("b", 90.0, now=29.0)
    assert policy.end_of("b") is None
    policy.check_integrity()


def test_a_block_stays_pinned_until_the_last_of_its_pins_ends():
    policy = pinnable()
    policy.pin("a", ids(0, 1, 2), until=10.0, now=0.0)
    policy.pin("b", ids(0, 1), until=20.0, now=0.0)
    assert policy.num_pinned == 3
    policy.unpin("a")
    assert policy.pinned_block_ids().tolist() == [0, 1]
    policy.pin("a", ids(0, 2), until=30.0, now=0.0)
    assert policy.expire(20.0) == ["b"]
    assert policy.pinned_block_ids().tolist() == [0, 2]
    policy.check_integrity()


def test_an_owner_pins_no_more_than_its_share_and_what_it_shares_with_itself_counts_once():
    policy = PinnedPolicy(make_policy("lru", 10), 10, max_share=0.5, max_owner_share=0.3)
    policy.note_cached(policy.popleft(10), np.arange(10, dtype=np.int32))
    policy.append(np.arange(10, dtype=np.int32))
    assert policy.pin("a", ids(0, 1), 9.0, 0.0, owner="ann").tolist() == [0, 1]
    assert policy.pin("b", ids(0, 1, 2, 3), 9.0, 0.0, owner="ann").tolist() == [0, 1, 2]
    assert policy.pin("c", ids(0, 4, 5), 9.0, 0.0, owner="bob").tolist() == [0, 4, 5], (
        "0 is pinned by ann, and costs bob"
    )
    assert not policy.has_room("ann")
    assert not policy.has_room("bob")
    assert not policy.has_room("eve"), "all of the pool's budget is spent"
    policy.unpin("a")
    assert policy.num_pinned_by == {"ann": 3, "bob": 3}
    policy.unpin("b")
    assert policy.num_pinned_by == {"bob": 3}
    policy.check_integrity()


def test_a_hit_of_its_last_block_refreshes_a_pin_that_asks_for_it():
    policy = pinnable()
    policy.pin("a", ids(0, 1), until=10.0, now=0.0, refresh_s=10.0)
    policy.pin("b", ids(0, 2), until=10.0, now=0.0)
    policy.expire(8.0)
    policy.note_hit(ids(0, 2))
    assert (policy.end_of("a"), policy.end_of("b")) == (10.0, 10.0)
    policy.note_hit(ids(0, 1))
    assert (policy.end_of("a"), policy.end_of("b")) == (18.0, 10.0)
    assert policy.expire(17.9) == ["b"]
    assert policy.expire(18.0) == ["a"]


def test_pins_beyond_the_budget_are_not_made_and_the_head_comes_first():
    policy = pinnable(num_blocks=6, max_share=0.5)
    assert policy.pin("a", ids(0, 1), until=10.0, now=0.0).tolist() == [0, 1]
    assert policy.pin("b", ids(0, 1, 2, 3), until=20.0, now=0.0).tolist() == [0, 1, 2]
    assert policy.pin("c", ids(4), until=20.0, now=1.0).tolist() == []
    assert policy.num_pinned == policy.max_pinned == 3
    policy.unpin("a")
    policy.unpin("b")
    assert policy.pin("c", ids(4), until=20.0, now=2.0).tolist() == [4]
    policy.check_integrity()


def test_ended_pins_make_room_in_the_budget():
    policy = pinnable(num_blocks=4, max_share=0.25)
    policy.pin("a", ids(0), until=5.0, now=0.0)
    assert policy.pin("b", ids(1), until=9.0, now=4.0).tolist() == []
    policy.expire(5.0)
    assert policy.pin("b", ids(1), until=9.0, now=5.0).tolist() == [1]
    assert policy.pinned_block_ids().tolist() == [1]


def test_a_pin_that_ends_before_it_begins_is_none():
    policy = pinnable()
    assert policy.pin("a", ids(0), until=3.0, now=3.0).tolist() == []
    assert policy.pin("a", ids(), until=9.0, now=3.0).tolist() == []
    policy.check_integrity()


def test_a_held_block_keeps_its_pin_until_it_is_freed():
    policy = pinnable()
    policy.remove(ids(3, 2))
    policy.pin("a", ids(2, 3), until=10.0, now=0.0)
    policy.check_integrity()
    policy.append(ids(3, 2))
    assert policy.in_order().tolist() == [5, 4, 1, 0, 3, 2]
    policy.remove(ids(3, 4))
    policy.expire(10.0)
    policy.append(ids(4, 3))
    assert policy.in_order().tolist() == [5, 1, 0, 2, 4, 3]


@pytest.mark.parametrize("name", NAMES)
def test_only_content_can_be_pinned_and_losing_it_ends_the_pin(name):
    policy = PinnedPolicy(make_policy(name, 4), 4)
    assert policy.pin("a", ids(0, 1), until=10.0, now=0.0).tolist() == []
    policy.note_cached(policy.popleft(2), ids(0, 1))
    policy.append(ids(1, 0))
    assert policy.pin("a", ids(0, 1), until=10.0, now=0.0).tolist() == [0, 1]
    policy.note_forgotten(ids(0, 3))
    assert policy.pinned_block_ids().tolist() == [1]
    assert policy.in_order().tolist() == [0, 2, 3, 1]
    policy.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_without_pins_the_inner_order_is_untouched(name):
    rng = random.Random(2)
    plain, wrapped = make_policy(name, 8), PinnedPolicy(make_policy(name, 8), 8)
    held = []
    for _ in range(300):
        if rng.random() < 0.5:
            count = rng.randint(0, len(plain))
            taken = [policy.popleft(count) for policy in (plain, wrapped)]
            assert taken[0].tolist() == taken[1].tolist()
            for policy in (plain, wrapped):
                policy.note_cached(taken[0], np.arange(count, dtype=np.int32))
            held += taken[0].tolist()
        else:
            rng.shuffle(held)
            count = rng.randint(0, len(held))
            back, held = held[:count], held[count:]
            for policy in (plain, wrapped):
                policy.append(ids(*back))
        assert plain.in_order().tolist() == wrapped.in_order().tolist()


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_an_impossible_budget_is_refused(share):
    with pytest.raises(ConfigError, match="max_pinned_share"):
        PinnedPolicy(make_policy("lru", 4), 4, max_share=share)


class PlainPins:
    """What PinnedPolicy must do, with nothing but sets."""

    def __init__(self, budget: int, owner_budget: int) -> None:
        self.budget, self.owner_budget = budget, owner_budget
        self.blocks: dict[int, list[int]] = {}
        self.until: dict[int, float] = {}
        self.owner: dict[int, str] = {}

    def pinned(self, owner: str | None = None) -> set[int]:
        return {b for pin, blocks in self.blocks.items() if owner in (None, self.owner[pin]) for b in blocks}

    def pin(self, pin: int, wanted: list[int], until: float, now: float, owner: str, cached: set[int]) -> list[int]:
        if pin not in self.blocks:
            if until <= now:
                return []
            self.blocks[pin], self.until[pin], self.owner[pin] = [], until, owner
        self.until[pin] = max(until, self.until[pin])
        owner, mine = self.owner[pin], self.blocks[pin]
        for block in wanted:
            if block in mine:
                continue
            fits = block in self.pinned() or len(self.pinned()) < self.budget
            fits_owner = block in self.pinned(owner) or len(self.pinned(owner)) < self.owner_budget
            if block not in cached or not fits or not fits_owner:
                break
            mine.append(block)
        mine.sort(key=lambda block: wanted.index(block) if block in wanted else len(wanted))
        return [block for block in wanted if block in mine]

    def end(self, pin: int) -> None:
        for table in (self.blocks, self.until, self.owner):
            table.pop(pin, None)

    def expire(self, now: float) -> None:
        for pin in [pin for pin, until in self.until.items() if until <= now]:
            self.end(pin)

    def lose(self, gone: set[int]) -> None:
        self.blocks = {pin: [b for b in blocks if b not in gone] for pin, blocks in self.blocks.items()}


@pytest.mark.parametrize("name", NAMES)
def test_random_pins_lose_no_block_and_match_a_plain_model(name):
    num_blocks, now = 12, 0.0
    rng = random.Random(4)
    policy = PinnedPolicy(make_policy(name, num_blocks), num_blocks, max_share=0.4, max_owner_share=0.3)
    pool = BlockPool(num_blocks, on_reuse=lambda _: None, policy=policy)
    counts, cached, plain, broken = np.zeros(num_blocks, np.int32), set(), PlainPins(4, 3), 0
    full = [0, 0]
    for _ in range(600):
        kind = rng.random()
        if kind < 0.25 and pool.get_num_free_blocks():
            expected = pool.free_block_ids().tolist()
            taken = pool.get_new_blocks(rng.randint(1, pool.get_num_free_blocks()))
            assert taken.tolist() == expected[: len(taken)]
            broken += len(plain.pinned() & set(taken.tolist()))
            cached.difference_update(taken.tolist())
            plain.lose(set(taken.tolist()))
            counts[taken] += 1
            fresh = taken[: rng.randint(0, len(taken))]
            pool.note_cached(fresh, np.arange(len(fresh), dtype=np.int32))
            cached.update(fresh.tolist())
        elif kind < 0.4 and cached:
            found = ids(*rng.sample(sorted(cached), 1))
            pool.touch(found)
            policy.note_hit(found)
            counts[found] += 1
            for pin, blocks in plain.blocks.items():
                if pin % 2 and blocks and blocks[-1] == found[0]:
                    plain.until[pin] = max(plain.until[pin], now + 2.0)
        elif kind < 0.65 and (held := np.flatnonzero(counts)).size:
            released = ids(*rng.sample(held.tolist(), rng.randint(1, len(held))))
            pool.free_blocks(released)
            counts[released] -= 1
        elif kind < 0.7:
            gone = rng.sample(range(num_blocks), 2)
            pool.note_forgotten(ids(*gone))
            cached.difference_update(gone)
            plain.lose(set(gone))
        elif kind < 0.9:
            now += rng.random()
            plain.expire(now)
            policy.expire(now)
            pin, until, owner = rng.randrange(5), now + 5 * rng.random(), rng.choice(("ann", "bob"))
            wanted = rng.sample(range(num_blocks), 3)
            expected = plain.pin(pin, wanted, until, now, owner, cached)
            refresh_s = 2.0 if pin % 2 else None
            assert policy.pin(pin, ids(*wanted), until, now, owner=owner, refresh_s=refresh_s).tolist() == expected
            full[0] += len(plain.pinned()) == 4
            full[1] += max(len(plain.pinned(owner)) for owner in ("ann", "bob")) == 3
        elif kind < 0.95:
            pin, until = rng.randrange(5), now + 5 * rng.random() - 0.5
            policy.set_end(pin, until, now)
            if pin in plain.until:
                plain.until[pin] = until
                plain.expire(now)
        else:
            pin = rng.randrange(5)
            policy.unpin(pin)
            plain.end(pin)
        pool.check_integrity(counts)
        assert policy.pinned_block_ids().tolist() == sorted(plain.pinned())
        assert {pin: policy.end_of(pin) for pin in range(5)} == {pin: plain.until.get(pin) for pin in range(5)}
        assert policy.num_broken == broken
        order = [block in plain.pinned() for block in pool.free_block_ids().tolist()]
        assert order == sorted(order)
        assert sorted(policy.in_order().tolist()) == [block for block in range(num_blocks) if counts[block] == 0]
    assert broken
    assert min(full) > 10, "both budgets were spent"


def test_pins_that_are_renewed_and_shortened_for_ever_do_not_grow_the_heap():
    policy = pinnable(num_blocks=8)
    for turn in range(1000):
        policy.pin("a", ids(0, 1, 2), until=turn + 1000.0, now=float(turn))
        policy.set_end("a", turn + 500.0, now=float(turn))
        policy.pin(f"b {turn}", ids(0), until=turn + 1000.0, now=float(turn))
        policy.unpin(f"b {turn}")
        assert len(policy._ends) <= 20
    policy.check_integrity()
    policy.expire(1499.0)
    assert policy.num_pinned == 0


class PinsBeyondBudget(PinnedPolicy):
    def pin(self, *args):
        self.max_pinned, budget = 100, self.max_pinned
        super().pin(*args)
        self.max_pinned = budget


class PinsForEver(PinnedPolicy):
    def _push(self, until, pin):
        pass


class ForgetsAHolder(PinnedPolicy):
    def pin(self, pin, *args):
        super().pin(pin, *args)
        self._holders.clear()


class UnpinsWithoutReturning(PinnedPolicy):
    def unpin(self, pin):
        self._release(pin, self._pins[pin], list(self._pins[pin].blocks))


@pytest.mark.parametrize("broken", [PinsBeyondBudget, PinsForEver, ForgetsAHolder, UnpinsWithoutReturning])
def test_the_integrity_check_catches_broken_pins(broken):
    policy = broken(make_policy("lru", 6), 6)
    pool = BlockPool(6, on_reuse=lambda _: None, policy=policy)
    blocks = pool.get_new_blocks(6)
    pool.note_cached(blocks, np.arange(6, dtype=np.int32))
    pool.free_blocks(blocks)
    policy.pin("a", ids(0, 1, 2, 3) if broken is PinsBeyondBudget else ids(0, 1), 9.0, 0.0)
    if broken is UnpinsWithoutReturning:
        policy.unpin("a")
    with pytest.raises(AssertionError):
        pool.check_integrity(np.zeros(6, np.int32))


def test_a_pinned_prompt_survives_a_flood_and_goes_when_its_time_is_over():
    policy = PinnedPolicy(make_policy("lru", 8), 8)
    manager = KVCacheManager(8, block_size=4, eviction_policy=policy)

    def run(name, tokens):
        seq = TokenSequence(name, list(tokens), block_size=4)
        hit = manager.get_computed_blocks(seq)
        assert manager.allocate_slots(seq, len(seq), hit) is not None
        blocks = manager.block_ids(name)
        manager.free(name)
        manager.check_integrity()
        return hit.num_tokens, blocks

    _, blocks = run("pinned", range(16))
    policy.pin("a", blocks, until=300.0, now=0.0)
    for number in range(6):
        run(f"flood {number}", range(100 * number + 100, 100 * number + 116))
    assert run("again", range(16))[0] == 15
    run("needs all", range(1000, 1032))  # never wedged
    assert policy.num_broken == 4
    assert run("once more", range(16))[0] == 0

    policy.pin("a", run("pinned anew", range(16))[1], until=600.0, now=300.0)
    policy.expire(600.0)
    for number in range(6):
        run(f"second flood {number}", range(100 * number + 100, 100 * number + 116))
    assert run("too late", range(16))[0] == 0


def test_the_end_of_a_pin_costs_the_same_however_many_others_share_its_blocks():
    class Name:
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Name.num_compared += 1
            return self is other

        __hash__ = object.__hash__

    policy, shared = pinnable(num_blocks=8), ids(0, 1, 2)
    names = [Name() for _ in range(200)]
    for name in names:
        policy.pin(name, shared, until=10.0, now=0.0, owner="ann")
    for name in reversed(names):
        policy.unpin(name)
    assert Name.num_compared < 10 * len(names)
    assert policy.num_pinned == 0
    policy.check_integrity()

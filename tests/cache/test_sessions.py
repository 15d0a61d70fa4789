"""Sessions in the cache: closing one gives up what only it used, and nothing else."""

import random

import numpy as np
import pytest

from cache_world import GROUPS
from doors import given_up_in, index_of, num_given_up
from foreword.cache import (
    EntryWish,
    ExtraKeys,
    HashIndex,
    KVCacheManager,
    PinnedPolicy,
    RadixIndex,
    SlidingWindowSpec,
    TokenSequence,
    make_policy,
)
from foreword.cache.account import sessions
from foreword.cache.account.sessions import SessionBlocks

SIZE, NUM_BLOCKS = 2, 12


def make_manager(index=RadixIndex, policy="lru", with_pins=False):
    inner = make_policy(policy, NUM_BLOCKS)
    return KVCacheManager(
        NUM_BLOCKS,
        block_size=SIZE,
        index=RadixIndex(NUM_BLOCKS, SIZE) if index is RadixIndex else HashIndex(NUM_BLOCKS),
        eviction_policy=PinnedPolicy(inner, NUM_BLOCKS) if with_pins else inner,
    )


class Chat:
    """Requests of any sessions, one after the other, and what each found."""

    def __init__(self, manager):
        self.manager, self._number = manager, 0

    def start(self, session, tokens):
        """Admit a request; returns its sequence and the number of tokens that it found."""
        self._number += 1
        sequence = TokenSequence(f"r{self._number}", tokens, block_size=SIZE)
        sequence.session = session
        self.manager.begin_step()
        hit = self.manager.get_computed_blocks(sequence)
        assert self.manager.allocate_slots(sequence, len(tokens), hit) is not None
        self.manager.take_copies()
        self.manager.begin_step()
        self.hit = hit
        return sequence, hit.num_tokens

    def ask(self, session, tokens):
        """Run a whole request; returns the number of tokens that it found."""
        sequence, found = self.start(session, tokens)
        self.manager.free(sequence)
        self.manager.check_integrity()
        return found


def num_cached(manager, tokens):
    return manager.get_computed_blocks(TokenSequence("look", [*tokens, 9], block_size=SIZE)).num_shared_tokens


SHARED, ALICE, BOB = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]


@pytest.mark.parametrize("index", [RadixIndex, HashIndex])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_what_a_closed_session_left_goes_before_what_is_older_and_what_it_shared_stays(index, policy):
    chat = Chat(make_manager(index, policy))
    chat.ask("bob", [*SHARED, *BOB])  # 4 blocks, the oldest
    chat.ask("alice", [*SHARED, *ALICE])  # 2 shared, 2 of its own
    assert chat.manager.close_session("alice") == 2
    assert num_cached(chat.manager, [*SHARED, *ALICE]) == 8, "what was given up can be hit until it is evicted"
    chat.ask(None, [4] * 2 * (NUM_BLOCKS - 6 + 2))  # all empty blocks, and two more
    assert num_cached(chat.manager, [*SHARED, *BOB]) == 8
    assert num_cached(chat.manager, [*SHARED, *ALICE]) == 4


def test_a_hit_takes_back_what_was_given_up():
    chat = Chat(make_manager())
    chat.ask("alice", ALICE)
    chat.ask("bob", BOB)
    chat.manager.close_session("alice")
    chat.ask("carol", [*ALICE, 9])
    assert num_given_up(chat.manager) == 0
    chat.ask(None, [4] * 2 * (NUM_BLOCKS - 4 + 1))
    assert num_cached(chat.manager, ALICE) == 4
    assert num_cached(chat.manager, BOB) < 4


def test_a_request_without_a_session_shares_what_it_uses():
    chat = Chat(make_manager())
    chat.ask("alice", ALICE)
    chat.ask(None, [*ALICE, 9])
    assert chat.manager.close_session("alice") == 0


def test_blocks_that_were_there_before_the_first_session_belong_to_nobody():
    chat = Chat(make_manager())
    chat.ask(None, ALICE)
    chat.ask("alice", [*ALICE, *BOB])
    assert chat.manager.close_session("alice") == 2


def test_what_a_running_request_of_a_closed_session_holds_goes_when_it_ends():
    chat = Chat(make_manager())
    mine, _ = chat.start("alice", ALICE)
    other, found = chat.start("bob", [*ALICE, *BOB])
    assert found == 4
    assert chat.manager.close_session("alice") == 0
    chat.manager.free(mine)
    chat.manager.check_integrity()
    assert num_given_up(chat.manager) == 0, "another request holds it"
    chat.manager.free(other)
    chat.manager.check_integrity()
    assert num_given_up(chat.manager) == 0, "two sessions used it"
    alone, _ = chat.start("carol", [5] * 4)
    chat.manager.close_session("carol")
    chat.manager.free(alone)
    assert num_given_up(chat.manager) == 2


def test_pins_win_over_closing_and_closing_over_nothing_else():
    manager = make_manager(with_pins=True)
    chat = Chat(manager)
    chat.ask("alice", [*ALICE, *BOB])
    manager.keep_prefix(TokenSequence("pin", ALICE, block_size=SIZE), EntryWish(10.0, name="kept"), 0.0)
    assert manager.close_session("alice") == 2
    entry = manager.keep_prefix(TokenSequence("pin", [*ALICE, *BOB], block_size=SIZE), EntryWish(10.0, name="all"), 0.0)
    assert entry.num_kept_tokens == 8
    assert num_given_up(manager) == 0, "a pin takes back what was given up"
    manager.check_integrity()


def test_a_session_of_which_nothing_is_known_is_told_apart_from_one_that_has_nothing():
    chat = Chat(make_manager())
    assert chat.manager.close_session("alice") is None
    chat.ask("alice", [7])
    assert chat.manager.close_session("alice") == 0
    assert chat.manager.close_session("alice") is None
    manager = KVCacheManager(NUM_BLOCKS, block_size=SIZE, enable_prefix_caching=False)
    Chat(manager).ask("alice", ALICE)
    assert manager.close_session("alice") is None


def test_a_million_sessions_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_OPEN_SESSIONS", 100)
    blocks = SessionBlocks(8)
    blocks.begin("running", "running", 1)
    for number in range(1000):
        blocks.begin(number, f"r{number}", 0)
        blocks.note_use(0, np.array([number % 8], np.int32))
        blocks.close_row(0)
        assert blocks.end(f"r{number}") is None
    assert len(blocks._numbers) <= 102
    assert blocks.close("running") is not None, "a session with running requests is not forgotten"
    assert blocks.end("running") is not None
    assert blocks.close(890) is None
    assert blocks.close(902) is not None
    blocks.close_row(1)
    blocks.check_integrity(np.arange(8), [])


def test_a_running_request_of_a_forgotten_session_leaves_its_blocks_like_others(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_OPEN_SESSIONS", 1)
    chat = Chat(make_manager())
    running, _ = chat.start("alice", ALICE)
    for other in range(3):
        chat.ask(other, [5, other])
    chat.manager.free(running)
    chat.manager.check_integrity()
    assert num_given_up(chat.manager) == 0


def test_a_preempted_request_has_not_ended():
    chat = Chat(make_manager())
    request, _ = chat.start("alice", [*ALICE, *BOB])
    assert chat.manager.close_session("alice") == 0
    chat.manager.free(request, ended=False)
    assert num_given_up(chat.manager) == 0, "it looks them up again"
    assert chat.manager.allocate_slots(request, 8, chat.manager.get_computed_blocks(request)) is not None
    chat.ask("alice", [7, 7])  # a new session of the same id
    chat.manager.check_integrity()
    chat.manager.free(request)
    assert num_given_up(chat.manager) == 4
    assert chat.manager.close_session("alice") == 1
    waiting, _ = chat.start("carol", [6] * 4)
    chat.manager.close_session("carol")
    chat.manager.free(waiting, ended=False)
    chat.manager.end(waiting.request_id)  # aborted in the queue
    chat.manager.check_integrity()
    assert num_given_up(chat.manager) == 7


def test_what_several_requests_of_a_closed_session_hold_goes_when_the_last_one_ends():
    chat = Chat(make_manager())
    first, _ = chat.start("alice", ALICE)
    second, _ = chat.start("alice", [*ALICE, *BOB])
    chat.manager.close_session("alice")
    chat.manager.free(first)
    assert num_given_up(chat.manager) == 0
    chat.manager.free(second)
    assert num_given_up(chat.manager) == 4


def test_what_one_session_gave_up_belongs_to_the_next_that_uses_it():
    chat = Chat(make_manager())
    chat.ask("first", SHARED)
    assert chat.manager.close_session("first") == 2
    chat.ask("second", [*SHARED, *ALICE])
    assert chat.manager.close_session("second") == 4


def test_a_copy_to_a_lower_tier_does_not_take_back_what_was_given_up():
    chat = Chat(make_manager())
    chat.ask("alice", ALICE)
    chat.ask("bob", BOB)
    manager = chat.manager
    [alice] = manager.cached_blocks(TokenSequence("look", ALICE, block_size=SIZE))
    manager.hold_blocks(alice[:1])  # a copy that begins before the closing, and one that begins after it
    assert manager.close_session("alice") == 2
    manager.hold_blocks(alice[1:])
    manager.check_integrity()
    manager.release_blocks(alice)
    manager.check_integrity()
    assert num_given_up(manager) == 2
    manager.hold_blocks(alice)
    chat.ask("carol", [*ALICE, 9])  # a use, meanwhile
    manager.release_blocks(alice)
    assert num_given_up(manager) == 0


def test_a_prefix_that_everybody_may_use_stays():
    chat = Chat(make_manager())
    salted = TokenSequence("r", [*SHARED, *ALICE], block_size=SIZE, extra_keys=ExtraKeys(salt="s", salt_offset=4))
    salted.session = "alice"
    assert chat.manager.allocate_slots(salted, 8) is not None
    chat.manager.free(salted)
    assert chat.manager.close_session("alice") == 2


def test_a_budget_that_covers_nothing_takes_back_nothing():
    manager = KVCacheManager(
        NUM_BLOCKS,
        block_size=SIZE,
        index=RadixIndex(NUM_BLOCKS, SIZE),
        eviction_policy=PinnedPolicy(make_policy("lru", NUM_BLOCKS), NUM_BLOCKS, max_share=1 / NUM_BLOCKS),
    )
    Chat(manager).ask("alice", ALICE)
    manager.close_session("alice")
    entry = manager.keep_prefix(TokenSequence("pin", ALICE, block_size=SIZE), EntryWish(10.0), 0.0)
    assert (entry.num_kept_tokens, num_given_up(manager)) == (2, 1)
    manager.check_integrity()


@pytest.mark.parametrize("each", [False, True])
def test_what_leaves_the_window_of_another_session_stays(each):
    """Blocks that a request releases while it runs count as used by its session."""
    manager = KVCacheManager(24, groups=[SlidingWindowSpec(block_size=SIZE, window=4)])
    chat = Chat(manager)
    chat.ask("alice", ALICE)
    bob, found = chat.start("bob", [*ALICE, 9])
    assert found == 4
    row, length = int(manager.handles([bob.request_id])[0]), len(bob)
    for token in range(10, 18):
        manager.begin_step()
        bob.append(token)
        length += 1
        if each:
            assert manager.allocate_running_slots(np.array([row]), np.array([length])) == 1
        else:
            assert manager.grow(row, length) is not None
    assert not set(chat.hit.tables[0].tolist()) & set(manager.block_ids(bob.request_id).tolist())
    manager.free(bob)
    manager.check_integrity()
    assert manager.close_session("alice") == 0
    assert manager.close_session("bob") >= 3, "its own, those too that left the window"


@pytest.mark.parametrize("groups", [None, "full and window", "full and recurrent"])
def test_closing_gives_up_exactly_the_blocks_that_no_other_session_used(groups):
    rng = random.Random(7)
    manager = (
        make_manager("hash") if groups is None else KVCacheManager(24, groups=GROUPS[groups], eviction_policy="value")
    )
    chat, users, num_closed = Chat(manager), {}, 0
    for _ in range(400):
        if rng.random() < 0.3:
            session = rng.choice("abc")
            cached = set(index_of(manager).block_ids().tolist())
            early = set(given_up_in(manager).tolist())
            expected = {block for block in cached - early if users.get(block) == {session}}
            chosen = manager.close_session(session)
            if chosen is not None:
                after = set(given_up_in(manager).tolist())
                assert after - early == expected
                num_closed += len(expected)
                users = {block: used for block, used in users.items() if used != {session}}
                users = {block: {"closed" if one == session else one for one in used} for block, used in users.items()}
        else:
            session = rng.choice("abc")
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            sequence, _ = chat.start(session, tokens)
            tables = [manager.block_ids(sequence.request_id, group) for group in range(len(manager.groups))]
            held = np.concatenate(tables)
            found = set(np.concatenate(chat.hit.tables).tolist())
            for block in held[held >= 0].tolist():
                users[block] = {session} | (users.get(block, set()) if block in found else set())
            manager.free(sequence)
        manager.check_integrity()
    assert num_closed > 20

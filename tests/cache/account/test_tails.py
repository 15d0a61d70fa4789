"""Tails: what a finished request leaves in its last block, which is not full, is found too (radix index)."""

from __future__ import annotations

import numpy as np
import pytest

from doors import index_of
from foreword.cache import (
    BlockState,
    CacheLedger,
    EntryWish,
    EventLog,
    ExtraKeys,
    HashIndex,
    KVCacheManager,
    MissReason,
    PinnedPolicy,
    RadixIndex,
    TokenSequence,
    entry_name,
)
from foreword.replay.policies import make_policy

SIZE = 4


def manager_of(num_blocks=16, policy="lru", **options):
    return KVCacheManager(
        num_blocks, block_size=SIZE, index=RadixIndex(num_blocks, SIZE), eviction_policy=policy, **options
    )


@pytest.fixture
def manager():
    return manager_of()


def sequence(tokens, name="r", **extra):
    ids = [ord(token) for token in tokens]
    return TokenSequence(name, ids, block_size=SIZE, extra_keys=ExtraKeys(**extra))


def run(manager, tokens, answer="", name="r", num_computed=None, **extra):
    """Serve a request as a scheduler does: the last token of its answer is sampled, not computed. Returns its hit."""
    one = sequence(tokens, name, **extra)
    manager.begin_step()
    hit = manager.get_computed_blocks(one)
    assert manager.allocate_slots(one, len(one) if num_computed is None else num_computed, hit) is not None
    manager.take_copies()
    manager.check_integrity()
    for token in answer:
        manager.begin_step()
        one.append(ord(token))
        if token != answer[-1]:
            assert manager.allocate_slots(one, len(one)) is not None
        manager.check_integrity()
    manager.free(name)
    manager.check_integrity()
    manager.begin_step()
    manager.check_integrity()
    return hit.num_tokens


def found(manager, tokens, **extra):
    return manager.get_computed_blocks(sequence(tokens, **extra)).num_tokens


# ----------------------------------------------------------------------------------------------- what is found


def test_a_sequence_and_one_more_token_hits_all_of_it(manager):
    run(manager, "ABCDEFG")
    assert found(manager, "ABCDEFGH") == 7
    assert manager.get_num_tails() == 1
    assert manager.get_num_cached_blocks() == 1


def test_a_prompt_shorter_than_a_block_is_found(manager):
    run(manager, "AB")
    assert found(manager, "ABC") == 2
    assert found(manager, "AB") == 1, "the last token is computed for its logits"
    assert found(manager, "AXC") == 1
    assert found(manager, "XBC") == 0


def test_a_second_turn_hits_everything_but_the_last_sampled_token(manager):
    run(manager, "ABCDEF", answer="GHI")
    assert found(manager, "ABCDEFGHIuser") == 8
    run(manager, "ABCDEFGHIu", answer="vw")
    assert found(manager, "ABCDEFGHIuvwxyz") == 11, "w was sampled, but its KV was never computed"


def test_a_block_whose_last_token_became_known_late_is_kept_whole(manager):
    """Where steps are planned ahead, slots are there before the token is."""
    one = sequence("ABCDEFG")
    manager.allocate_slots(one, 8)
    one.append(ord("H"))
    manager.free("r")
    manager.check_integrity()
    assert found(manager, "ABCDEFGHI") == 8
    assert manager.get_num_tails() == 0


def test_only_tokens_that_are_known_and_have_slots_are_kept(manager):
    run(manager, "ABCDEFG", num_computed=6)
    assert found(manager, "ABCDEFGH") == 6


def test_a_request_that_generated_what_is_no_token_is_freed_and_leaves_no_tail(manager):
    one = sequence("ABCDEF")
    manager.allocate_slots(one, 6)
    one.append(-1)
    manager.free("r")
    manager.check_integrity()
    assert manager.get_num_free_blocks() == 16
    assert (manager.get_num_cached_blocks(), manager.get_num_tails()) == (1, 0)


def test_tails_are_found_under_their_own_salt_adapter_and_images(manager):
    run(manager, "ABCDEF", salt="x")
    assert found(manager, "ABCDEFG") == found(manager, "ABCDEFG", salt="y") == 0
    assert found(manager, "ABCDEFG", salt="x") == 6
    run(manager, "AB", name="s", salt="x", salt_offset=1)
    assert found(manager, "ABC", salt="y", salt_offset=1) == 1


def test_a_tail_is_copied_and_never_shared(manager):
    run(manager, "ABCDEF")
    tail = manager.free_block_ids()[0]
    one = sequence("ABCDEFG", "one")
    hit = manager.get_computed_blocks(one)
    assert hit.num_shared_tokens == 4
    new = manager.allocate_slots(one, 7, hit)
    assert manager.take_copies().tolist() == [[hit.partial.block_id, new[0]]]
    assert hit.partial.block_id != new[0]
    assert hit.partial.block_id == 1
    assert tail is not None


def test_hits_in_tails_are_counted(manager):
    run(manager, "ABCDEF")
    run(manager, "ABCDEFGHIJK")
    assert (manager.stats.hits, manager.stats.tail_hits) == (6, 2)


# ---------------------------------------------------------------------------------------- one is enough


def test_the_same_tail_is_kept_once(manager):
    for name in "abc":
        run(manager, "ABCDEF", name=name)
    assert manager.get_num_tails() == 1


def test_a_longer_tail_takes_the_place_of_a_shorter_one_and_not_the_other_way_round(manager):
    run(manager, "ABCDE")
    run(manager, "ABCDEFG")
    assert manager.get_num_tails() == 1
    assert found(manager, "ABCDEFGH") == 7
    run(manager, "ABCDEF")
    assert manager.get_num_tails() == 1
    assert found(manager, "ABCDEFGH") == 7


def test_tails_that_part_are_all_kept(manager):
    for answer in ("EF", "EX", "YZ", "E"):
        run(manager, "ABCD" + answer)
    assert manager.get_num_tails() == 3
    assert [found(manager, "ABCD" + tail + "!") for tail in ("EF", "EX", "YZ", "EQ", "YQ")] == [6, 6, 6, 5, 5]


def test_a_full_block_of_the_same_tokens_makes_a_tail_superfluous(manager):
    run(manager, "ABCDEF")
    run(manager, "ABCDEFGH")
    assert manager.get_num_tails() == 0
    assert found(manager, "ABCDEFX") == 6


def test_a_tail_of_what_is_in_a_full_block_is_not_kept(manager):
    run(manager, "ABCDEFGH")
    run(manager, "ABCDEF")
    assert manager.get_num_tails() == 0


def test_two_requests_of_one_step_copy_the_same_tail(manager):
    """The first one's block is being filled, so it cannot be copied yet; the tail can."""
    run(manager, "ABCDEF")
    for name, tokens in (("one", "ABCDEFGHIJ"), ("two", "ABCDEFXYZ")):
        one = sequence(tokens, name)
        hit = manager.get_computed_blocks(one)
        assert (hit.num_tokens, hit.partial.block_id) == (6, 1)
        manager.allocate_slots(one, len(one), hit)
        manager.check_integrity()
    manager.begin_step()
    manager.check_integrity()
    assert manager.get_num_tails() == 0


# --------------------------------------------------------------------------------- what is not computed


def test_a_step_that_failed_leaves_no_tail(manager):
    one = sequence("ABCDEFG")
    manager.allocate_slots(one, 7)
    manager.forget_uncomputed("r", 0)
    manager.free("r")
    manager.check_integrity()
    manager.begin_step()
    assert found(manager, "ABCDEFGH") == 0


def test_what_was_computed_before_the_step_that_failed_is_kept(manager):
    one = sequence("ABCDEFGHIJK")
    manager.allocate_slots(one, 6)
    manager.begin_step()
    manager.allocate_slots(one, 11)
    manager.forget_uncomputed("r", 6)
    manager.free("r")
    manager.check_integrity()
    manager.begin_step()
    assert found(manager, "ABCDEFGHIJK") == 6


def test_what_was_to_be_copied_by_the_step_that_failed_is_not_kept(manager):
    run(manager, "ABCDEF")
    one = sequence("ABCDEFGHIJ", "one")
    hit = manager.get_computed_blocks(one)
    manager.allocate_slots(one, 10, hit)
    manager.take_copies()  # never carried out
    manager.evict_blocks(np.array([hit.partial.block_id], np.int32))
    manager.forget_uncomputed("one", max(hit.num_tokens, hit.num_shared_tokens))
    manager.free("one")
    manager.check_integrity()
    manager.begin_step()
    assert found(manager, "ABCDEFGHIJ") == 4


def test_a_request_that_goes_on_after_a_failed_step_is_kept_as_far_as_it_came(manager):
    one = sequence("ABCDEFG")
    manager.allocate_slots(one, 6)
    manager.forget_uncomputed("r", 0)
    manager.begin_step()
    manager.allocate_slots(one, 7)
    manager.free("r")
    manager.begin_step()
    assert found(manager, "ABCDEFGH") == 7


def test_a_tail_is_not_copied_in_the_step_that_may_still_fill_it(manager):
    one = sequence("ABCDEF")
    manager.allocate_slots(one, 6)
    manager.free("r")
    assert found(manager, "ABCDEFG") == 4
    manager.begin_step()
    assert found(manager, "ABCDEFG") == 6


def test_without_what_is_before_it_no_tail_is_kept(manager):
    one = sequence("ABCDEF")
    manager.allocate_slots(one, 6)
    manager.evict_blocks(manager.block_ids("r"))
    manager.free("r")
    manager.check_integrity()
    assert manager.get_num_tails() == 0
    assert found(manager, "ABCDEFG") == 0


# ------------------------------------------------------------------------------------------------ eviction


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "last_accessed", "priority", "value"])
def test_tails_go_after_empty_blocks_and_before_every_full_one(policy):
    manager = manager_of(8, make_policy(policy, 8))
    run(manager, "ABCDEFGHij", name="old")  # two full blocks and a tail
    run(manager, "QRSTu", name="new")  # one and a tail
    assert manager.get_num_tails() == 2
    order = manager.free_block_ids().tolist()
    tails = [order.index(block) for block in index_of(manager).tail_block_ids().tolist()]
    assert sorted(tails) == [3, 4], "three empty blocks, two tails, three full blocks"
    run(manager, "0123456789ab", name="x")  # takes what is empty
    assert manager.get_num_tails() == 2
    run(manager, "0123456789abcd", name="y")  # one more
    assert manager.get_num_tails() == 2, "the older tail went, and a new one came"
    assert found(manager, "ABCDEFGHijk") == 8
    assert found(manager, "QRSTuv") == 5
    assert manager.stats.tail_evictions == 1
    assert manager.stats.evictions == 0
    run(manager, "!#$%&()*+,-./:;", name="z")
    assert manager.stats.evictions > 0


def test_a_tail_that_was_hit_goes_after_the_others():
    manager = manager_of(6)
    run(manager, "Ab", name="a")
    run(manager, "Cd", name="c")
    one = sequence("Abx", "one")
    manager.allocate_slots(one, 3, manager.get_computed_blocks(one))
    manager.free("one")
    manager.begin_step()  # Abx is the tail now, and Ab is superfluous
    assert manager.get_num_tails() == 2
    two = sequence("0123456789abcdefghij", "two")
    assert manager.allocate_slots(two, 20) is not None
    assert found(manager, "Cde") == 0
    assert found(manager, "Abxy") == 3


def test_forgetting_the_blocks_before_a_tail_forgets_the_tail(manager):
    run(manager, "ABCDEF")
    manager.evict_blocks(np.array([0], np.int32))
    manager.check_integrity()
    assert manager.get_num_tails() == 0
    assert (manager.block_states() == BlockState.FREE).all()


def test_a_tail_can_be_forgotten_alone_and_all_of_them_with_a_reset(manager):
    run(manager, "ABCDEF")
    assert np.count_nonzero(manager.block_states() == BlockState.CACHED) == 2
    manager.evict_blocks(np.array([1], np.int32))
    manager.check_integrity()
    assert found(manager, "ABCDEFG") == 4
    run(manager, "ABCDEF")
    manager.reset_prefix_cache()
    manager.check_integrity()
    assert found(manager, "ABCDEFG") == 0
    assert manager.get_num_free_blocks() == 16


def test_a_pinned_tail_stays_while_tails_and_blocks_go():
    policy = PinnedPolicy(make_policy("lru", 8), 8, max_share=0.5)
    manager = manager_of(8, policy)
    run(manager, "ABCDEF", name="system")
    prompt = sequence("ABCDEF")
    assert manager.keep_prefix(prompt, EntryWish(10.0), now=0.0).num_kept_tokens == 6
    manager.check_integrity()
    for number in range(5):
        run(manager, "ABCDEF" + chr(number + 97) * 9, name="question")
        run(manager, chr(number + 65) * 15, name="flood")
    assert found(manager, "ABCDEF?") == 6
    manager.drop_entry(entry_name(prompt))
    manager.check_integrity()
    run(manager, "x" * 32, name="flood")
    assert found(manager, "ABCDEF?") == 0


@pytest.mark.parametrize(("share", "until"), [(0.125, 10.0), (0.5, 0.0)])
def test_a_tail_that_gets_no_pin_goes_first_as_before(share, until):
    """The budget is one block, or the time is over."""
    manager = manager_of(8, PinnedPolicy(make_policy("lru", 8), 8, max_share=share))
    run(manager, "ABCDEF", name="system")
    run(manager, "0123", name="later")
    manager.keep_prefix(sequence("ABCDEF"), EntryWish(until), now=0.0)
    run(manager, "x" * 24, name="flood")
    assert (found(manager, "ABCDEF?"), found(manager, "0123?")) == (4, 4)


# ------------------------------------------------------------------------------------- told to the outside


def explained(manager, tokens, **extra):
    why = manager.explain(sequence(tokens, **extra))
    return why.num_hit_tokens, why.reason, None if why.eviction is None else why.eviction.cause


def test_a_lookup_that_a_tail_served_is_not_called_a_partial_block():
    manager = manager_of(ledger=CacheLedger(16))
    run(manager, "ABCDEF")
    assert explained(manager, "ABCDEFG") == (6, None, None)
    assert explained(manager, "ABCDEFGx") == (6, MissReason.NEVER_SEEN, None)
    assert explained(manager, "ABCDEx") == (5, None, None)
    assert explained(manager, "ABCDxy") == (4, MissReason.NEVER_SEEN, None)


def test_an_evicted_tail_is_told_as_evicted():
    manager = manager_of(4, ledger=CacheLedger(4))
    run(manager, "ABCDEFG")
    run(manager, "01234567")
    run(manager, "89ab")  # takes the tail
    assert explained(manager, "ABCDEFGHIJ") == (4, MissReason.EVICTED, "reused")
    assert explained(manager, "ABCDEFx") == (4, MissReason.EVICTED, "reused")
    assert explained(manager, "ABCDxyz") == (4, MissReason.NEVER_SEEN, None)
    assert explained(manager, "ABCDEFG", salt="x")[1] is not MissReason.EVICTED


def test_a_superfluous_tail_was_not_evicted():
    manager = manager_of(ledger=CacheLedger(16))
    run(manager, "ABCDEF")
    run(manager, "ABCDEFGH")
    assert explained(manager, "ABCDEFxyz") == (6, MissReason.NEVER_SEEN, None)


def test_a_tail_is_not_announced():
    """Listeners count full blocks by key."""
    log = EventLog()
    manager = manager_of(ledger=CacheLedger(16, events=log))
    run(manager, "ABCDEF")
    assert [len(told.event.token_ids) for told in log.take()] == [4]
    manager.evict_blocks(np.array([1], np.int32))
    assert log.take() == []


def test_tails_count_for_their_salt():
    ledger = CacheLedger(16)
    manager = manager_of(ledger=ledger)
    run(manager, "ABCDEF", salt="alice/1")
    run(manager, "AB", salt="bob")
    run(manager, "AB")
    assert (ledger.num_under_salt("alice"), ledger.num_under_salt("bob")) == (2, 1)
    own = ledger.blocks_under_salt("alice", manager.free_block_ids())
    manager.evict_blocks(own)
    manager.check_integrity()
    assert found(manager, "ABCDEFG", salt="alice/1") == 0
    assert found(manager, "ABC", salt="bob") == 2


# -------------------------------------------------------------------------------------------- who keeps none


def test_a_hash_index_keeps_full_blocks_only_as_vllm_does():
    manager = KVCacheManager(16, block_size=SIZE, index=HashIndex(16), ledger=CacheLedger(16))
    run(manager, "ABCDEF")
    assert found(manager, "ABCDEFG") == 4
    assert manager.get_num_tails() == 0
    assert explained(manager, "ABCDEFG")[1] is MissReason.PARTIAL_BLOCK


def test_tails_can_be_left_out():
    manager = KVCacheManager(16, block_size=SIZE, index=RadixIndex(16, SIZE, keep_tails=False))
    run(manager, "ABCDEF")
    assert found(manager, "ABCDEFG") == 4

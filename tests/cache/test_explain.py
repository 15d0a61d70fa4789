"""Why it missed: every reason, under both indexes; ghosts; what the ledger costs in memory."""

import random

import numpy as np
import pytest

from foreword.cache import (
    CacheLedger,
    EventLog,
    Eviction,
    EvictionCause,
    ExtraKeys,
    FullAttentionSpec,
    HashFunction,
    HashIndex,
    KeyedSpan,
    KVCacheManager,
    MambaSpec,
    MissReason,
    SlidingWindowSpec,
    TokenSequence,
    make_index,
)
from foreword.errors import ConfigError

both_indexes = pytest.mark.parametrize("index", ["hash", "radix"])


def sequence(name, tokens, block_size=4, **extra):
    return TokenSequence(name, list(tokens), block_size=block_size, extra_keys=ExtraKeys(**extra))


def manager_with_ledger(index="radix", num_blocks=10, clock=lambda: 7.0, **options):
    return KVCacheManager(
        num_blocks,
        block_size=4,
        index=make_index(index, num_blocks, 4),
        ledger=CacheLedger(num_blocks, clock=clock),
        **options,
    )


def run(manager, seq):
    """Admit and free a sequence; returns how its lookup went."""
    manager.begin_step()
    hit = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq), hit) is not None
    manager.check_integrity()
    explanation = manager.explanation_of(seq.request_id)
    manager.free(seq.request_id)
    manager.begin_step()
    return explanation


@both_indexes
def test_what_nobody_asked_before_was_never_seen(index):
    explanation = run(manager_with_ledger(index), sequence("a", range(12)))
    assert (explanation.num_hit_tokens, explanation.reason) == (0, MissReason.NEVER_SEEN)
    assert explanation.num_missed_tokens == 12


@both_indexes
def test_a_prompt_that_is_cached_up_to_its_last_token_missed_nothing(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(12)))
    explanation = run(manager, sequence("b", range(12)))
    assert (explanation.num_hit_tokens, explanation.reason) == (11, None)
    assert manager.stats.misses == {MissReason.NEVER_SEEN: 1}
    assert manager.stats.missed_tokens == {MissReason.NEVER_SEEN: 12}


@both_indexes
def test_what_does_not_fill_a_block_is_kept_by_the_radix_index_only(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(15)))
    explanation = run(manager, sequence("b", range(15)))
    if index == "radix":
        assert (explanation.num_hit_tokens, explanation.reason) == (14, None)
    else:
        assert (explanation.num_hit_tokens, explanation.reason) == (12, MissReason.PARTIAL_BLOCK)


@both_indexes
def test_an_evicted_prefix_says_when_and_under_which_pressure(index):
    manager = manager_with_ledger(index, num_blocks=5, clock=lambda: 1.5)
    run(manager, sequence("a", range(12)))  # blocks 0 to 2
    run(manager, sequence("b", range(100, 116)))  # blocks 3 4, then 2 1
    explanation = manager.explain(sequence("c", range(12)))
    assert (explanation.num_hit_tokens, explanation.reason) == (4, MissReason.EVICTED)
    assert explanation.eviction == Eviction(EvictionCause.REUSED, 1.5, step=3, pool_usage=0.8)
    assert explanation.num_ghost_tokens == 7  # both blocks, but for the last token
    assert "evicted (reused, with 80% of the blocks in use)" in str(explanation)


@both_indexes
def test_evicting_on_request_is_told_apart_and_is_not_what_memory_would_have_kept(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(8)))
    manager.evict_blocks(np.array([0, 1], np.int32))
    explanation = manager.explain(sequence("b", range(8)))
    assert explanation.reason is MissReason.EVICTED
    assert explanation.eviction is not None
    assert explanation.eviction.cause is EvictionCause.REQUESTED
    assert explanation.num_ghost_tokens == 0


@both_indexes
def test_a_failed_step_leaves_its_cause(index):
    manager = manager_with_ledger(index)
    seq = sequence("a", range(8))
    manager.allocate_slots(seq, 8, manager.get_computed_blocks(seq))
    manager.forget_uncomputed("a", 4)
    manager.free("a")
    explanation = manager.explain(sequence("b", range(8)))
    assert explanation.num_hit_tokens == 4
    assert explanation.eviction is not None
    assert explanation.eviction.cause is EvictionCause.FAILED


@both_indexes
@pytest.mark.parametrize(
    ("cached", "asked", "reason"),
    [
        ({}, {"salt": "tenant"}, MissReason.SALT_DIFFERS),
        ({"salt": "tenant"}, {}, MissReason.SALT_DIFFERS),
        ({"salt": "red"}, {"salt": "blue"}, MissReason.SALT_DIFFERS),
        ({"adapter": "sql"}, {"adapter": "chat"}, MissReason.ADAPTER_DIFFERS),
        ({"adapter": "sql"}, {}, MissReason.ADAPTER_DIFFERS),
        (
            {"spans": (KeyedSpan("media", "cat", 0, 3),)},
            {"spans": (KeyedSpan("media", "dog", 0, 3),)},
            MissReason.MEDIA_DIFFERS,
        ),
        ({"embeddings_hash": "x"}, {"embeddings_hash": "y"}, MissReason.MEDIA_DIFFERS),
        ({"salt": "red", "adapter": "sql"}, {"salt": "red"}, MissReason.ADAPTER_DIFFERS),
        ({"spans": (KeyedSpan("link", "source", 0, 3),)}, {}, MissReason.NEVER_SEEN),
        ({}, {"spans": (KeyedSpan("jump", "9:0", 0, 1),)}, MissReason.NEVER_SEEN),
        ({"salt": "red", "spans": (KeyedSpan("link", "source", 1, 3),)}, {"salt": "blue"}, MissReason.NEVER_SEEN),
        ({"salt": "red", "spans": (KeyedSpan("link", "source", 4, 3),)}, {"salt": "blue"}, MissReason.SALT_DIFFERS),
    ],
)
def test_equal_tokens_under_other_keys_say_in_what_they_differ(index, cached, asked, reason):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(8), **cached))
    explanation = manager.explain(sequence("b", range(8), **asked))
    assert (explanation.num_hit_tokens, explanation.reason) == (0, reason)
    # Once the other variant is gone, nothing is known of these tokens.
    manager.evict_blocks(np.arange(10, dtype=np.int32))
    assert manager.explain(sequence("c", range(8), **asked)).reason is MissReason.NEVER_SEEN
    manager.check_integrity()


@both_indexes
def test_images_that_differ_in_the_second_block_are_found_up_to_it(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(8), spans=(KeyedSpan("media", "cat", 5, 2),)))
    explanation = manager.explain(sequence("b", range(8), spans=(KeyedSpan("media", "dog", 5, 2),)))
    assert explanation.num_hit_tokens == (4 if index == "hash" else 5)
    assert explanation.reason is MissReason.MEDIA_DIFFERS


@both_indexes
def test_a_request_that_asks_not_to_be_looked_up_is_told_so(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(8)))
    seq = sequence("b", range(8))
    hit = manager.get_computed_blocks(seq, skip_reading=True)
    assert manager.explain(seq, hit).reason is MissReason.LOOKUP_SKIPPED
    manager.allocate_slots(seq, 8, hit)
    assert manager.stats.misses[MissReason.LOOKUP_SKIPPED] == 1


@both_indexes
def test_tokens_that_differ_before_the_limit_of_a_hit_were_never_seen(index):
    """A request that scores its prompt from some token on may read all tokens before that one."""
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(20)))
    for name, tokens, reason in (
        ("b", [*range(9), *range(50, 61)], MissReason.NEVER_SEEN),  # 2 tokens before the limit
        ("c", range(20), MissReason.LOOKUP_SKIPPED),
    ):
        seq = sequence(name, tokens)
        seq.most_hit_tokens = 11
        explanation = manager.explain(seq)
        assert explanation.reason is reason
        assert explanation.num_hit_tokens == (11 if name == "c" else 8 if index == "hash" else 9)


class HasAll:
    """Tiers that have every block."""

    def why_missed(self, sequence, num_tokens, *, was_here):
        return MissReason.IN_TIER


@both_indexes
@pytest.mark.parametrize(("most", "reason"), [(11, MissReason.LOOKUP_SKIPPED), (12, MissReason.IN_TIER)])
def test_a_block_in_which_the_limit_of_a_hit_ends_is_not_loaded(index, most, reason):
    manager = manager_with_ledger(index)
    manager.below = HasAll()
    run(manager, sequence("a", range(8)))
    seq = sequence("b", range(20))
    seq.most_hit_tokens = most
    explanation = manager.explain(seq)
    assert (explanation.num_hit_tokens, explanation.reason) == (8, reason)


@both_indexes
def test_what_another_request_is_computing_is_in_flight(index):
    manager = manager_with_ledger(index)
    first = sequence("a", range(12))
    manager.allocate_slots(first, 4, manager.get_computed_blocks(first))  # the first chunk of its prompt
    second = sequence("b", [*range(8), 99, 98])
    explanation = manager.explain(second)
    assert (explanation.num_hit_tokens, explanation.reason) == (4, MissReason.IN_FLIGHT)
    manager.free("a")
    assert manager.explain(second).reason is MissReason.NEVER_SEEN


@both_indexes
def test_what_is_in_flight_is_told_though_another_tenant_has_the_same_tokens(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("theirs", range(12), salt="blue"))
    first = sequence("a", range(12), salt="red")
    manager.allocate_slots(first, 4, manager.get_computed_blocks(first))
    explanation = manager.explain(sequence("b", [*range(8), 99, 98], salt="red"))
    assert (explanation.num_hit_tokens, explanation.reason) == (4, MissReason.IN_FLIGHT)


@both_indexes
def test_a_request_admitted_without_lookup_is_not_called_never_seen(index):
    manager = manager_with_ledger(index)
    run(manager, sequence("a", range(8)))
    manager.begin_step()
    manager.allocate_slots(sequence("b", range(8)), 8)
    assert manager.explanation_of("b").reason is MissReason.LOOKUP_SKIPPED


def test_tokens_that_a_hit_inside_a_block_found_are_not_counted_as_ghosts_too():
    manager = manager_with_ledger("radix")
    run(manager, sequence("gone", [0, 1, 2, 3, 4, 5, 8, 9]))
    run(manager, sequence("flood", range(100, 136)))
    run(manager, sequence("a", range(8)))
    explanation = manager.explain(sequence("b", [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]))
    assert (explanation.num_hit_tokens, explanation.reason) == (6, MissReason.EVICTED)
    assert explanation.num_ghost_tokens == 2  # token 6 and 7: with twice the blocks, 8 would have been hit


def test_the_radix_index_names_the_first_token_that_differs_and_both_continuations():
    manager = manager_with_ledger("radix")
    run(manager, sequence("a", range(16)))
    explanation = manager.explain(sequence("b", [0, 1, 2, 3, 4, 5, 60, 61, 62]))
    assert explanation.num_hit_tokens == 6
    divergence = explanation.divergence
    assert divergence is not None
    assert divergence.position == 6
    assert divergence.ours == (60, 61, 62)
    assert divergence.theirs == tuple(range(6, 16))
    assert "differs from what is cached at token 6" in str(explanation)


def test_where_nothing_cached_goes_on_the_other_continuation_is_empty():
    manager = manager_with_ledger("radix")
    run(manager, sequence("a", range(8)))
    divergence = manager.explain(sequence("b", range(14))).divergence
    assert divergence is not None
    assert (divergence.position, divergence.ours, divergence.theirs) == (8, tuple(range(8, 14)), ())


def test_the_hash_index_cannot_name_the_token():
    manager = manager_with_ledger("hash")
    run(manager, sequence("a", range(8)))
    assert manager.explain(sequence("b", [0, 1, 2, 3, 9, 9, 9, 9, 9])).divergence is None


def test_other_salts_texts_are_not_shown_as_continuations():
    manager = manager_with_ledger("radix")
    run(manager, sequence("a", range(8), salt="red"))
    divergence = manager.explain(sequence("b", [0, 1, 2, 60], salt="blue")).divergence
    assert divergence is not None
    assert (divergence.position, divergence.theirs) == (0, ())


def test_a_sliding_window_that_lost_its_blocks_is_evicted_though_the_full_group_holds_all():
    manager = KVCacheManager(
        40, groups=[FullAttentionSpec(4), SlidingWindowSpec(8, 4)], ledger=CacheLedger(40, clock=lambda: 0.0)
    )
    seq = sequence("a", range(16))
    manager.allocate_slots(seq, 16, manager.get_computed_blocks(seq))
    windows = manager.block_ids("a", 1)
    manager.free("a")
    manager.evict_blocks(windows[-2:])
    explanation = manager.explain(sequence("b", range(20)))
    assert (explanation.num_hit_tokens, explanation.reason) == (8, MissReason.EVICTED)


def test_a_state_that_was_not_saved_is_told_apart_from_tokens_that_were_never_seen():
    groups = [FullAttentionSpec(4), MambaSpec(4, interval_tokens=8)]
    manager = KVCacheManager(40, groups=groups, ledger=CacheLedger(40))
    seq = sequence("a", range(14))
    manager.allocate_slots(seq, 8, manager.get_computed_blocks(seq))
    manager.begin_step()
    manager.allocate_slots(seq, 14)
    manager.free("a")
    explanation = manager.explain(sequence("b", range(14)))
    assert (explanation.num_hit_tokens, explanation.reason) == (8, MissReason.STATE_NOT_SAVED)
    assert manager.explain(sequence("c", [*range(8), 50, 51, 52, 53, 54])).reason is MissReason.NEVER_SEEN


def run_in_steps(manager, seq, num_tokens):
    """Compute a sequence in steps of so many tokens, so that states are saved, and free it."""
    hit = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, hit.num_tokens + num_tokens, hit) is not None
    for end in range(hit.num_tokens + 2 * num_tokens, len(seq) + 1, num_tokens):
        manager.begin_step()
        assert manager.allocate_slots(seq, end) is not None
    manager.begin_step()
    manager.free(seq)


@pytest.mark.parametrize("number", [-1, -2], ids=["last", "last but one"])
@pytest.mark.parametrize("other", [SlidingWindowSpec(5, 4), MambaSpec(8)], ids=["window", "recurrent"])
def test_any_evicted_block_that_the_next_longer_hit_needs_is_the_reason(other, number):
    manager = KVCacheManager(64, groups=[FullAttentionSpec(2), other], ledger=CacheLedger(64))
    seq = sequence("a", range(32), block_size=2)
    run_in_steps(manager, seq, 8)
    full = manager.get_computed_blocks(sequence("b", range(33), block_size=2)).tables[0]
    assert manager.explain(sequence("b", range(33), block_size=2)).reason is None
    manager.evict_blocks(full[[number]])
    explanation = manager.explain(sequence("b", range(33), block_size=2))
    assert (explanation.num_hit_tokens, explanation.reason) == (32 - other.block_size, MissReason.EVICTED)


def test_a_state_that_was_saved_and_evicted_is_evicted_though_hits_end_at_larger_blocks():
    manager = KVCacheManager(64, groups=[FullAttentionSpec(8), MambaSpec(2)], ledger=CacheLedger(64))
    seq = sequence("a", range(16), block_size=2)
    manager.allocate_slots(seq, 8, manager.get_computed_blocks(seq))
    manager.begin_step()
    manager.allocate_slots(seq, 16)
    state = manager.block_ids("a", 1)[-1:]
    manager.begin_step()
    manager.free(seq)
    manager.evict_blocks(state)
    explanation = manager.explain(sequence("b", range(17), block_size=2))
    assert (explanation.num_hit_tokens, explanation.reason) == (8, MissReason.EVICTED)


def test_ghosts_count_if_eviction_took_only_the_end_of_what_a_longer_hit_needs():
    manager = KVCacheManager(23, groups=[FullAttentionSpec(2), SlidingWindowSpec(5, 4)], ledger=CacheLedger(23))
    run_in_steps(manager, sequence("a", range(32), block_size=2), 8)
    run_in_steps(manager, sequence("b", range(50, 58), block_size=2), 8)
    explanation = manager.explain(sequence("c", range(33), block_size=2))
    assert (explanation.num_hit_tokens, explanation.reason) == (28, MissReason.EVICTED)
    assert explanation.eviction.cause is EvictionCause.REUSED
    assert explanation.num_ghost_tokens == 4


@both_indexes
def test_ghosts_tell_what_a_pool_of_twice_the_size_hits(index):
    """Under lru, with one request at a time and prompts of whole blocks, exactly."""
    rng = random.Random(5)
    small, large = manager_with_ledger(index, 24), manager_with_ledger(index, 48)
    for number in range(600):
        topic = rng.randrange(14)
        tokens = [topic * 100 + i for i in range(4 * rng.randint(1, 5))] + [rng.randrange(3)] * 4 * rng.randint(0, 1)
        for manager in (small, large):
            run(manager, sequence(f"r{number}", tokens))
    assert small.stats.evictions > 500
    assert small.stats.ghost_hits > 1000
    assert small.stats.hits + small.stats.ghost_hits == large.stats.hits
    assert small.stats.hit_rate_with_twice_the_blocks == large.stats.hit_rate


def test_there_are_never_more_ghosts_than_blocks():
    manager = manager_with_ledger(num_blocks=4)
    for number in range(50):
        run(manager, sequence(f"r{number}", range(1000 * number, 1000 * number + 16)))
    assert manager.explain(sequence("older", range(47000, 47016))).reason is MissReason.NEVER_SEEN
    assert manager.explain(sequence("recent", range(48000, 48016))).reason is MissReason.EVICTED


@both_indexes
def test_a_reset_forgets_the_ghosts_too(index):
    manager = manager_with_ledger(index, num_blocks=4)
    run(manager, sequence("a", range(16)))
    run(manager, sequence("b", range(100, 116)))
    manager.reset_prefix_cache()
    manager.check_integrity()
    assert manager.explain(sequence("c", range(16))).reason is MissReason.NEVER_SEEN
    assert manager.stats.misses == {}


@pytest.mark.parametrize("num_shared", [0, 2, 6])
def test_less_than_a_block_is_shared_from_the_next_step_on_and_the_explanation_says_so(num_shared):
    manager = manager_with_ledger()
    manager.begin_step()
    first, second = sequence("a", range(8)), sequence("b", [*range(num_shared), *range(100, 108)])
    for one in (first, second):
        assert manager.allocate_slots(one, len(one), manager.get_computed_blocks(one)) is not None
    told = manager.explanation_of("b")
    assert (told.num_hit_tokens, told.num_filling_tokens) == (num_shared // 4 * 4, num_shared % 4)
    assert (f"; {num_shared % 4} more are in a block that is computed in the same step" in str(told)) == bool(
        num_shared
    )
    manager.begin_step()
    assert manager.explain(third := sequence("c", [*range(num_shared), *range(200, 208)])).num_filling_tokens == 0
    assert manager.get_computed_blocks(third).num_tokens == num_shared


def test_explaining_changes_nothing():
    manager = manager_with_ledger()
    run(manager, sequence("a", range(16)))
    before = manager.free_block_ids().tolist(), manager.stats.queries, manager.get_num_cached_blocks()
    manager.explain(sequence("b", range(20)))
    assert (manager.free_block_ids().tolist(), manager.stats.queries, manager.get_num_cached_blocks()) == before


@pytest.mark.parametrize("options", [{}, {"ledger": CacheLedger(10), "enable_prefix_caching": False}])
def test_without_a_ledger_asking_for_an_explanation_says_what_to_give(options):
    with pytest.raises(ConfigError, match="give ledger="):
        KVCacheManager(10, block_size=4, **options).explain(sequence("a", range(8)))


@pytest.mark.parametrize("breakage", ["copies", "ghost", "variant"])
def test_a_broken_account_is_caught(breakage):
    manager = manager_with_ledger()
    run(manager, sequence("a", range(8), salt="red"))
    account = manager.ledger.groups[0]
    key = next(iter(account._num_copies))
    if breakage == "copies":
        account._num_copies[key] += 1
    elif breakage == "ghost":
        account._ghosts[key] = Eviction(EvictionCause.REUSED, 0.0, 0, 0.0)
    else:
        account._variants.clear()
    with pytest.raises(AssertionError):
        manager.check_integrity()


def test_the_account_survives_keys_that_collide_within_one_prompt():
    class NoBits:
        def __init__(self, data):
            pass

        def digest(self):
            return b"x"

    ledger = CacheLedger(8, events=EventLog())
    manager = KVCacheManager(8, block_size=2, index=HashIndex(8, verify_tokens=True), ledger=ledger)
    for number in range(3):  # the second and third evict what the one before left
        name = f"r{number}"
        tokens = range(100 * number, 100 * number + 12)
        one = TokenSequence(name, tokens, block_size=2, hash_fn=HashFunction("no bits", NoBits))
        manager.begin_step()
        assert manager.allocate_slots(one, 12, manager.get_computed_blocks(one)) is not None
        manager.check_integrity()
        manager.free(name)
        manager.check_integrity()

"""What each attention type needs, gives up and refuses."""

import numpy as np
import pytest

from foreword.cache import (
    NULL_BLOCK,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheManager,
    MambaSpec,
    SinkFullSpec,
    SlidingWindowSpec,
    TokenSequence,
)
from foreword.errors import ConfigError

N = NULL_BLOCK


def started(spec, tokens, end=None, num_blocks=20):
    """A manager of one group, with a request "a" whose first `end` tokens have slots."""
    manager = KVCacheManager(num_blocks, groups=[spec])
    sequence = TokenSequence("a", tokens, block_size=spec.block_size)
    manager.begin_step()
    assert manager.allocate_slots(sequence, len(sequence) if end is None else end) is not None
    return manager, sequence


def step(manager, sequence, end):
    while len(sequence) < end:
        sequence.append(1000 + len(sequence))
    manager.begin_step()
    assert manager.allocate_slots(sequence, end) is not None
    manager.check_integrity()
    return manager.block_ids("a").tolist()


def hit_length(manager, tokens):
    manager.begin_step()
    return manager.get_computed_blocks(TokenSequence("x", tokens, block_size=manager.block_size)).num_tokens


# ------------------------------------------------------------------------------------ sliding window


def test_exactly_the_blocks_that_left_the_window_are_freed():
    manager, sequence = started(SlidingWindowSpec(6, 4), range(14))
    assert step(manager, sequence, 15) == [N, N, 2, 3]  # position 14 reads 9 to 14
    assert manager.free_block_ids().tolist()[-2:] == [1, 0]
    assert step(manager, sequence, 17) == [N, N, 2, 3, 4]  # 15 and 16 read 10 to 16
    assert step(manager, sequence, 18) == [N, N, N, 3, 4]  # 17 reads 12 to 17
    assert step(manager, sequence, 19) == [N, N, N, 3, 4]


def test_a_block_stays_while_one_of_its_positions_is_in_the_window():
    manager, sequence = started(SlidingWindowSpec(5, 4), range(8))
    assert step(manager, sequence, 9) == [N, 1, 2]  # position 8 reads 4 to 8
    manager, sequence = started(SlidingWindowSpec(6, 4), range(8))
    assert step(manager, sequence, 9) == [0, 1, 2]  # position 8 reads 3 to 8


def test_a_long_answer_holds_no_more_than_the_window():
    manager, sequence = started(SlidingWindowSpec(8, 4), range(4), num_blocks=3)
    for end in range(5, 200):
        step(manager, sequence, end)
    assert manager.can_ever_hold(200, max_step_tokens=1)
    assert not manager.can_ever_hold(200, max_step_tokens=6)


def test_blocks_given_up_stay_cached_until_they_are_overwritten():
    manager, sequence = started(SlidingWindowSpec(4, 4), range(12))
    step(manager, sequence, 13)
    assert hit_length(manager, range(8)) == 4
    assert hit_length(manager, range(9)) == 8


def test_a_window_of_one_position_needs_no_block_to_hit():
    manager, _ = started(SlidingWindowSpec(1, 4), [1])
    assert hit_length(manager, range(100, 110)) == 8


def test_blocks_that_are_given_up_count_as_free_for_the_step_that_gives_them_up():
    manager, sequence = started(SlidingWindowSpec(4, 4), range(8), num_blocks=2)
    assert manager.get_num_free_blocks() == 0
    assert step(manager, sequence, 9) == [N, 1, 0]


def test_blocks_that_others_hold_too_do_not_count_as_free_when_given_up():
    manager, sequence = started(SlidingWindowSpec(4, 4), range(8), num_blocks=3)
    other = TokenSequence("b", range(6), block_size=4)
    manager.begin_step()
    hit = manager.get_computed_blocks(other)
    assert hit.block_ids.tolist() == [0]
    assert manager.allocate_slots(other, 6, hit) is not None
    sequence.append(8)
    assert manager.allocate_slots(sequence, 9) is None
    assert manager.block_ids("a").tolist() == [0, 1]
    manager.check_integrity()


# -------------------------------------------------------------------------------------------- chunks


def test_a_new_chunk_gives_up_the_one_before():
    manager, sequence = started(ChunkedLocalSpec(8, 4), range(8))
    assert step(manager, sequence, 9) == [N, N, 2]
    assert step(manager, sequence, 16) == [N, N, 2, 3]
    assert step(manager, sequence, 17) == [N, N, N, N, 4]


def test_a_block_across_two_chunks_is_kept_for_the_second():
    manager, sequence = started(ChunkedLocalSpec(6, 4), range(6))
    assert step(manager, sequence, 7) == [N, 1]  # position 6 begins a chunk inside block 1


def test_a_hit_at_the_beginning_of_a_chunk_needs_no_block():
    manager, _ = started(ChunkedLocalSpec(8, 4), range(20))
    manager.evict_blocks(manager.block_ids("a")[:4])
    assert hit_length(manager, range(17)) == 16
    assert hit_length(manager, range(14)) == 8
    manager.evict_blocks(manager.block_ids("a"))
    assert hit_length(manager, range(24)) == 16
    assert hit_length(manager, range(8)) == 0


# ----------------------------------------------------------------------------------------- recurrent


def test_a_request_moves_one_state_block_along_its_table():
    # The worked example of MambaManager, one interval for every 8 tokens of the prompt.
    manager, sequence = started(MambaSpec(4, interval_tokens=8), range(13), end=6)
    assert manager.block_ids("a").tolist() == [N, 0]
    assert step(manager, sequence, 8) == [N, 0]
    assert manager.get_num_cached_blocks() == 1
    assert step(manager, sequence, 9) == [N, 0, 1]
    assert step(manager, sequence, 10) == [N, N, 1]
    assert step(manager, sequence, 13) == [N, N, N, 1]
    assert manager.get_num_cached_blocks() == 1
    assert manager.get_num_free_blocks() == 19


def test_only_the_last_saved_state_is_needed():
    manager, sequence = started(MambaSpec(4), range(12), end=4)
    first = manager.block_ids("a")[0]
    for end in (8, 12):
        step(manager, sequence, end)
    tokens = sequence.token_ids
    manager.evict_blocks(np.array([first], np.int32))
    assert hit_length(manager, tokens[:8]) == 0
    assert hit_length(manager, tokens[:12]) == 8
    assert hit_length(manager, [*tokens, 1]) == 12


def test_a_hit_state_is_read_but_never_overwritten():
    manager, _ = started(MambaSpec(4), range(4))
    manager.begin_step()
    other = TokenSequence("b", range(7), block_size=4)
    assert manager.allocate_slots(other, 7, manager.get_computed_blocks(other)) is not None
    assert manager.block_ids("b").tolist() == [0, 1]
    manager.check_integrity()


def test_states_are_saved_where_a_request_asks_for_them():
    manager, sequence = started(MambaSpec(4, interval_tokens=1000), range(16), end=4)
    manager.save_states_at("a", [8, 13])
    for end in (8, 12, 16):
        step(manager, sequence, end)
    assert hit_length(manager, [*sequence.token_ids, 1]) == 8
    assert manager.get_num_cached_blocks() == 1


def test_no_state_after_generated_tokens_is_found():
    manager, sequence = started(MambaSpec(4), range(8))
    for end in range(9, 17):
        step(manager, sequence, end)
    assert manager.get_num_cached_blocks() == 1
    assert hit_length(manager, [*sequence.token_ids, 1]) == 8


def test_a_recurrent_request_of_any_length_fits_into_two_blocks():
    manager, sequence = started(MambaSpec(2), range(5), num_blocks=2)
    assert manager.can_ever_hold(10**6, 10**6)
    for end in range(6, 60):
        step(manager, sequence, end)


# --------------------------------------------------------------------------------------------- sinks


def test_sink_blocks_are_taken_once_and_never_given_away():
    manager = KVCacheManager(10, groups=[SinkFullSpec(6, 4)])
    assert manager.sink_block_ids().tolist() == [0, 1]
    assert not manager.can_ever_hold(33, 33)
    for number in range(20):
        sequence = TokenSequence(str(number), range(number, number + 32), block_size=4)
        assert manager.allocate_slots(sequence, 32) is not None
        assert not {0, 1} & set(manager.block_ids(str(number)).tolist())
        manager.check_integrity()
        manager.free(str(number))
    manager.reset_prefix_cache()
    assert manager.get_num_free_blocks() == 8
    manager.check_integrity()


def test_sinks_do_not_change_what_full_attention_hits():
    manager, _ = started(SinkFullSpec(4, 4), range(10))
    assert hit_length(manager, range(10)) == 8
    assert hit_length(manager, range(8)) == 7  # whole prompt, as for full attention


# --------------------------------------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0), "block_size=0"),
        (lambda: SlidingWindowSpec(0), "window=0"),
        (lambda: ChunkedLocalSpec(-1), "chunk=-1"),
        (lambda: SinkFullSpec(0), "num_sink_tokens=0"),
        (lambda: MambaSpec(4, interval_tokens=6), "multiple of block_size=4"),
    ],
)
def test_impossible_specs_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_sinks_that_fill_the_pool_are_refused():
    with pytest.raises(ConfigError, match="leave none"):
        KVCacheManager(2, groups=[SinkFullSpec(8, 4)])

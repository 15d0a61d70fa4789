"""Links: ranges that are computed, positions, and what lies in whole blocks of the sources."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.request import LinkedRun, Links

SOURCE = np.arange(9, dtype=np.int32)


def links(*runs: tuple[int, int, int], length: int = 14, positions: list[int] | None = None) -> Links:
    """Runs of (begin, end, first)."""
    placed = np.array(positions or range(length), np.int32)
    return Links("first-k", tuple(LinkedRun(begin, end, SOURCE, first) for begin, end, first in runs), placed)


def test_the_ranges_between_runs_are_computed() -> None:
    two = links((0, 3, 0), (5, 11, 2))
    assert list(two.ranges(0, 14)) == [(3, 5), (11, 14)]
    assert list(two.ranges(4, 12)) == [(4, 5), (11, 12)]
    assert list(two.ranges(6, 9)) == []
    assert list(two.ranges(13, 20)) == [(13, 20)]
    assert two.num_computed(0, 14) == 5
    assert two.linked_from == 0
    assert two.pending_from(0) == [0, 1]
    assert two.pending_from(3) == two.pending_from(10) == [1]
    assert two.pending_from(11) == []


@pytest.mark.parametrize(("budget", "end"), [(0, 0), (1, 4), (2, 5), (3, 12), (4, 13), (5, 14), (6, 14)])
def test_a_share_ends_with_a_computed_token_and_linked_ones_take_nothing(budget: int, end: int) -> None:
    assert links((0, 3, 0), (5, 11, 2)).end_after(0, 14, budget) == end


def test_only_whole_blocks_of_sources_are_linked() -> None:
    cut = links((0, 3, 0), (5, 11, 3)).in_whole_blocks(4)
    assert [(run.begin, run.end) for run in cut.runs] == [(0, 3), (5, 10)]
    again = cut.in_whole_blocks(4)
    assert [(run.begin, run.end) for run in again.runs] == [(0, 3), (5, 10)]
    assert links((5, 6, 8)).in_whole_blocks(4).runs == ()
    for each in (links((0, 3, 0), (5, 11, 3)), links((1, 2, 8), (5, 11, 3)), links((5, 6, 8)), links(length=3)):
        assert each.linked_from_in(4) == each.in_whole_blocks(4).linked_from


def test_generated_tokens_follow_the_prompt_s_last_position() -> None:
    gapped = links((1, 3, 0), positions=[0, 10, 11, 20], length=4)
    assert gapped.has_gaps
    assert gapped.positions_of(0, 6).tolist() == [0, 10, 11, 20, 21, 22]
    assert gapped.positions_of(5, 7).tolist() == [22, 23]
    assert gapped.shift(gapped.runs[0]) == 10


def test_jumps_are_gaps_before_computed_tokens() -> None:
    assert links((1, 3, 0), positions=[0, 10, 11, 20], length=4).jumps() == [3]
    assert links(positions=[2, 3, 5], length=3).jumps() == [0, 2]
    assert links((1, 2, 0), positions=[0, 5, 6], length=3).jumps() == []
    assert not links(length=3).has_gaps


def test_jumps_among_many_runs_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        positions = np.cumsum(rng.integers(1, 3, 60)).tolist()
        cuts = np.sort(rng.choice(60, 16, replace=False)).tolist()
        runs = [(begin, end, 0) for begin, end in zip(cuts[::2], cuts[1::2], strict=True) if end - begin < 9]
        found = links(*runs, length=60, positions=positions)
        moved = [at for at in range(60) if positions[at] != (positions[at - 1] if at else -1) + 1]
        assert found.jumps() == [at for at in moved if not any(begin <= at < end for begin, end, _ in runs)]


def test_jumps_before_the_first_link_are_told_with_their_positions() -> None:
    positions = [0, 4, 5, 9, 10, 20]
    assert links(positions=positions, length=6).jumps_before_links(4) == ((1, 4), (3, 9), (5, 20))
    assert links((3, 5, 0), positions=positions, length=6).jumps_before_links(4) == ((1, 4),)
    not_whole = links((3, 5, 7), positions=positions, length=6)  # computed: its source's last block is not whole
    assert not_whole.jumps_before_links(5) == ((1, 4), (3, 9), (5, 20))
    assert not_whole.jumps_before_links(4) == ((1, 4),)
    assert links((0, 2, 0), positions=[3, 4, 9], length=3).jumps_before_links(4) == ()
    assert links(length=3).jumps_before_links(4) == ()


@pytest.mark.parametrize("runs", [((3, 6, 0), (5, 7, 0)), ((5, 7, 0), (0, 2, 0)), ((10, 14, 0),)])
def test_runs_that_overlap_or_end_the_prompt_are_our_own_mistake(runs: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        links(*runs)

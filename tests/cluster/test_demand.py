"""Who wants the same prefix, and what a lost hit counts: the tree against its sums, and prefixes of all or of one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cluster.demand import Demand, Stretch, lost_shares


def keys(text):
    """Each key names the whole prefix."""
    return [text[: at + 1] for at in range(len(text))]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", max_size=7), st.sampled_from(["stays", "leaves", "first leaves"])), max_size=30),
    st.sampled_from([6, 1000]),
)
def test_the_tree_counts_requests_under_way_and_forgets_only_others(steps, most_blocks):
    demand, under_way = Demand(), []
    for text, then in steps:
        under_way.append((text, demand.enter(keys(text), most_blocks)))
        if then != "stays":
            demand.leave(under_way.pop(0 if then == "first leaves" else -1)[1])
        demand.check_integrity()
        for open_text, _ in under_way:
            stretches = demand.of_prompt(keys(open_text))
            assert [each.end for each in stretches][-1:] == [len(open_text)][: len(open_text)]
            for stretch in stretches:
                wanted = sum(other.startswith(open_text[: stretch.end]) for other, _ in under_way)
                assert stretch.under_way == wanted
    for _, node in under_way:
        demand.leave(node)
    for each in range(9):  # old prompts give way
        demand.leave(demand.enter(keys(f"{each}"), 6))
    demand.check_integrity()
    assert demand.num_blocks <= 6


def test_turns_of_one_conversation_count_once_and_conversations_under_one_prompt_each():
    demand = Demand()
    for turn in ("Sa", "Saa", "Saaa", "Sb", "Sbb", "Sc", "Sa", "Sa"):
        demand.leave(demand.enter(keys(turn), 100))
    assert demand.of_prompt(keys("Sbbb")) == [Stretch(1, 5, 0), Stretch(3, 1, 0)], (
        "what ends in a block may differ after it"
    )
    assert demand.of_prompt(keys("X")) == []


def test_a_lost_hit_counts_in_full_for_one_conversation_and_little_for_a_prefix_that_all_ask_for():
    hits = np.array([10, 4, 0, 0])
    lost, shares = lost_shares([Stretch(10, 1, 0)], hits, 1.0)
    assert lost.tolist() == [0, 6, 10, 10]
    assert shares.tolist() == [0, 6, 10, 10]
    assert lost_shares([], hits, 1.0)[1].tolist() == [0, 6, 10, 10], "what nobody remembers counts in full"
    _, shares = lost_shares([Stretch(4, 400, 0), Stretch(10, 1, 0)], hits, 1.0)
    assert shares.tolist() == pytest.approx([0, 6, 6 + 4 / 100, 6 + 4 / 100])
    _, shares = lost_shares([Stretch(4, 2, 6), Stretch(10, 1, 3)], hits, 1.0)
    assert shares.tolist() == pytest.approx([0, 6 / 4, 6 / 4 + 4 / 4, 6 / 4 + 4 / 4]), "for each copy"

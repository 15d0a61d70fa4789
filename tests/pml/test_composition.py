"""Compositions: indices, positions, and where a prompt of modules is the plain prompt."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.pml.composition import Composition, Part, Source, Span, concatenated

RULES = Source((1, 2, 3), name="rules")
ROME = Source((4, 5, 6, 7), name="rome")


def span_part(source: Source, position: int, begin: int = 0, end: int | None = None) -> Part:
    last = len(source.token_ids) if end is None else end
    return Part(source.token_ids[begin:last], position, "module", source.name, Span(source, begin, last))


def test_positions_leave_gaps_where_indices_do_not() -> None:
    composition = Composition((span_part(RULES, 0), span_part(ROME, 11, 1), Part((8, 9), 14, "text")))
    assert composition.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert composition.positions.tolist() == [0, 1, 2, 11, 12, 13, 14, 15]
    assert composition.begins == (0, 3, 6, 8)
    assert (composition.num_tokens, composition.next_position) == (8, 16)
    assert composition.has_gaps
    assert composition.sources == (RULES, ROME)


def test_each_token_has_its_part() -> None:
    composition = concatenated([RULES, ROME, (8, 9)])
    assert [composition.part_at(index).name for index in (0, 2, 3, 6, 7, 8)] == ["rules"] * 2 + ["rome"] * 2 + [""] * 2


def test_the_arrays_of_a_composition_cannot_be_changed() -> None:
    composition = concatenated([RULES])
    for array in (composition.token_ids, composition.positions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_pieces_follow_each_other_without_gaps_and_empty_ones_are_left_out() -> None:
    composition = concatenated([(), RULES, Source(()), ROME, (8, 9)])
    assert [part.position for part in composition.parts] == [0, 3, 7]
    assert np.array_equal(composition.positions, np.arange(9))
    assert not composition.has_gaps
    assert composition.next_position == 9


def test_of_a_scaffold_only_the_module_is_linked() -> None:
    source = Source((1, 2, 3, 4, 5), begin=3, name="rome")
    (part,) = concatenated([source]).parts
    assert part.token_ids == (4, 5)
    assert part.span == Span(source, 3, 5)


def test_equal_tokens_are_one_source_whatever_their_names() -> None:
    assert Source((1, 2), name="a") == Source((1, 2), name="b")
    assert Source((1, 2), begin=1) != Source((1, 2))
    assert len(concatenated([Source((1, 2), name="a"), Source((1, 2), name="b")]).sources) == 1


@pytest.mark.parametrize(
    ("parts", "exact"),
    [
        ((span_part(RULES, 0), Part((8,), 3, "text")), 4),  # a plain prefix and its continuation
        ((Part((8,), 0, "text"), span_part(RULES, 1)), 1),  # the module has not seen the text before it
        ((span_part(RULES, 0), span_part(ROME, 3), Part((8,), 7, "text")), 3),
        ((span_part(RULES, 1),), 0),  # moved
        ((span_part(RULES, 0), Part((8,), 4, "text")), 3),  # a gap: the plain prompt has none
        ((span_part(RULES, 0, 0, 2), Part((9,), 2, "argument"), span_part(ROME, 3)), 3),
        ((span_part(ROME, 0, 0, 2), span_part(ROME, 2, 2)), 4),  # two spans of one source, in its order
        ((), 0),
    ],
)
def test_exact_is_what_the_plain_prompt_computes_too(parts: tuple[Part, ...], exact: int) -> None:
    assert Composition(parts).num_exact_tokens == exact


def test_a_module_after_its_own_scaffold_is_exact() -> None:
    behind_rules = Source((1, 2, 3, 4, 5), begin=3)
    assert concatenated([RULES, behind_rules]).num_exact_tokens == 5
    assert concatenated([ROME, behind_rules]).num_exact_tokens == 4


def test_a_placeholder_that_an_argument_replaced_ends_the_exact_part() -> None:
    source = Source((1, 2, 0, 4))
    parts = (span_part(source, 0, 0, 2), Part((9,), 2, "argument"), span_part(source, 3, 3))
    assert Composition(parts).num_exact_tokens == 3
    spelt = (span_part(source, 0, 0, 2), Part((0,), 2, "argument"), span_part(source, 3, 3))
    assert Composition(spelt).num_exact_tokens == 4

"""What an edited prompt still has of the earlier one."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest

from foreword.pml.composition import Composition
from foreword.pml.edits import LEAST_RUN, compose_edit


def runs(composition: Composition) -> list[tuple[int, int, int]]:
    """Begin in the prompt, begin in the earlier one, and length of each part that can be linked."""
    found = []
    for part, begin in zip(composition.parts, composition.begins, strict=False):
        if part.span is not None:
            assert part.position == begin, "positions have no gaps"
            assert part.span.begin == part.span.source.begin, "first-K counts from the part's beginning"
            found.append((begin, part.span.begin, len(part.token_ids)))
    return found


TEXT = np.random.default_rng(0).integers(3, 300, 400).tolist()


def test_what_follows_a_cut_is_linked_and_what_stands_before_it_is_exact():
    edited = [*TEXT[:100], *TEXT[150:], 1, 2, 3]
    composition = compose_edit(edited, TEXT)
    assert composition.token_ids.tolist() == edited
    assert runs(composition) == [(100, 150, 250)]
    assert composition.num_exact_tokens == 100


def test_a_replaced_text_is_computed_and_several_edits_leave_several_runs():
    edited = [*TEXT[:60], *[1] * 20, *TEXT[90:200], *[2] * 7, *TEXT[200:300], *TEXT[330:]]
    assert runs(compose_edit(edited, TEXT)) == [(80, 90, 110), (197, 200, 100), (297, 330, 70)]


def test_an_inserted_text_moves_what_follows():
    assert runs(compose_edit([*TEXT[:200], *[1] * 33, *TEXT[200:]], TEXT)) == [(233, 200, 200)]


@pytest.mark.parametrize("edited", [TEXT, [*TEXT, 1, 2], TEXT[:100], [1, 2, 3], TEXT[380:]])
def test_a_prompt_without_an_edit_has_nothing_to_link(edited):
    composition = compose_edit(edited, TEXT)
    assert composition.token_ids.tolist() == edited
    assert runs(composition) == []


def test_short_runs_are_computed_and_order_is_kept():
    assert runs(compose_edit([1, *TEXT[10 : 10 + LEAST_RUN - 1], 2], TEXT)) == []
    assert runs(compose_edit([1, *TEXT[300:400], *TEXT[100:200]], TEXT)) == [(1, 300, 100)]
    assert runs(compose_edit([1], [])) == []


def test_random_edits_over_two_tokens_keep_every_token():
    rng = Random(1)
    for _ in range(300):
        before = [rng.randrange(2) for _ in range(rng.randrange(200))]
        edited = list(before)
        for _ in range(rng.randrange(4)):
            at, end = sorted(rng.choices(range(len(edited) + 1), k=2))
            edited[at:end] = [rng.randrange(2) for _ in range(rng.randrange(40))]
        composition = compose_edit(edited or [1], before)
        assert composition.token_ids.tolist() == (edited or [1])
        assert all(length >= LEAST_RUN for _, _, length in runs(composition))


def test_long_prompts_that_repeat_one_token_take_no_quadratic_time():
    def seconds(length: int) -> float:
        started = time.process_time()
        compose_edit([*[7] * length, 8, *[7] * length], [9, *[7] * length])
        return time.process_time() - started

    seconds(1_000)
    assert seconds(40_000) < 40 * max(seconds(4_000), 1e-3)

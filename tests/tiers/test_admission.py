"""Rules of admission, which the engine and `foreword replay --tier` share."""

from __future__ import annotations

import pytest

from foreword.config import AdmissionName
from foreword.tiers import admission
from foreword.tiers.admission import Admission


def admitted(rule: AdmissionName, prompts: list[list[int]], *, has_room: bool = True) -> list[list[int]]:
    one = Admission(rule, 1024)
    return [[key for place, key in enumerate(keys) if one.admits(place, key, has_room=has_room)] for keys in prompts]


def test_each_rule_admits_what_it_says() -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 7], [7, 8]]
    assert admitted("all", prompts) == prompts
    assert admitted("twice", prompts) == [[], [1, 2], [7]]
    assert admitted("room", prompts) == prompts
    assert admitted("room", prompts, has_room=False) == [[], [1, 2], [7]]
    assert admitted("heads", prompts) == [[1, 2, 3, 4], [1, 2, 7], [7, 8]]


def test_old_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_REMEMBERED", 4)
    assert admitted("twice", [[1], [2, 3, 4, 5], [1], [6, 7, 8, 9], [10], [2, 10]]) == [[], [], [1], [], [], [10]]

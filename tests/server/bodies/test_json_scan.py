"""What a JSON text holds is known before it is parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foreword.server.bodies.json_scan import scan_json
from foreword.text.conversation import parse_json


def counts(value: Any) -> tuple[int, int, int]:
    """Values, containers and depth of parsed JSON."""
    if not isinstance(value, (list, dict)):
        return 1, 0, 0
    inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(values for values, _, _ in inner),
        1 + sum(containers for _, containers, _ in inner),
        1 + max((depth for _, _, depth in inner), default=0),
    )


def some_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(6 if depth < 6 else 4)
    if kind == 4:
        return [some_value(chance, depth + 1) for _ in range(chance.randrange(1, 5))]
    if kind == 5:
        return {f'{n}[{{",\\"': some_value(chance, depth + 1) for n in range(chance.randrange(1, 5))}
    return [None, -1.5, 'a "quoted, [text]" \\', "é\\\\"][kind]


def test_values_containers_and_depth_are_those_of_the_parsed_text():
    chance = random.Random(3)
    for _ in range(300):
        value = some_value(chance)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert scan_json(text.encode()) == counts(value)


@pytest.mark.parametrize("text", ["", '"', '"\\', "]]]]", "[,,,", '{"a": "\\'])
def test_what_is_no_json_is_scanned_all_the_same(text):
    assert scan_json(text.encode()).num_values >= 1


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e400", "-1e400", "9" * 5000, "[", "", "[" * 9999]
)
def test_only_numbers_that_can_be_written_again_are_read(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)

"""Tasks in parts: an independent reader of the drawn texts finds each answer, and only there where the task says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import pytest

from foreword.demo import recall
from foreword.demo.run import embedded_model
from foreword.demo.tasks import TASKS, Case, draw
from foreword.text import Tokenizer

SIZES = ((512, 2), (512, 4), (512, 16), (1024, 8), (2048, 16), (60, 2))
QUESTION = re.compile(r"(?:What is|Tell me|Do you know|And) the (.*)[?.]")
LINE = re.compile(r"The (.*) is (\w+)\.")


class Reader:
    """Reads lines as a person would: what was said last holds, a line "In X:" begins a place, and names lead on."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.said: dict[str, list[tuple[str, int]]] = {}
        self.scope: dict[str, int] = {}
        place = ""
        for number, part in enumerate(parts):
            for line in part.split("\n"):
                if heading := re.fullmatch(r"In (\w+):", line):
                    place = heading[1]
                    assert place not in self.scope, "a place is named once"
                    self.scope[place] = number
                    continue
                found = LINE.fullmatch(line)
                assert found is not None, line
                key = f"{found[1]} in {place}" if place else found[1]
                self.said.setdefault(key, []).append((found[2], number))

    def statements(self, key: str) -> list[tuple[str, int]]:
        """Values of a key and their parts, in order; of two hops, those of the second."""
        if key in self.said:
            return self.said[key]
        attribute, of, thing = key.partition(" of the ")
        person = self.said.get(thing, []) if of else []
        return self.said.get(f"{attribute} of {person[-1][0]}", []) if person else []


def asked_key(text: str) -> str:
    found = QUESTION.fullmatch(text)
    assert found is not None, text
    return found[1]


def cases(task: str, number: int = 20, num_questions: int = 1) -> list[Case]:
    rng = Random(task)
    return [
        draw(rng, task, num_tokens=tokens, num_parts=parts, num_questions=num_questions)
        for tokens, parts in SIZES
        for _ in range(number)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_of_the_prompt_finds_the_one_answer(task: str) -> None:
    for case in cases(task):
        seen = Reader(case.parts).statements(asked_key(case.question.text))
        if task != "leak":
            assert seen[-1][0] == case.question.answer
        if task not in ("leak", "order"):
            assert len(seen) == 1


def test_parts_are_as_many_as_asked_for_and_none_is_empty() -> None:
    for task in TASKS:
        rng = Random(1)
        for tokens, parts in SIZES:
            case = draw(rng, task, num_tokens=tokens, num_parts=parts)
            assert len(case.parts) == parts
            assert all(case.parts)


def test_order_states_the_old_value_in_an_earlier_part() -> None:
    for case in cases("order"):
        stated = Reader(case.parts).statements(case.question.key)
        assert len(stated) in (2, 3)
        assert len({part for _, part in stated}) == len(stated)
        assert stated[-1][0] != stated[-2][0]


def test_scope_needs_the_part_before_and_other_places_have_the_key() -> None:
    for case in cases("scope"):
        reader = Reader(case.parts)
        key, place = case.question.key.split(" in ")
        [(_, part)] = reader.statements(case.question.key)
        assert reader.scope[place] == part - 1
        assert any(f"{key} in {other}" in reader.said for other in reader.scope if other != place)


def test_hops_lie_in_two_parts() -> None:
    for case in cases("hops"):
        reader = Reader(case.parts)
        attribute, thing = case.question.key.split(" of the ", 1)
        [(name, first)] = reader.said[thing]
        [(_, second)] = reader.said[f"{attribute} of {name}"]
        assert first != second


def test_of_persons_alike_nothing_but_the_name_tells_the_facts_apart() -> None:
    rng, alike = Random(5), 0
    for _ in range(50):
        case = draw(rng, "hops", num_tokens=512, num_parts=4, num_questions=8, alike=True)
        reader = Reader([part for part in case.parts if part])
        persons = {key.split(" of ", 1)[1] for key in reader.said if " of the " not in key}
        attributes = {key.split(" of ", 1)[0] for key in reader.said if " of the " not in key}
        assert len(persons) >= 10
        assert 2 <= len(attributes) <= 4
        for question in case.questions:
            assert [value for value, _ in reader.statements(question.key)] == [question.answer]
            outer = question.key.split(" of ", 1)[0]
            same = [
                values
                for key, values in reader.said.items()
                if key.startswith(f"{outer} of ") and " of the " not in key
            ]
            alike += len(same) >= 3
    assert alike >= 300, "hardly ever do several persons have what is asked for"


def test_only_persons_are_alike() -> None:
    with pytest.raises(ValueError, match="alike with 'order'; only the persons of 'hops'"):
        draw(Random(0), "order", num_tokens=512, num_parts=4, alike=True)


def test_a_leak_is_known_to_the_hidden_part_alone() -> None:
    for case in cases("leak"):
        key = asked_key(case.question.text)
        assert not Reader(case.parts).statements(key)
        assert case.hidden is not None
        assert Reader([case.hidden]).statements(key) == [(case.question.answer, 0)]


def test_an_argument_is_the_key_words_of_the_fact_that_is_asked_for() -> None:
    for case in cases("parameters"):
        assert case.argument is not None
        text, begin, end = case.parts[case.argument.part], case.argument.begin, case.argument.end
        assert text[begin:end] == " " + case.question.key.split(" of the ")[1]
        before, after = text[:begin].rpartition("\n")[2], text[end:].partition("\n")[0]
        assert before + text[begin:end] + after == recall.Fact(case.question.key, case.question.answer).text


def test_several_questions_are_about_different_facts_and_all_have_their_answer() -> None:
    for task in ("independent", "order", "scope", "hops"):
        for _ in range(20):
            case = draw(Random(3), task, num_tokens=512, num_parts=4, num_questions=5)
            assert len({question.key for question in case.questions}) == 5
            reader = Reader(case.parts)
            assert all(reader.statements(one.key)[-1][0] == one.answer for one in case.questions)
            messages = case.conversation("system")
            assert [one["role"] for one in messages] == ["system", *("user", "assistant") * 5]
            assert messages[0]["content"] == case.text


def test_a_seed_draws_the_same_cases() -> None:
    assert cases("order") == cases("order")


@pytest.mark.parametrize("task", TASKS)
def test_the_embedded_tokenizer_knows_each_word_and_the_size_is_about_right(task: str) -> None:
    with embedded_model() as folder:
        tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    for tokens, parts in SIZES[:-1]:
        case = draw(Random(4), task, num_tokens=tokens, num_parts=parts)
        for word in set(re.findall(r" ?[a-z]+|[A-Z][a-z]*", f"{case.text}\n{case.question.text}")):
            assert len(tokenizer.encode_part(word)) == 1, word
        assert 0.7 * tokens < len(tokenizer.encode_part(case.text)) < 1.15 * tokens


@pytest.mark.parametrize(
    ("task", "tokens", "parts", "questions"),
    [
        ("poems", 512, 4, 1),
        ("order", 512, 1, 1),
        ("order", 512, 40, 1),
        ("order", 512, 4, 100),
        ("hops", 512, 4, 0),
        ("scope", 4000, 160, 1),
    ],
)
def test_what_cannot_be_drawn_is_refused(task: str, tokens: int, parts: int, questions: int) -> None:
    with pytest.raises(ValueError, match=r"no task|parts of|questions; such|a place for each, and there are"):
        draw(Random(0), task, num_tokens=tokens, num_parts=parts, num_questions=questions)

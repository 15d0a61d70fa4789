"""Questions as prompts of one model: their tokens are the plain conversation's, and parts can be linked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from foreword.demo import tasks
from foreword.demo.run import embedded_model
from foreword.errors import ConfigError
from foreword.modules.questions import EDIT, EDIT_LEAK, TASK_NAMES, Asked, Questions
from foreword.pml.composition import Composition
from foreword.text import Tokenizer
from tiny_models import TinyModels


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with embedded_model() as folder:
        loaded = Tokenizer.load(str(folder))
    assert loaded is not None
    return loaded


DRAWN = [name for name in TASK_NAMES if name not in (EDIT, EDIT_LEAK)]


@pytest.mark.parametrize("name", DRAWN)
def test_tokens_are_those_of_the_plain_conversation(tokenizer: Tokenizer, name: str) -> None:
    for seed in range(5):
        asked = Questions(tokenizer).draw(Random(seed), name, 400, 4)
        case = tasks.draw(Random(seed), name.partition("-")[0], num_tokens=400, num_parts=4)
        messages = case.conversation()[:-1]
        assert asked.composition.token_ids.tolist() == list(tokenizer.render_chat(messages, add_generation_prompt=True))
        assert asked.answer == case.question.answer


def test_each_part_has_a_source_and_the_text_after_an_argument_is_marked(tokenizer: Tokenizer) -> None:
    questions = Questions(tokenizer)
    for name in DRAWN:
        asked = questions.draw(Random(1), name, 400, 4)
        parts = [part for part in asked.composition.parts if part.span is not None]
        assert len(asked.composition.sources) == (4 if "cut" not in name else len(parts))
        assert [part.num_after_argument > 0 for part in parts].count(True) == (name == "parameters")
        assert len(asked.hidden) == (name == "leak")
        if name.startswith("cut"):
            assert {len(part.token_ids) for part in parts[:-1]} <= {int(name.removeprefix("cut-"))}


@pytest.mark.parametrize("name", [EDIT, EDIT_LEAK])
def test_an_edited_prompt_can_link_what_followed_the_part_that_it_lost(tokenizer: Tokenizer, name: str) -> None:
    for seed in range(20):
        asked = Questions(tokenizer).draw(Random(seed), name, 400, 4)
        composition = asked.composition
        assert asked.answer is not None
        text = tokenizer.spell(composition.token_ids.tolist())
        about = re.findall(r"\w+ of the \w+ \w+", text)[-1]
        fact = f"The {about} is {asked.answer}."
        assert (fact in text) == (name == EDIT)
        [source] = set(composition.sources)
        assert fact in tokenizer.spell(list(source.token_ids)), "the earlier prompt had it"
        linked = [part for part in composition.parts if part.span is not None]
        assert sum(len(part.token_ids) for part in linked) > 40
        assert composition.parts[0].span is None


def test_without_a_template_a_prompt_is_a_plain_text(tiny_models: TinyModels) -> None:
    found = Tokenizer.load(str(tiny_models.folder_with_tokenizer("llama")))
    assert found is not None
    plain = Questions(found, plain=True)
    assert plain.is_plain
    asked = plain.draw(Random(0), "independent", 200, 2)
    text = found.spell(asked.composition.token_ids.tolist())
    assert text.endswith("\nAnswer:")
    assert "\n\nQuestion: " in text


@pytest.mark.parametrize(
    ("answer", "text", "is_right"),
    [
        ("4821", "4821", True),
        ("4821", " 4821.\nThe", True),
        ("4821", "The code of the amber falcon is 4821.", True),
        ("4821", "**4821**", True),
        ("4821", "48210", False),
        ("4821", "14821", False),
        ("4821", "4821.5", False),
        ("4821", "3.4821", False),
        ("4821", "1,4821,000", False),
        ("4821", "", False),
        ("3.5", "It is 3.5, not 13.5.", True),
        ("3.5", "It is 13.5.", False),
        ("San Jose.", "in SAN\n jose!", True),
        ("Ana", "Anabel", False),
        ("a+", "a+", True),
        ("a+", "aa", False),
    ],
)
def test_an_answer_is_right_if_it_contains_the_right_words(answer: str, text: str, is_right: bool) -> None:
    assert Asked(Composition(()), answer).is_right(text) == is_right
    assert not Asked(Composition(()), None).is_right(text)


def test_users_prompts_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"documents": ["One.", "Two.", "Three."], "question": "Where?", "instructions": "Answer.", "answer": "Here."},
        {"documents": ["Four."], "question": "Why?"},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = Questions(tokenizer).read_file(file)
    wanted = "Answer.\n\nOne.\n\nTwo.\n\nThree.\n\nWhere?"
    rendered = tokenizer.render_chat([{"role": "user", "content": wanted}], add_generation_prompt=True)
    assert first.composition.token_ids.tolist() == list(rendered)
    assert (first.answer, second.answer) == ("Here.", None)
    assert len(first.composition.sources) == 3


def test_a_text_may_have_the_ends_of_lines_that_json_has_not(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    told = {"documents": ["One.\u2028Two.\x85Three."], "question": "Where?"}
    file.write_bytes(b"\r\n".join([json.dumps(told, ensure_ascii=False).encode()] * 2))
    assert len(Questions(tokenizer).read_file(file)) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no prompts"),
        ("{", "line 1, is no JSON"),
        ('{"documents": ["a"]}', "line 1: a line must have"),
        ('{"documents": ["a"], "question": "b"}\n[]', "line 2: a line must have"),
        ('{"documents": "a", "question": "b"}', "documents must be a list"),
        ('{"documents": [{}], "question": "b"}', "document 0 must be a text"),
        ('{"documents": ["a"], "question": 7}', "question must be a text"),
        ('{"documents": ["a"], "question": "b", "answer": 7}', "answer must be a text"),
        ('{"documents": ["a"], "question": "b", "answer": " . "}', "has no word"),
        ('{"documents": ["a"], "question": "b", "link": "none"}', "a line must have"),
    ],
)
def test_other_lines_are_refused_by_number(tokenizer: Tokenizer, tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=told):
        Questions(tokenizer).read_file(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        Questions(tokenizer).read_file(tmp_path / "none.jsonl")

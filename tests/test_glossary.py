"""The glossary's words are words of the code, in the files that the page names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^\| \*\*(.+?)\*\* \| (.+) \| `(.+?)` \|$", re.MULTILINE)


def entries():
    """(word, meaning, file) of each line of the table."""
    return ENTRY.findall((ROOT / "docs" / "reference" / "glossary.md").read_text())


def parts_of(text):
    """The words of a text or an identifier, in lower case and without a plural's s: ShadowPools -> shadow pool."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)
    return [word.lower().removesuffix("s") for word in words]


def texts_of(tree):
    """The identifiers and docstrings of a module, those below fields and constants included."""
    for node in ast.walk(tree):
        for name in ("id", "name", "attr", "arg"):
            if isinstance(getattr(node, name, None), str):
                yield getattr(node, name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def occurs(word, source):
    wanted = parts_of(word)
    found = (parts_of(text) for text in texts_of(ast.parse(source)))
    return any(wanted == parts[at : at + len(wanted)] for parts in found for at in range(len(parts)))


@pytest.mark.parametrize(("word", "file"), [(word, file) for word, _, file in entries()])
def test_a_word_of_the_glossary_occurs_in_the_file_that_the_page_names(word, file):
    assert occurs(word, (ROOT / "src" / "foreword" / file).read_text()), f"{file} has no {word!r}"


def test_a_word_that_is_no_identifier_and_in_no_docstring_is_found_out():
    source = '"""Knows block tables."""\nclass ShadowPool:\n    num_hits = 0  # counts ghosts\n    """Hits so far."""\n'
    assert all(occurs(word, source) for word in ("block table", "shadow pool", "hit"))
    assert not any(occurs(word, source) for word in ("ghost", "pool shadow", "lock", "shadow tables"))


def test_the_glossary_has_each_word_once_and_one_sentence_for_it():
    words = [word for word, _, _ in entries()]
    assert len(words) >= 35
    assert len(set(words)) == len(words)
    assert all(meaning.endswith(".") for _, meaning, _ in entries())
    lines = (ROOT / "docs" / "reference" / "glossary.md").read_text().count("\n| **")
    assert lines == len(words), "a line of the table cannot be read"

"""The check of the project's English: what it catches, what it lets pass, and where it says so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("plain_english", ROOT / ".ci" / "plain_english.py")
assert SPEC is not None
assert SPEC.loader is not None
plain_english = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plain_english)

ROWS = re.findall(
    r"^\| (.+) \| (.+) \|$",
    (ROOT / "CONTRIBUTING.md").read_text().partition("| Say | Instead of |\n|---|---|\n")[2].partition("\n\n")[0]
    + "\n",
    re.MULTILINE,
)


def found_in(prose: str) -> list[tuple[int, str, str]]:
    return plain_english.findings([plain_english.Text(1, prose)])


@pytest.mark.parametrize("prose", [instead_of for _, instead_of in ROWS])
def test_what_the_list_of_words_warns_of_is_caught(prose: str) -> None:
    assert found_in(prose)


@pytest.mark.parametrize("prose", [say for say, _ in ROWS])
def test_what_the_list_of_words_recommends_passes(prose: str) -> None:
    assert not found_in(prose)


def test_the_list_of_words_has_a_row_for_every_phrase() -> None:
    rows = [instead_of for _, instead_of in ROWS]
    assert len(rows) >= 20
    for regex, say in plain_english.COMPILED:
        assert any(regex.search(row) for row in rows), f"CONTRIBUTING.md has no example of {regex.pattern} ({say})"


@pytest.mark.parametrize(
    "prose",
    [
        "a model runs in one process; start several behind a proxy",
        "A block waits behind its duplicate in the queue.",
        "there are so many that numpy lets other threads run",
        "what is a block?",
        "told by its own length; its blocks; the length of its prefix",
        "Whether blocks are kept is what the policy decides.",
        "it is clear that this is a hit",
        "the first of its tokens",
    ],
)
def test_idiomatic_sentences_pass(prose: str) -> None:
    assert not found_in(prose)


def test_comments_docstrings_and_messages_are_read_and_names_are_not() -> None:
    source = '''"""Tokens behind
which a message ends."""

of_its = 3  # nothing here
# A comment of two lines that names so
# many blocks.
message = f"{of_its} tokens, so many of them"  # by the clock
so_many = "short"
'''
    lines = [line for line, _, _ in plain_english.findings(plain_english.prose_of_python(source))]
    assert lines == [1, 5, 7, 7]


def test_code_in_a_page_is_not_read() -> None:
    page = "A page.\n\n```sh\necho so many blocks\n```\n\nCall `so many` and\nso many blocks.\n"
    assert [line for line, _, _ in plain_english.findings([plain_english.prose_of_page(page)])] == [8]


def test_a_finding_names_its_file_and_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "file.py").write_text('"""A file."""\n\n# so many blocks\n')
    assert plain_english.main(["room"]) == 1
    assert capsys.readouterr().out.startswith('room/file.py:3: "so many": say ')
    (tmp_path / "room" / "file.py").write_text('"""A file."""\n')
    assert plain_english.main(["room"]) == 0


@pytest.mark.slow  # `make check`, which comes before, checks the same
def test_the_rooms_on_the_list_are_clean() -> None:
    assert plain_english.main([]) == 0

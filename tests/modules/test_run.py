"""`foreword pml run`, and the guide's example: answers that are right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import foreword
from foreword.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/pml.md").read_text()
WEIGHTS = Path(foreword.__file__).parent / "demo" / "weights"
MODEL = ["--model", str(WEIGHTS), "--max-model-len", "1024", "--kv-cache-memory-bytes", "16MiB", "--no-self-check"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trip.pml"
    path.write_text(blocks("xml")[0])
    return path


def test_the_guides_example_prints_what_it_says(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    [code] = blocks("python")
    assert '"src/foreword/demo/weights"' in code
    exec(compile(code.replace("src/foreword/demo/weights", str(WEIGHTS)), "<guide>", "exec"), {})
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_guides_table_is_what_the_command_prints(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["pml", "check", file.name, "--model", str(WEIGHTS)]) == 0
    assert capsys.readouterr().out == blocks("text")[1]


def test_a_prompt_of_a_file_or_a_text_is_answered(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = file.with_name("prompt.pml")
    prompt.write_text(blocks("xml")[1])
    assert main(["pml", "run", str(file), str(prompt), *MODEL]) == 0
    assert capsys.readouterr().out == "4821\n"
    question = '<prompt schema="trip"><oslo/><user>What is the home of the silver violin?</user></prompt>'
    assert main(["pml", "run", str(file), question, *MODEL, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["modules"], answer["cached_tokens"]) == ("Oslo", ["oslo"], 0)


def test_a_wrong_prompt_gives_its_place_and_exit_code_1(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pml", "run", str(file), '<prompt schema="trip"><rome/></prompt>', *MODEL]) == 1
    assert "PromptError: <prompt>:1:23: the schema has no module 'rome'" in capsys.readouterr().err


def test_a_users_mistake_has_exit_code_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pml", "run", str(file), "<prompt/>"]) == 2
    assert "no model is given" in capsys.readouterr().err
    assert main(["pml", "run", str(file), "none.pml", *MODEL]) == 2
    assert "'none.pml' is not a file" in capsys.readouterr().err


QUESTION = '<prompt schema="trip"><falcon/><oslo/><user>What is the home of the silver violin?</user></prompt>'


def test_a_linked_prompt_is_answered_with_a_report(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pml", "run", str(file), QUESTION, *MODEL, "--block-size", "1"]
    assert main([*command, "--link", "first-2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Oslo\n"
    told = re.search(r"first-2: (\d+) .* linked, (\d+) recomputed, (\d+) computed, (\d+) cached; approx", shown.err)
    assert told is not None
    assert main([*command, "--link", "first-2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    link = answer["link"]
    counts = [link[f"{what}_tokens"] for what in ("linked", "recomputed", "computed", "cached")]
    assert [int(count) for count in told.groups()] == counts
    assert sum(counts) == answer["prompt_tokens"]
    assert counts[0] > 0
    assert counts[1] >= 2


def test_methods_are_shown_beside_each_other(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pml", "run", str(file), QUESTION, *MODEL, "--block-size", "1", "--compare"]
    assert main([*command, "--link", "first-3"]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[:4] == ["method", "as", "all", "linked"]
    assert [row.split()[0] for row in rows] == ["none", "first-16", "all", "first-3"]
    assert rows[2].endswith('"Oslo"')
    assert rows[2].split()[1] == "equal"
    assert main([*command, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [one["method"] for one in answers] == ["none", "first-16", "all"]
    assert not answers[2]["link"]["exact"], "a prompt of a schema has gaps"
    assert answers[0]["link"]["linked_tokens"] > answers[2]["link"]["linked_tokens"] == 0


def test_an_unknown_method_is_refused_before_the_model_is_loaded(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pml", "run", str(file), QUESTION, "--model", "no-such-folder", "--link", "some"]) == 2
    assert "link='some' is no method" in capsys.readouterr().err

"""`foreword pml check`: tables, places of mistakes, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.cli import main

SCHEMA = """<schema name="trip">
  <user>
    <module name="plan">A trip of <parameter name="days" length="4"/> days.
      <union scaffold="rome"><module name="rome">Old.</module><module name="oslo">Old.</module></union>
    </module>
  </user>
</schema>"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trip.pml"
    path.write_text(SCHEMA)
    return path


def test_a_sound_schema_is_shown_as_a_table(file: Path, chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pml", "check", str(file), "--model", str(chat_model)]) == 0
    out = capsys.readouterr().out
    assert f"{file}: schema 'trip', 3 modules, " in out
    assert [line.split()[0] for line in out.splitlines()[2:7]] == ["module", "(schema)", "plan", "rome", "oslo"]
    assert "days (4)" in out
    assert "plan/rome, plan/oslo have equal texts and are computed once" in out
    assert "line 4: scaffold='rome' of a union has no effect" in out


def test_the_report_is_one_json_line_if_that_is_wanted(
    file: Path, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = file.with_name("prompt.pml")
    prompt.write_text('<prompt schema="trip"><plan days="3"><oslo/></plan></prompt>')
    assert main(["pml", "check", str(file), "--model", str(chat_model), "--prompt", str(prompt), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == "trip"
    assert [row["path"] for row in report["rows"]] == ["", "plan", "plan/rome", "plan/oslo"]
    assert 0 < report["exact_tokens"] < report["prompt_tokens"]


def test_a_prompt_is_checked_against_its_schema(
    file: Path, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = file.with_name("prompt.pml")
    arguments = ["pml", "check", str(file), "--model", str(chat_model), "--prompt", str(prompt)]
    prompt.write_text('<prompt schema="trip">\n<plan days="3"><rome/></plan> Why? </prompt>')
    assert main(arguments) == 0
    assert "are an ordinary prefix" in capsys.readouterr().out
    prompt.write_text('<prompt schema="trip">\n<plan days="3"><paris/></plan></prompt>')
    assert main(arguments) == 1
    assert f"PromptError: {prompt}:2:16: the schema has no module 'plan/paris'" in capsys.readouterr().err


def test_without_a_model_the_structure_is_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pml", "check", str(file)]) == 0
    assert "schema 'trip' is sound; --model shows its layout" in capsys.readouterr().out


def test_a_wrong_schema_gives_its_place_and_exit_code_1(
    file: Path, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(SCHEMA.replace("<union", "<choice").replace("</union", "</choice"))
    for model in ([], ["--model", str(chat_model)]):
        assert main(["pml", "check", str(file), *model]) == 1
        assert f"PMLSyntaxError: {file}:4:7: <choice> is not a tag of schemas" in capsys.readouterr().err


def test_included_files_lie_in_the_named_folder(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('<schema name="s"><module name="m" src="rome.txt"/></schema>')
    (tmp_path / "rome.txt").write_text("Rome.")
    assert main(["pml", "check", str(file)]) == 1
    assert "src='rome.txt' needs a folder; give --include" in capsys.readouterr().err
    assert main(["pml", "check", str(file), "--include", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pml"], "'none.pml' is not a file"),
        (["FILE", "--prompt", "none.pml"], "'none.pml' is not a file; name a prompt of the schema"),
        (["FILE", "--prompt", "FILE"], "--prompt needs --model"),
        (["FILE", "--model", "/none"], "there is no folder"),
        (["FILE", "--models", "/none"], "--models"),
    ],
)
def test_a_users_mistake_has_exit_code_2(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pml", "check", *(str(file) if one == "FILE" else one for one in arguments)]) == 2
    assert message in capsys.readouterr().err

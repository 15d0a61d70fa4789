"""The file of measured agreement, and the bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import Agreement, Gate, MeasuredLinks

MEASURED = MeasuredLinks("f00d", {"none": Agreement(200, 150), "first-16": Agreement(200, 199)}, {"seed": 3})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "links.json")
    assert MeasuredLinks.read(tmp_path / "links.json") == MEASURED


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        json.dumps({"format": 2, "model": "f00d", "methods": {}}),
        json.dumps({"format": 1, "model": "f00d", "methods": {"none": {"prompts": 0, "agreeing": 0}}}),
        json.dumps({"format": 1, "model": "f00d", "methods": {"none": {"prompts": 3, "agreeing": 4}}}),
        json.dumps({"format": 1, "model": "f00d", "methods": {"none": {"prompts": 3, "agreeing": 0.5}}}),
        json.dumps({"format": 1, "model": "f00d", "methods": ["none"]}),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"links\.json.*pml measure"):
        MeasuredLinks.read(path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-file"):
        MeasuredLinks.read(tmp_path / "no-file")
    with pytest.raises(ConfigError, match="no-folder"):
        MEASURED.write(tmp_path / "no-folder" / "links.json")


def test_a_method_must_agree_often_enough() -> None:
    gate = Gate(0.99, MEASURED)
    gate.check("first-16")
    gate.check("all")
    with pytest.raises(InvalidRequestError, match=r"'none'.*150 of 200.*99\.0%"):
        gate.check("none")
    with pytest.raises(InvalidRequestError, match=r"'first-8' was not measured.*all, first-16, none"):
        gate.check("first-8")
    with pytest.raises(InvalidRequestError, match="'none' was not measured"):
        Gate(0.99).check("none")
    Gate(0.0).check("none")


def test_another_model_is_refused() -> None:
    Gate(0.99, MEASURED).check_model("f00d")
    Gate(0.99).check_model("beef")
    with pytest.raises(ConfigError, match="another model"):
        Gate(0.99, MEASURED).check_model("beef")

"""The file of measured agreement, and the bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import Agreement, Gate, MeasuredLinks

MEASURED = MeasuredLinks(
    "f00d",
    {"none": Agreement(200, 150), "first-16": Agreement(200, 199)},
    {"first-16": Agreement(200, 196), "all": Agreement(200, 200)},
    {"seed": 3},
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "links.json")
    assert MeasuredLinks.read(tmp_path / "links.json") == MEASURED
    assert list(json.loads((tmp_path / "links.json").read_text())) == [
        "format",
        "model",
        "methods",
        "with_gaps",
        "seed",
    ]


def test_a_file_without_gaps_covers_no_gaps(tmp_path: Path) -> None:
    told = {"format": 1, "model": "f00d", "methods": {"none": {"prompts": 9, "agreeing": 9}}}
    (tmp_path / "links.json").write_text(json.dumps(told))
    found = MeasuredLinks.read(tmp_path / "links.json")
    assert found == MeasuredLinks("f00d", {"none": Agreement(9, 9)})
    found.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == told
    Gate(1.0, found).check("none")
    with pytest.raises(InvalidRequestError, match="'none' was not measured with gaps"):
        Gate(1.0, found).check("none", has_gaps=True)


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
        json.dumps({"format": 1, "model": "f00d", "methods": {}, "with_gaps": None}),
        json.dumps({"format": 1, "model": "f00d", "methods": {}, "with_gaps": {"all": {"prompts": 3}}}),
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


def test_gaps_are_judged_by_what_was_measured_with_gaps() -> None:
    gate = Gate(0.99, MEASURED)
    gate.check("all", has_gaps=True)
    with pytest.raises(InvalidRequestError, match=r"'first-16'.*196 of 200 prompts with gaps.*99\.0%.*\"dense\""):
        gate.check("first-16", has_gaps=True)
    with pytest.raises(InvalidRequestError, match=r"'none' was not measured with gaps.*99\.0%.*\"dense\".*--gaps"):
        gate.check("none", has_gaps=True)
    with pytest.raises(InvalidRequestError, match="'all' was not measured with gaps"):
        Gate(0.99).check("all", has_gaps=True)
    Gate(0.0).check("none", has_gaps=True)


def test_another_model_is_refused() -> None:
    Gate(0.99, MEASURED).check_model("f00d")
    Gate(0.99).check_model("beef")
    with pytest.raises(ConfigError, match="another model"):
        Gate(0.99, MEASURED).check_model("beef")

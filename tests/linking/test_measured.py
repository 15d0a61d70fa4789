"""The file of what linking costs in right answers, and the bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import Gate, MeasuredLinks, Rightness

MEASURED = MeasuredLinks(
    "f00d",
    {"none": Rightness(200, 50, 0), "first-16": Rightness(200, 12, 14)},
    {"first-16": Rightness(200, 14, 3), "all": Rightness(200, 0, 0)},
    {"seed": 3},
    {"first-16": Rightness(200, 1, 0), "none": Rightness(200, 50, 0)},
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "links.json")
    assert MeasuredLinks.read(tmp_path / "links.json") == MEASURED
    assert list(json.loads((tmp_path / "links.json").read_text())) == [
        "format",
        "model",
        "methods",
        "with_gaps",
        "edits",
        "seed",
    ]


def test_edits_are_served_by_what_was_measured_of_edits() -> None:
    gate = Gate(0.95, MEASURED)
    for served in ("first-16", "all"):
        gate.check_edits(served)
    with pytest.raises(InvalidRequestError, match=r"may lose 30.9% of edited prompts .*\(50 lost and 0 gained of 200"):
        gate.check_edits("none")
    with pytest.raises(InvalidRequestError, match=r"'first-8' was not measured for edits .*--tasks independent"):
        gate.check_edits("first-8")
    with pytest.raises(InvalidRequestError, match="not measured for edits"):
        Gate(0.95, None).check_edits("first-16")
    Gate(0.0, None).check_edits("first-16")


def test_a_file_without_gaps_covers_no_gaps(tmp_path: Path) -> None:
    told = {"format": 2, "model": "f00d", "methods": {"none": {"prompts": 900, "lost": 0, "gained": 9}}}
    (tmp_path / "links.json").write_text(json.dumps(told))
    found = MeasuredLinks.read(tmp_path / "links.json")
    assert found == MeasuredLinks("f00d", {"none": Rightness(900, 0, 9)})
    found.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == told
    Gate(0.99, found).check("none")
    with pytest.raises(InvalidRequestError, match="'none' was not measured with gaps"):
        Gate(0.99, found).check("none", has_gaps=True)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        json.dumps({"format": 1, "model": "f00d", "methods": {"none": {"prompts": 9, "agreeing": 9}}}),
        json.dumps({"format": 3, "model": "f00d", "methods": {}}),
        json.dumps({"format": 2, "model": "f00d", "methods": {"none": {"prompts": 0, "lost": 0, "gained": 0}}}),
        json.dumps({"format": 2, "model": "f00d", "methods": {"none": {"prompts": 3, "lost": 2, "gained": 2}}}),
        json.dumps({"format": 2, "model": "f00d", "methods": {"none": {"prompts": 3, "lost": -1, "gained": 0}}}),
        json.dumps({"format": 2, "model": "f00d", "methods": {"none": {"prompts": 3, "lost": 0.5, "gained": 0}}}),
        json.dumps({"format": 2, "model": "f00d", "methods": {"none": {"prompts": 3, "agreeing": 3}}}),
        json.dumps({"format": 2, "model": "f00d", "methods": ["none"]}),
        json.dumps({"format": 2, "model": "f00d", "methods": {}, "with_gaps": None}),
        json.dumps({"format": 2, "model": "f00d", "methods": {}, "with_gaps": {"all": {"prompts": 3}}}),
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


@pytest.mark.parametrize(
    ("counts", "interval", "p_value"),
    [
        # The interval of Bonett and Price (2012) by hand: n = 102, l = 11/102, g = 22/102.
        ((100, 10, 21), (-0.2162, 0.0005), 0.0708),
        ((100, 0, 0), (-0.0272, 0.0272), 1.0),
        ((100, 6, 0), (0.0057, 0.1119), 0.0313),
        ((100, 0, 6), (-0.1119, -0.0057), 0.0313),
        ((1000, 40, 40), (-0.0177, 0.0177), 1.0),
        ((3, 3, 0), (-0.1012, 1.0), 0.25),
    ],
)
def test_intervals_and_tests_are_those_of_pairs(
    counts: tuple[int, int, int], interval: tuple[float, float], p_value: float
) -> None:
    found = Rightness(*counts)
    assert found.loss_interval == pytest.approx(interval, abs=1e-4)
    assert found.p_value == pytest.approx(p_value, abs=1e-4)
    assert found.loss_interval[0] <= found.loss <= found.loss_interval[1]


def test_a_method_must_not_lose_more_than_the_bar_lets_it() -> None:
    gate = Gate(0.95, MEASURED)
    gate.check("first-16")  # it gains as much as it loses
    gate.check("all")
    with pytest.raises(InvalidRequestError, match=r"'none' may lose 30\.9%.*50 lost and 0 gained of 200 .*5\.0%"):
        gate.check("none")
    with pytest.raises(InvalidRequestError, match=r"'first-8' was not measured.*all, first-16, none"):
        gate.check("first-8")
    with pytest.raises(InvalidRequestError, match="'none' was not measured"):
        Gate(0.95).check("none")
    Gate(0.0).check("none")
    few = MeasuredLinks("f00d", {"none": Rightness(30, 0, 0)})
    with pytest.raises(InvalidRequestError, match="0 lost and 0 gained of 30 prompts"):
        Gate(0.95, few).check("none")  # thirty prompts exclude no loss of 5 in 100


def test_gaps_are_judged_by_what_was_measured_with_gaps() -> None:
    gate = Gate(0.95, MEASURED)
    gate.check("all", has_gaps=True)
    with pytest.raises(InvalidRequestError, match=r"'first-16'.*14 lost and 3 gained .* with gaps.*5\.0%.*\"dense\""):
        gate.check("first-16", has_gaps=True)
    with pytest.raises(InvalidRequestError, match=r"'none' was not measured with gaps.*5\.0%.*\"dense\".*--gaps"):
        gate.check("none", has_gaps=True)
    with pytest.raises(InvalidRequestError, match="'all' was not measured with gaps"):
        Gate(0.95).check("all", has_gaps=True)
    Gate(0.0).check("none", has_gaps=True)


def test_another_model_is_refused() -> None:
    Gate(0.95, MEASURED).check_model("f00d")
    Gate(0.99).check_model("beef")
    with pytest.raises(ConfigError, match="another model"):
        Gate(0.95, MEASURED).check_model("beef")

"""The report on a schema: rooms, equal texts, seams and notes."""

from __future__ import annotations

import re

import pytest

from foreword.errors import PromptError
from foreword.pml.check import Row, Seam, report_on
from foreword.pml.layout import Layout, SchemaText
from foreword.pml.library import load_schema
from pml.test_layout import TRAITS, TRIP
from pml.words import around, load


def test_rows_tell_tokens_positions_and_room() -> None:
    report = report_on(load(TRIP).layout)
    assert report.rows == (
        Row("", 0, 0, 15, None, ()),
        Row("plan", 8, 0, 15, None, (("duration", 3),)),
        Row("plan/home", 6, 7, 13, 1, (("city", 2),)),
        Row("plan/abroad", 2, 7, 14, 0, ()),
        Row("plan/abroad/rome", 2, 9, 11, 3, ()),
        Row("plan/abroad/oslo", 5, 9, 14, 0, ()),
    )
    assert (report.num_positions, report.num_source_tokens) == (15, 8 + 6 + 2 + 2 + 5)


def test_the_room_that_is_told_is_the_room_that_text_has() -> None:
    schema = load(TRAITS)
    room = {row.path: row.room for row in report_on(schema.layout).rows}["E"]
    assert room == 2
    prompt = '<prompt schema="traits"><E/> {} <rest/></prompt>'
    schema.prompt(prompt.format("x " * 2))
    with pytest.raises(PromptError, match="3 tokens, and 2 fit"):
        schema.prompt(prompt.format("x " * 3))


def test_equal_texts_are_named() -> None:
    report = report_on(
        load(
            '<schema name="s"><module name="a">x y</module><module name="b"><module name="c">x  y</module></module>'
            '<module name="d">y</module></schema>'
        ).layout
    )
    assert report.shared == (("a", "b/c"),)


def test_notes_name_what_has_no_effect() -> None:
    text = """<schema name="s"><user>
      <union scaffold="a"><module name="a">x</module></union>
      <module name="b"/></user></schema>"""
    assert report_on(load(text).layout).notes == (
        "line 2: scaffold='a' of a union has no effect; name scaffolds in modules",
        "line 3: the module 'b' has no text",
    )


def letters(text: str) -> tuple[int, ...]:
    """A token for each run of letters, and one for each other character: letters join over a seam."""
    return tuple(map(hash, re.findall(r"[a-z]+|[^a-z]", text)))


def test_seams_are_where_tokens_would_join() -> None:
    text = (
        '<schema name="s" xml:space="preserve">one<union><module name="a">two</module><module name="b"> six</module>'
        '</union><module name="c"><parameter name="p" length="1"/>ten</module>end</schema>'
    )
    layout = Layout(load_schema(text), SchemaText(letters, (), 0, around, lambda _role: ""))
    assert report_on(layout).seams == (Seam("", "a", "one", "two"), Seam("c", "", "ten", "end"))

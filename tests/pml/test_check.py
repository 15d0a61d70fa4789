"""The report on a schema: rooms, equal texts, seams and notes."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from foreword.errors import PromptError, SchemaError
from foreword.pml.check import MOST_NEIGHBOURS, Row, Seam, report_on
from foreword.pml.layout import Bounds, Layout, SchemaText
from foreword.pml.library import load_schema
from pml.test_layout import TRAITS, TRIP
from pml.words import Words, around, library, load


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


def unions(members: list[list[str]]) -> str:
    """A schema of unions in succession, between two texts."""
    written = (
        "".join(f'<module name="m{at}_{number}">{text}</module>' for number, text in enumerate(texts))
        for at, texts in enumerate(members)
    )
    return f'<schema name="s">a{"".join(f"<union>{one}</union>" for one in written)}b</schema>'


def test_unions_of_members_without_text_do_not_multiply_the_neighbours() -> None:
    report = report_on(load(unions([["", ""]] * 2000)).layout)
    assert report.is_every_seam_known
    report = report_on(load(unions([["", "c"]] * 200)).layout)
    assert not report.is_every_seam_known, "each member has all those before it as neighbours: 20,000 pairs"


def test_the_pairs_of_neighbours_that_are_tried_are_bounded() -> None:
    encoded = []

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return letters(text)

    words = [chr(97 + number % 26) * (1 + number // 26) for number in range(2000)]
    layout = Layout(load_schema(unions([words, words])), SchemaText(encode, (), 0, around, lambda _role: ""))
    encoded.clear()
    report = report_on(layout)
    assert 0 < len(report.seams) <= MOST_NEIGHBOURS
    assert not report.is_every_seam_known
    assert len(encoded) <= 3 * MOST_NEIGHBOURS


def test_sources_are_counted_without_being_made() -> None:
    text = (
        '<schema name="s">x<module name="a">p q</module><module name="b">p q</module>'
        '<module name="c" scaffold="a">r</module><module name="d" scaffold="b">r</module>'
        '<module name="e">r</module></schema>'
    )
    layout = load(text, opening="<s>").layout
    assert layout.num_source_tokens == sum(len(source.token_ids) for source in layout.sources())


def test_the_memory_of_a_layout_is_estimated_well() -> None:
    big = " ".join(f"w{number}" for number in range(1000))
    modules = "".join(f'<module name="m{number}" scaffold="big">x{number} y</module>' for number in range(1000))
    text = f'<schema name="s"><module name="big">{big}</module>{modules}</schema>'
    words = Words()
    words.encode(f"{big} y {' '.join(f'x{number}' for number in range(1000))}")
    shared = library(words)
    tracemalloc.start()
    kept = shared.load_text(text)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * used < kept.layout.num_bytes < 2 * used


@pytest.mark.parametrize(
    "text",
    [
        '<schema name="{}"/>',
        '<schema name="s"><module name="{}"/></schema>',
        '<schema name="s"><module name="m"><parameter name="{}" length="1"/></module></schema>',
    ],
)
def test_names_are_short_and_an_error_does_not_repeat_a_long_one(text: str) -> None:
    load(text.format("n" * 128))
    with pytest.raises(SchemaError, match="has 1,000,000 characters, and may have 128") as refused:
        load(text.format("n" * 1_000_000))
    assert len(str(refused.value)) < 200


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    def encode(text: str) -> tuple[int, ...]:
        raise AssertionError(text)

    text = SchemaText(encode, (), 0, around, lambda _role: "", max_token_characters=4)
    for inner, message in (
        ("x" * 41, "a text of 41 characters, and the 10 tokens of one request hold at most 40"),
        ('<parameter name="p" length="1048576"/>', "'p' has 1,048,576 tokens"),
    ):
        schema = load_schema(f'<schema name="s"><module name="m">{inner}</module></schema>')
        with pytest.raises(SchemaError, match=message):
            Layout(schema, text, Bounds(10))

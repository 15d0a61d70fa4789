"""Layouts: where modules, unions, parameters and texts stand. Tokens are words, so positions can be counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from foreword.errors import SchemaError
from foreword.pml.composition import Source
from foreword.pml.layout import Bounds, Box, Choice, Layout, Run, SchemaText, Slot
from foreword.pml.schema import Child, Module, Parameter, Schema, Turn, Union
from pml.drawn import children
from pml.words import PLACEHOLDER, Words, library, load

TRIP = """<schema name="trip">
  <module name="plan">
    We travel for <parameter name="duration" length="3"/> and
    <union>
      <module name="home"> stay in <parameter name="city" length="2"/> at home </module>
      <module name="abroad">
        go far:
        <union>
          <module name="rome"> old Rome </module>
          <module name="oslo"> Oslo in the cold north </module>
        </union>
      </module>
    </union>
    together.
  </module>
</schema>"""
CODE = """<schema name="code">
  <system> Read files. </system>
  <user>
    Here they are.
    <module name="unit.py">
class Unit:
    pass
    </module>
    <module name="map.py"> class Map: ... </module>
  </user>
  <assistant> I have read them. </assistant>
</schema>"""
PERSONA = """<schema name="persona"><user> A person:
  <module name="age"><union><module name="child"> young one </module><module name="none"> x </module></union></module>
  <module name="home"><union><module name="city"> in town </module><module name="none"> a b c </module></union></module>
</user></schema>"""
LESSON = """<!-- about --><schema name="lesson"><system>Teach.</system><user> 1. Level
  <union><module name="low"> low one </module><module name="high"> high </module></union>
  2. Style
  <union><module name="eyes"> eyes </module><module name="ears"> by the ears </module></union> End. </user></schema>"""
TRAITS = """<schema name="traits"> Traits
  <union scaffold="EI"><module name="EI"> one of two </module><module name="E"> E </module></union>
  and <!-- the next --> <module name="rest" cache="false"> rest </module></schema>"""

GOLDEN = {
    TRIP: {
        "": (0, 15),
        "plan": (0, 15),
        "plan/home": (7, 13),
        "plan/abroad": (7, 14),
        "plan/abroad/rome": (9, 11),
        "plan/abroad/oslo": (9, 14),
    },
    CODE: {"": (0, 21), "unit.py": (8, 11), "map.py": (11, 14)},
    PERSONA: {
        "": (0, 9),
        "age": (3, 5),
        "age/child": (3, 5),
        "age/none": (3, 4),
        "home": (5, 8),
        "home/city": (5, 7),
        "home/none": (5, 8),
    },
    LESSON: {"": (0, 15), "low": (6, 8), "high": (6, 7), "eyes": (10, 11), "ears": (10, 13)},
    TRAITS: {"": (0, 6), "EI": (1, 4), "E": (1, 2), "rest": (5, 6)},
}


@pytest.mark.parametrize("text", GOLDEN, ids=["trip", "code", "persona", "lesson", "traits"])
def test_modules_stand_where_they_are_counted(text: str) -> None:
    layout = load(text).layout
    assert {path: (box.position, box.end) for path, box in layout.boxes.items()} == GOLDEN[text]


def all_boxes(layout: Layout) -> list[Box]:
    return list(layout.boxes.values())


@pytest.mark.parametrize("text", GOLDEN, ids=["trip", "code", "persona", "lesson", "traits"])
def test_items_follow_each_other_without_gaps_and_members_of_a_union_begin_together(text: str) -> None:
    for box in all_boxes(load(text).layout):
        position = box.position
        for item in box.items:
            assert item.position == position
            if isinstance(item, Choice):
                assert {member.position for member in item.members} == {position}
                assert item.end == max(member.end for member in item.members)
            position = item.end
        assert position == box.end


def test_a_parameter_reserves_its_length_and_holds_its_scaffold_and_placeholders() -> None:
    words = Words()
    schema = load(
        '<schema name="s"><module name="m">a <parameter name="p" length="4" scaffold="b c"/> d</module></schema>', words
    )
    slot = schema.layout.boxes["m"].slots["p"]
    assert (slot.position, slot.end, slot.offset) == (1, 5, 1)
    assert slot.placeholder_ids == (*words.encode("b c"), PLACEHOLDER, PLACEHOLDER)
    assert words.spell(schema.layout.boxes["m"].own_ids) == "a b c <unk> <unk> d"


def test_a_scaffold_that_is_longer_than_its_parameter_is_refused_at_its_place() -> None:
    with pytest.raises(
        SchemaError, match="<schema>:2:1: the scaffold of 'p' has 3 tokens, and its length is 2"
    ) as raised:
        load('<schema name="s"><module name="m">\n<parameter name="p" length="2" scaffold="a b c"/></module></schema>')
    assert (raised.value.line, raised.value.column) == (2, 1)


def test_parameters_that_reserve_more_than_any_memory_holds_are_refused_before_they_take_it() -> None:
    parameters = "".join(f'<parameter name="p{n}" length="1048576"/>' for n in range(1000))
    with pytest.raises(SchemaError, match=r"<schema>:1:.*more than 4,194,304 tokens; split it"):
        load(f'<schema name="s"><module name="m">{parameters}</module></schema>')


def test_a_module_that_no_request_can_hold_is_refused() -> None:
    limited = replace(library(), bounds=Bounds(4))
    limited.load('<schema name="s">a b c d <module name="m">e <parameter name="p" length="3"/></module></schema>')
    with pytest.raises(SchemaError, match="<schema>:2:1: the module 'm' has 5 tokens, and one request may have 4"):
        limited.load('<schema name="s">\n<module name="m">e <parameter name="p" length="4"/></module></schema>')
    scaffolded = '<schema name="s"><module name="m">a b</module><module name="n" scaffold="m">c d{}</module></schema>'
    limited.load(scaffolded.format(""))
    with pytest.raises(SchemaError, match="'n' has 3 tokens after a scaffold of 2, and one request may have 4"):
        limited.load(scaffolded.format(" e"))
    with pytest.raises(SchemaError, match="<schema>:1:1: the schema's own text has 5 tokens"):
        limited.load('<schema name="s">a b c d e</schema>')


def test_a_message_that_the_template_refuses_is_refused_at_its_place() -> None:
    with pytest.raises(SchemaError, match="<schema>:2:1: <user> cannot be written: two user messages"):
        load('<schema name="s"><user>a</user>\n<user>b</user></schema>')


def test_messages_in_a_union_follow_what_stands_before_the_union() -> None:
    text = (
        '<schema name="s"><system>x</system><union><module name="a"><user>q</user><assistant>r</assistant></module>'
        '<module name="b"><user>t</user><assistant>u</assistant></module></union></schema>'
    )
    assert load(text).layout.num_positions == 3 + 6


def test_an_empty_message_is_left_out() -> None:
    assert load('<schema name="s"><system/><user>a</user></schema>').layout.num_positions == 3


def test_short_texts_stand_once() -> None:
    """In Prompt Cache's code, a text that is shorter than half of its `max_tokens` stands there twice."""
    assert load('<schema name="s">one two three</schema>').layout.num_positions == 3


def own_positions(box: Box) -> list[int]:
    """The positions of its own texts and parameters."""
    own = (item for item in box.items if isinstance(item, Run | Slot))
    return [position for item in own for position in range(item.position, item.end)]


def are_alternatives(layout: Layout, one: str, other: str) -> bool:
    """Whether two modules stand in different members of a union, so that no prompt has both."""
    for path in ancestors(one):
        union = layout.union_of(path)
        members = [member.path for member in union.members] if union else []
        if any(path != member and member in ancestors(other) for member in members):
            return True
    return False


def ancestors(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[: count + 1]) for count in range(len(names))]


@settings(max_examples=30, deadline=None)
@given(children(3))
def test_positions_are_shared_only_by_alternatives(drawn: tuple[Child, ...]) -> None:
    words = Words()
    text = SchemaText(words.encode, (), PLACEHOLDER, lambda _before, role: (f" <{role}> ", " </> "), lambda _role: "")
    schema = Schema("s", Module("", tuple(without_scaffolds(drawn))))
    layout = Layout(schema, text)
    boxes = all_boxes(layout)
    for one, other in itertools.combinations(boxes, 2):
        if set(own_positions(one)) & set(own_positions(other)):
            assert are_alternatives(layout, one.path, other.path)
    for box in boxes:
        own = own_positions(box)
        assert len(set(own)) == len(own) == len(box.own_ids)


def without_scaffolds(drawn: tuple[Child, ...]) -> Iterator[Child]:
    """The children without texts in parameters, which may be longer than these."""
    for child in drawn:
        if isinstance(child, Parameter):
            yield replace(child, scaffold="")
        elif isinstance(child, Module | Turn):
            yield replace(child, children=tuple(without_scaffolds(child.children)))
        elif isinstance(child, Union):
            members = without_scaffolds(child.members)
            yield replace(child, members=tuple(one for one in members if isinstance(one, Module)))
        else:
            yield child


# ----------------------------------------------------------------------------------------------------- sources


def test_a_source_is_a_modules_own_text_wherever_the_module_stands() -> None:
    words = Words()
    one = load('<schema name="s">a b <module name="m">c d</module></schema>', words)
    other = load('<schema name="t"><module name="x">y <module name="n">c d</module></module></schema>', words)
    assert one.layout.source("m", {}) == other.layout.source("x/n", {}) == Source(words.encode("c d"))
    assert words.spell(other.layout.source("x", {}).token_ids) == "y"


def test_a_scaffold_stands_before_a_module_only_where_all_of_it_is_imported() -> None:
    words = Words()
    text = (
        '<schema name="s"><module name="a">a1 <module name="b">b1</module> a2</module>'
        '<module name="c" scaffold="a a/b">c1</module></schema>'
    )
    layout = load(text, words, opening="<s>").layout
    together, alone = layout.source("c", {"a": 0, "a/b": 0, "c": 0}), layout.source("c", {"a": 0, "c": 0})
    assert (words.spell(together.token_ids), together.begin) == ("<s> a1 a2 b1 c1", 4)
    assert (words.spell(alone.token_ids), alone.begin) == ("<s> c1", 1)
    assert [words.spell(source.token_ids) for source in layout.sources()] == [
        "<s>",
        "<s> a1 a2",
        "<s> b1",
        "<s> c1",
        "<s> a1 a2 b1 c1",
    ]


def test_what_is_not_cached_is_no_source() -> None:
    assert load(TRAITS).sources == load(TRAITS.replace(" rest </module>", " other </module>")).sources


def test_the_opening_stands_once_at_the_beginning() -> None:
    words = Words()
    layout = load('<schema name="s">a <module name="m">b</module></schema>', words, opening="<s>").layout
    assert words.spell(layout.root.own_ids) == "<s> a"
    assert layout.boxes["m"].position == 2
    assert words.spell(layout.source("m", {}).token_ids) == "<s> b"

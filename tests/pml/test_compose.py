"""Prompts: which tokens stand at which positions, what they are linked from, and what is refused. Tokens are words."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import PMLError, PMLSyntaxError, PromptError
from foreword.pml.compose import Placing, compose
from foreword.pml.composition import Composition
from foreword.pml.layout import Layout, SchemaText
from foreword.pml.library import LoadedSchema
from foreword.pml.prompt import ModulePrompt, Reference
from foreword.pml.schema import Child, Module, Schema, Text
from pml.drawn import children
from pml.test_layout import CODE, TRAITS, TRIP, ancestors, without_scaffolds
from pml.words import PLACEHOLDER, Words, library

WORDS = Words()


def load(text: str, *, opening: str = "") -> LoadedSchema:
    return library(WORDS, opening=opening).load(text)


def shown(composition: Composition) -> str:
    """Parts as `position:words`, those that can be linked in brackets."""
    parts = []
    for part in composition.parts:
        text = WORDS.spell(part.token_ids)
        parts.append(f"{part.position}:[{text}]" if part.span else f"{part.position}:{text}")
    return " ".join(parts)


def composed(schema: LoadedSchema, prompt: Any = "", **options: Any) -> str:
    return shown(schema.prompt(prompt, **options).composition)


SPACED = """<schema name="s">head
  <module name="a"> a1 a2 </module> <module name="b"> b1 b2 b3 </module> <module name="c"> c1 </module> tail
</schema>"""


def test_modules_stand_at_the_schemas_positions_and_its_own_text_is_always_there() -> None:
    schema = load(SPACED)
    assert composed(schema) == "0:[head] 7:[tail]"
    assert composed(schema, {"c": {}, "a": {}}) == "0:[head] 1:[a1 a2] 6:[c1] 7:[tail]"
    assert composed(schema, {"b": {}}, text="why") == "0:[head] 3:[b1 b2 b3] 7:[tail] 8:why"


def test_the_order_of_references_does_not_matter() -> None:
    schema = load(SPACED)
    one = schema.prompt('<prompt schema="s"><c/><a/> why </prompt>')
    assert one == schema.prompt({"a": {}, "c": {}}, text="why")
    assert one.modules == ("a", "c")
    assert WORDS.spell(one.token_ids) == "head a1 a2 c1 tail why"


def test_an_argument_takes_the_first_of_its_positions() -> None:
    schema = load('<schema name="s"><module name="m">a <parameter name="p" length="4"/> b c</module></schema>')
    assert composed(schema, {"m": {"p": "x y"}}) == "0:[a] 1:x y 5:[b c]"
    assert composed(schema, '<prompt schema="s"><m p="w x y z"/></prompt>') == "0:[a] 1:w x y z 5:[b c]"
    with pytest.raises(PromptError, match="the argument 'p' of 'm' has 5 tokens, and there is room for 4"):
        schema.prompt({"m": {"p": "v w x y z"}})


PARAMETER = '<parameter name="p" length="4" optional="true"/>'


def test_an_optional_parameter_may_stay_empty() -> None:
    text = f'<schema name="s"><module name="m">a {PARAMETER} b</module></schema>'
    assert composed(load(text), {"m": {}}) == "0:[a] 5:[b]"
    assert composed(load(text.replace("true", "false")), {"m": {"p": ""}}) == "0:[a] 5:[b]"
    with pytest.raises(PromptError, match="'m' needs an argument 'p' of up to 4 tokens; give one, or make"):
        load(text.replace("true", "false")).prompt({"m": {}})


def after_arguments(recompute: str, **argument: str) -> list[int]:
    text = f"""<schema name="s"><module name="m">
      a <parameter name="p" length="2" optional="true" recompute="{recompute}"/>
      b c <parameter name="q" length="1" optional="true" recompute="none"/>
      d <module name="n">e</module> f</module></schema>"""
    composition = load(text).prompt({"m": {**argument, "n": {}}}).composition
    return [part.num_after_argument for part in composition.parts if part.span]


@pytest.mark.parametrize("argument", [{}, {"p": "x"}])
def test_the_text_after_a_parameter_has_seen_placeholders(argument: dict[str, str]) -> None:
    assert after_arguments("run", **argument) == [0, 2, 0, 0, 0]
    assert after_arguments("module", **argument) == [0, 2, 1, 0, 1]
    assert after_arguments("none", **argument) == [0, 0, 0, 0, 0]


def test_nested_modules_bring_those_around_them() -> None:
    schema = load(TRIP)
    expected = "0:[We travel for] 3:3 days 6:[and] 7:[go far:] 9:[old Rome] 14:[together.] 15:Where?"
    nested = {"plan": {"duration": "3 days", "abroad": {"rome": {}}}}
    assert composed(schema, nested, text="Where?") == expected
    for references in (
        '<plan duration="3 days"><abroad><rome/></abroad></plan>',
        '<use module="plan" duration="3 days"/><use module="plan/abroad/rome"/>',
    ):
        assert composed(schema, f'<prompt schema="trip">{references}Where?</prompt>') == expected


def test_spans_name_the_tokens_of_their_source() -> None:
    schema = load(TRIP, opening="<s>")
    composition = schema.prompt({"plan": {"duration": "3 days", "home": {"city": "Rome"}}}).composition
    spans = [part.span for part in composition.parts if part.span]
    assert [(span.source.name, span.begin, span.end) for span in spans] == [
        ("", 0, 1),
        ("plan", 1, 4),
        ("plan", 7, 8),
        ("plan/home", 1, 3),
        ("plan/home", 5, 7),
        ("plan", 8, 9),
    ]
    assert WORDS.spell(spans[1].source.token_ids) == "<s> We travel for <unk> <unk> <unk> and together."


def test_what_is_not_cached_is_computed_in_its_place() -> None:
    assert composed(load(TRAITS), {"E": {}, "rest": {}}) == "0:[Traits] 1:[E] 4:[and] 5:rest"


def test_first_k_is_told_with_each_span() -> None:
    schema = load('<schema name="s">a <module name="m" recompute="first-3">b</module></schema>')
    assert [part.first_k for part in schema.prompt({"m": {}}).composition.parts] == [None, 3]


# ----------------------------------------------------------------------------------------------------- texts

ROOM = """<schema name="s">
<module name="a">{}</module><module name="gap">{}</module><module name="c"> c </module></schema>"""


def room() -> LoadedSchema:
    return load(ROOM.format("a " * 50, "g " * 60))


def with_text(num_tokens: int, options: str = "") -> str:
    return f'<prompt schema="s"{options}><a/>{"x " * num_tokens}<c/></prompt>'


def test_text_after_a_module_takes_the_positions_up_to_the_next_one() -> None:
    parts = room().prompt(with_text(60)).composition.parts
    assert [(part.position, part.end) for part in parts] == [(0, 50), (50, 110), (110, 111)]


def test_text_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        PromptError,
        match=r"<prompt>:1:24: the text after module 'a' has 61 tokens, and 60 fit before module 'c'; .*\"shift\"",
    ):
        room().prompt(with_text(61))


def test_text_that_does_not_fit_moves_the_next_module_if_the_prompt_says_so() -> None:
    for prompt in (
        room().prompt(with_text(61), positions="shift"),
        room().prompt(with_text(61, ' positions="shift"')),
    ):
        assert [part.position for part in prompt.composition.parts] == [0, 50, 111]
    assert [part.position for part in room().prompt(with_text(1), positions="shift").composition.parts] == [0, 50, 110]


def test_dense_positions_are_indices() -> None:
    composition = room().prompt(with_text(3), positions="dense").composition
    assert [part.position for part in composition.parts] == [0, 50, 53]
    assert not composition.has_gaps


def test_trailing_text_stands_after_the_last_part_or_after_the_schema() -> None:
    assert composed(room(), {"a": {}}, text="x").endswith(" 50:x")
    assert composed(room(), {"a": {}}, text="x", trailing="schema").endswith(" 111:x")
    assert composed(room(), '<prompt schema="s" trailing="schema"><a/>x</prompt>').endswith(" 111:x")
    assert composed(room(), {"a": {}}, text="x", trailing="schema", positions="dense").endswith(" 50:x")


def test_text_before_the_first_module_needs_room_too() -> None:
    schema = load(SPACED)
    assert composed(schema, '<prompt schema="s">x y <b/></prompt>') == "0:[head] 1:x y 3:[b1 b2 b3] 7:[tail]"
    with pytest.raises(PromptError, match="the text at the beginning has 3 tokens, and 2 fit before module 'b'"):
        schema.prompt('<prompt schema="s">x y z <b/></prompt>')


@pytest.mark.parametrize("inner", ["<c/> x <a/>", "<c/><user>x</user><a/>", "<user>x <c/><a/></user>", "x <c/><a/>"])
def test_text_between_references_that_go_back_has_no_place(inner: str) -> None:
    with pytest.raises(PromptError, match=r"<prompt>:1:..: the module 'a' stands earlier in the schema"):
        load(SPACED).prompt(f'<prompt schema="s">{inner}</prompt>')


def test_literal_text_keeps_its_white_space_only_where_it_is_told_to() -> None:
    tokens = (
        load('<schema name="s"/>').prompt('<prompt schema="s"> a <text> b </text><!-- c --> d\n</prompt>').token_ids
    )
    assert WORDS.spell(tokens) == "a b d"


# -------------------------------------------------------------------------------------------------- messages


def test_a_message_after_the_schemas_messages_opens_the_answer() -> None:
    expected = (
        "0:[<system> Read files. </system> <user> Here they are.] 11:[class Map: ...] "
        "14:[</user> <assistant> I have read them. </assistant>] 21:<user> Write. </user> <assistant>"
    )
    assert composed(load(CODE), '<prompt schema="code"><map.py/><user> Write. </user></prompt>') == expected
    assert composed(load(CODE), {"map.py": {}}, messages={"user": "Write."}) == expected


def test_a_conversation_that_ends_with_the_users_message_opens_the_answer() -> None:
    schema = load('<schema name="s"><user>a <module name="m">b</module></user></schema>')
    assert composed(schema, {"m": {}}) == "0:[<user> a] 2:[b] 3:[</user>] 4:<assistant>"
    assert composed(schema, {"m": {}}, text="c").endswith(" 4:c")
    closed = load('<schema name="s"><user>a</user><assistant>b</assistant></schema>')
    assert composed(closed) == "0:[<user> a </user> <assistant> b </assistant>]"


def test_a_message_may_stand_around_references() -> None:
    schema = load('<schema name="s"><module name="a">a1 a2</module><module name="b">b1</module></schema>')
    prompt = '<prompt schema="s" positions="shift"><user>Read <b/> and say.</user></prompt>'
    assert composed(schema, prompt) == "0:<user> Read 2:[b1] 3:and say. </user> <assistant>"
    with pytest.raises(PromptError, match="has 2 tokens, and 0 fit before module 'a'"):
        schema.prompt('<prompt schema="s"><user>Read <a/></user></prompt>')


def test_the_template_is_told_which_message_came_before() -> None:
    schema = load(
        '<schema name="s"><user>q</user><module name="m"><assistant>r</assistant><user>t</user></module></schema>'
    )
    assert composed(schema, messages={"assistant": "r"}).endswith(" 3:<assistant> r </assistant>")
    with pytest.raises(PromptError, match="<user> cannot be written: two user messages"):
        schema.prompt({}, messages={"user": "again"})
    with pytest.raises(PromptError, match="<user> cannot be written: two user messages"):
        schema.prompt({"m": {}}, messages={"user": "again"})


# ------------------------------------------------------------------------------------------------- what is wrong

BAD: dict[str, tuple[str, str, type[PMLError], str]] = {
    "another schema": (
        SPACED,
        '<prompt schema="t"/>',
        PromptError,
        "1:1: the prompt is for schema 't', and this one is 's'",
    ),
    "no schema": (SPACED, "<prompt/>", PMLSyntaxError, '1:1: <prompt> lacks schema="..."'),
    "another root": (SPACED, "<schema/>", PMLSyntaxError, "the outer tag is <schema>"),
    "an unknown module": (
        SPACED,
        '<prompt schema="s">\n<d/></prompt>',
        PromptError,
        "2:1: the schema has no module 'd'; it has",
    ),
    "a likely module": (
        TRIP,
        '<prompt schema="trip"><rome/></prompt>',
        PromptError,
        "the schema has no module 'rome'; there is 'plan/abroad/rome'",
    ),
    "a module in a wrong place": (
        TRIP,
        '<prompt schema="trip"><plan duration="x"><rome/></plan></prompt>',
        PromptError,
        "no module 'plan/rome'; there is 'plan/home'",
    ),
    "the root": (SPACED, '<prompt schema="s"><use module=""/></prompt>', PromptError, "no module ''"),
    "a use of nothing": (SPACED, '<prompt schema="s"><use/></prompt>', PMLSyntaxError, '<use> lacks module="..."'),
    "an unknown parameter": (
        SPACED,
        '<prompt schema="s"><a q="1"/></prompt>',
        PromptError,
        "'a' has no parameter 'q'; it has none",
    ),
    "a module twice": (
        SPACED,
        '<prompt schema="s"><a/>\n<a/></prompt>',
        PromptError,
        "2:1: the module 'a' is imported twice",
    ),
    "two of a union": (
        TRAITS,
        '<prompt schema="traits"><E/><EI/></prompt>',
        PromptError,
        "'E' and 'EI' are members of one union; import one",
    ),
    "text in a reference": (
        SPACED,
        '<prompt schema="s"><a>\n x</a></prompt>',
        PromptError,
        "1:23: text stands inside of module 'a'",
    ),
    "a tag in a text": (
        SPACED,
        '<prompt schema="s"><text><a/></text></prompt>',
        PMLSyntaxError,
        "<a> stands in <text>",
    ),
    "a message in a message": (
        SPACED,
        '<prompt schema="s"><user><user>x</user></user></prompt>',
        PromptError,
        "<user> stands in another message",
    ),
    "positions": (
        SPACED,
        '<prompt schema="s" positions="any"/>',
        PromptError,
        "positions='any' is unknown; use schema or",
    ),
    "a DOCTYPE": (SPACED, "<!DOCTYPE prompt><prompt/>", PMLSyntaxError, "DOCTYPE and entities are refused"),
    "a schema that is only half a prompt": (
        SPACED,
        '<prompt schema="s"><a></prompt>',
        PMLSyntaxError,
        "mismatched tag",
    ),
}


@pytest.mark.parametrize(("schema", "prompt", "error", "message"), BAD.values(), ids=BAD)
def test_a_wrong_prompt_is_refused_at_its_place(schema: str, prompt: str, error: type[PMLError], message: str) -> None:
    loaded = load(schema)
    with pytest.raises(
        error, match=f"<prompt>:.*{message}" if ":" not in message[:3] else f"<prompt>:{message}"
    ) as raised:
        loaded.prompt(prompt)
    assert raised.value.file == "<prompt>"
    assert raised.value.line > 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["a"], {}, "modules=.* is no mapping"),
        ({"a": "x"}, {}, "the module 'a' is given 'x'; give a mapping"),
        ({"a": None}, {}, "the module 'a' is given None"),
        ({5: {}}, {}, "5 is no name of a module"),
        ({"a": {"b": {}}}, {}, "no module 'a/b'"),
        ({}, {"text": 5}, "text=5 is no text"),
        ({}, {"messages": {"tool": "x"}}, "messages have 'tool': 'x'; give texts by role"),
        ({}, {"messages": {"user": 5}}, "messages have 'user': 5"),
        ({}, {"messages": ["x"]}, "messages=.* is no mapping"),
        ({}, {"positions": "any"}, "positions='any' is unknown; use schema or shift or dense"),
        ({}, {"trailing": "first"}, "trailing='first' is unknown; use last or schema"),
        ("<prompt schema='s'/>", {"text": "x"}, "text or messages are given beside a PML text"),
        ("hello", {}, "<prompt>:1:1: .*syntax error"),
    ],
)
def test_a_wrong_prompt_from_python_names_the_value(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PMLError, match=message):
        load(SPACED).prompt(arguments, **options)


def test_modules_that_hold_themselves_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(PromptError, match="nested deeper than 32"):
        load(SPACED).prompt(endless)


def test_modules_that_are_left_out_have_no_influence() -> None:
    """Nothing of a prompt changes if the texts of other modules are replaced by as many other words."""
    one, other = load(SPACED), load(SPACED.replace("b1 b2 b3", "x y z"))
    assert one.prompt({"a": {}}) == other.prompt({"a": {}})


@settings(max_examples=20, deadline=None)
@given(children(3), st.randoms(use_true_random=False))
def test_a_prompt_has_the_same_tokens_wherever_its_parts_stand(drawn: tuple[Child, ...], random: Random) -> None:
    text = SchemaText(WORDS.encode, (), PLACEHOLDER, lambda _before, role: (f" <{role}> ", " </> "), lambda _role: "")
    layout = Layout(Schema("s", Module("", tuple(without_scaffolds(drawn)))), text)
    unions = [union for path in layout.boxes if (union := layout.union_of(path)) is not None]
    left_out = {member.path for union in unions for member in union.members[1:]}
    chosen: dict[str, Reference] = {}
    for path, box in layout.boxes.items():
        if path and path not in left_out and {*ancestors(path)[:-1]} <= set(chosen) and random.random() < 0.7:
            chosen[path] = Reference(path, dict.fromkeys(box.slots, "x"))
    prompt = ModulePrompt((*chosen.values(), Text("end")))
    shifted, dense = (compose(layout, prompt, Placing(positions)) for positions in ("shift", "dense"))
    assert shifted == compose(layout, prompt)  # nothing but the end is inserted, so nothing has to move
    assert shifted.token_ids.tolist() == dense.token_ids.tolist()
    assert not dense.has_gaps
    assert [part.span for part in shifted.parts] == [part.span for part in dense.parts]

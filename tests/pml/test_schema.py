"""The language of schemas: what it reads, what it refuses and where; it reads what is written of any schema."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import pytest
from hypothesis import given, settings

from foreword.errors import PMLError, PMLSyntaxError, SchemaError
from foreword.pml.library import load_schema
from foreword.pml.markup import MAX_BYTES, Place
from foreword.pml.schema import Child, Module, Parameter, Schema, Text, Turn, Union, read_schema
from pml.drawn import children


def no_files(name: str, place: Place) -> str:
    raise AssertionError(f"{name} is read")


def read(text: str) -> Schema:
    return read_schema(text, "x", no_files)


def test_a_schema_is_read_as_it_is_written() -> None:
    schema = read(
        """<!-- before --><schema name="trip" version="1">
          <system>Be brief.</system>
          Text <!-- not this --> of all.
          <module name="plan" cache="false" recompute="first-8">
            For <parameter name="days" length="3" scaffold="a b" optional="true" recompute="module"/> days
            <union scaffold="rome">
              <module name="rome" recompute="none">Rome</module>
              <module name="oslo.no" scaffold="" />
            </union>
          </module>
          <module name="late" scaffold="plan/rome  plan" recompute="all">x</module>
        </schema>"""
    )
    days = Parameter("days", 3, "a b", is_optional=True, recomputed="module")
    rome = Module("rome", (Text("Rome"),), first_k=0)
    union = Union((rome, Module("oslo.no")), "rome")
    plan = Module("plan", (Text(" For "), days, Text(" days "), union), is_cached=False, first_k=8)
    late = Module("late", (Text("x"),), is_cached=False, scaffold=("plan/rome", "plan"))
    text = Text(" Text  of all. ")
    assert schema == Schema("trip", Module("", (Turn("system", (Text("Be brief."),)), text, plan, late)))
    assert [path for path, *_ in schema.modules()] == ["plan", "plan/rome", "plan/oslo.no", "late"]


def test_white_space_at_the_ends_of_a_text_is_one_space_and_inside_it_stays() -> None:
    schema = read('<schema name="s"><module name="m">\n\n  def f():\n    return 1\n  </module>\n</schema>')
    assert schema.root.children == (Module("m", (Text(" def f():\n    return 1 "),)),)


def test_a_message_has_no_white_space_at_its_ends() -> None:
    schema = read('<schema name="s"><user>\n  Read <module name="m"> this </module>\n now.\n</user></schema>')
    assert schema.root.children == (Turn("user", (Text("Read "), Module("m", (Text(" this "),)), Text(" now."))),)


def test_preserved_white_space_stays_until_an_element_says_otherwise() -> None:
    schema = read(
        '<schema name="s" xml:space="preserve">\n<module name="m">  x\n</module>'
        '<module name="n" xml:space="default">  x\n</module></schema>'
    )
    assert schema.root.children == (Text("\n"), Module("m", (Text("  x\n"),)), Module("n", (Text(" x "),)))


def schema_of(inner: str) -> str:
    return f'<schema name="s">\n{inner}</schema>'


BAD: dict[str, tuple[str, type[PMLError], str]] = {
    "another root": ("<prompt/>", PMLSyntaxError, "x:1:1: the outer tag is <prompt>"),
    "no name": ("<schema/>", PMLSyntaxError, 'x:1:1: <schema> lacks name="..."'),
    "another version": ('<schema name="s" version="2"/>', PMLSyntaxError, "version='2' is unknown"),
    "an unknown tag": (schema_of("<import/>"), PMLSyntaxError, "x:2:1: <import> is not a tag of schemas"),
    "xinclude": (schema_of('<xi:include href="/etc/passwd"/>'), PMLSyntaxError, "<xi:include> is not a tag"),
    "an unknown attribute": (
        schema_of('<module name="m" pin="1"/>'),
        PMLSyntaxError,
        "x:2:1: <module> has an unknown attribute 'pin'; it may have: cache, name, recompute, scaffold, src, xml:space",
    ),
    "a module without name": (schema_of("<module/>"), PMLSyntaxError, 'x:2:1: <module> lacks name="..."'),
    "a name that is none": (schema_of('<module name="a b"/>'), SchemaError, "x:2:1: name='a b' is no name"),
    "a name that is a path": (schema_of('<module name="a/b"/>'), SchemaError, "name='a/b' is no name"),
    "siblings": (
        schema_of('<module name="m"/>\n<union><module name="m"/></union>'),
        SchemaError,
        "x:3:8: the module 'm' is also in line 2; give each its own name",
    ),
    "siblings in a message": (
        schema_of('<module name="m"/>\n<user><module name="m"/></user>'),
        SchemaError,
        "x:3:7: the module 'm' is also in line 2",
    ),
    "members": (schema_of('<union><module name="m"/><module name="m"/></union>'), SchemaError, "'m' is also in line 2"),
    "an empty union": (schema_of("<union> </union>"), SchemaError, "x:2:1: the union has no members"),
    "text in a union": (schema_of('<union>or <module name="m"/></union>'), SchemaError, "x:2:8: text stands between"),
    "a union in a union": (schema_of("<union><union/></union>"), SchemaError, "<union> stands in a union"),
    "a union's unknown scaffold": (
        schema_of('<union scaffold="n"><module name="m"/></union>'),
        SchemaError,
        "scaffold='n' is no member of this union; it has: m",
    ),
    "a parameter in the root": (
        schema_of('<parameter name="p" length="1"/>'),
        SchemaError,
        "x:2:1: a parameter stands",
    ),
    "a parameter in a message": (schema_of('<user><parameter name="p" length="1"/></user>'), SchemaError, "outside"),
    "a parameter without length": (
        schema_of('<module name="m">\n <parameter name="p"/></module>'),
        PMLSyntaxError,
        'x:3:2: <parameter> lacks length="..."',
    ),
    "no length": (schema_of('<module name="m"><parameter name="p" length="0"/></module>'), SchemaError, "length='0'"),
    "a long length": (
        schema_of('<module name="m"><parameter name="p" length="9999999"/></module>'),
        SchemaError,
        "length='9999999' is no number of tokens; give one from 1 to 1,048,576",
    ),
    "a length in other digits": (
        schema_of('<module name="m"><parameter name="p" length="٣"/></module>'),
        SchemaError,
        "is no number of tokens",
    ),
    "parameters": (
        schema_of('<module name="m"><parameter name="p" length="1"/>\n<parameter name="p" length="1"/></module>'),
        SchemaError,
        "x:3:1: the parameter 'p' is also in line 2",
    ),
    "text in a parameter": (
        schema_of('<module name="m"><parameter name="p" length="1">x</parameter></module>'),
        PMLSyntaxError,
        "a parameter holds nothing",
    ),
    "a message in a message": (schema_of("<user><system>x</system></user>"), SchemaError, "x:2:7: <system> stands in"),
    "a message in a module in a message": (
        schema_of('<user><module name="m"><user>x</user></module></user>'),
        SchemaError,
        "stands in another message",
    ),
    "cache": (schema_of('<module name="m" cache="no"/>'), SchemaError, "cache='no' is neither"),
    "recompute": (schema_of('<module name="m" recompute="first"/>'), SchemaError, "recompute='first' is unknown"),
    "recompute of a parameter": (
        schema_of('<module name="m"><parameter name="p" length="1" recompute="all"/></module>'),
        SchemaError,
        "recompute='all' is unknown; use none, run, module",
    ),
    "a scaffold that comes later": (
        schema_of('<module name="m" scaffold="n"/><module name="n"/>'),
        SchemaError,
        "scaffold='n' names no module before 'm'",
    ),
    "a scaffold around the module": (
        schema_of('<module name="m"><module name="n" scaffold="m"/></module>'),
        SchemaError,
        "scaffold='m' names no module before 'm/n' and beside it",
    ),
    "white space": (schema_of('<module name="m" xml:space="keep"/>'), PMLSyntaxError, "xml:space='keep' is unknown"),
    "too many modules": (
        schema_of("".join(f'<module name="m{n}"/>' for n in range(4097))),
        SchemaError,
        "more than 4,096 modules",
    ),
}


@pytest.mark.parametrize(("text", "error", "message"), BAD.values(), ids=BAD)
def test_a_wrong_schema_is_refused_at_its_place(text: str, error: type[PMLError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        read(text)
    assert type(raised.value) is error
    assert raised.value.file == "x"
    assert raised.value.line > 0
    assert raised.value.column > 0


# ------------------------------------------------------------------------------------------------------ files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "texts"
    inside.mkdir()
    (inside / "rome.txt").write_text("Rome\r\nis old.\n")
    (inside / "large.txt").write_text("x" * MAX_BYTES)
    (inside / "latin.txt").write_bytes(b"\xe4")
    (tmp_path / "secret.txt").write_text("secret")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    (inside / "near.txt").symlink_to(inside / "rome.txt")
    return inside


def with_src(name: str) -> str:
    return f'<schema name="s">\n <module name="m" src="{name}"> It is <module name="n"/></module></schema>'


@pytest.mark.parametrize("name", ["rome.txt", "near.txt"])
def test_the_text_of_a_file_stands_before_that_of_its_module(folder: Path, name: str) -> None:
    schema = load_schema(with_src(name), folder)
    assert schema.root.children == (Module("m", (Text("Rome\nis old.  It is "), Module("n"))),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.txt", "leaves the folder"),
        ("a/../../secret.txt", "leaves the folder"),
        ("/etc/passwd", "leaves the folder"),
        ("./rome.txt", "leaves the folder"),
        ("", "leaves the folder"),
        ("..\\secret.txt", "leaves the folder"),
        ("file:secret.txt", "leaves the folder"),
        ("link.txt", "is a link out of the folder"),
        ("none.txt", "cannot be read: No such file"),
        ("latin.txt", "is not UTF-8"),
        ("large.txt", "may have 4,194,304 bytes"),
        ("n" * 300, "cannot be read: File name too long"),
    ],
)
def test_a_file_outside_or_unreadable_is_refused_at_the_module(folder: Path, name: str, message: str) -> None:
    with pytest.raises(PMLError, match=rf"<schema>:2:2: src=.*{message}") as raised:
        load_schema(with_src(name), folder)
    assert "secret" not in str(raised.value).replace("secret.txt", "")


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(PMLError, match=r"<schema>:2:2: src='rome.txt' needs a folder; give --include"):
        load_schema(with_src("rome.txt"))
    with pytest.raises(PMLError, match="is no folder"):
        load_schema(with_src("rome.txt"), folder / "rome.txt")


def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PMLError, match=r"trip.pml: the file .* cannot be read: No such file"):
        load_schema(tmp_path / "trip.pml")
    with pytest.raises(PMLError, match="is not a regular file"):
        load_schema(tmp_path)
    with pytest.raises(PMLError, match="5 is neither a path nor a text of PML"):
        load_schema(5)  # type: ignore[arg-type]
    (tmp_path / "trip.pml").write_text("<schema name='s'>\n<b/></schema>")
    with pytest.raises(PMLSyntaxError, match=r"trip.pml:2:1: <b> is not a tag"):
        load_schema(str(tmp_path / "trip.pml"))


# ------------------------------------------------------------------------------------------------- round trip


def write_schema(schema: Schema) -> str:
    """A schema as XML that reads as the same schema; the texts of files are in it."""
    inner = "".join(map(_written, schema.root.children))
    return f'<schema name={quoteattr(schema.name)} xml:space="preserve">{inner}</schema>\n'


def _written(child: Child) -> str:
    if isinstance(child, Text):
        return escape(child.text, {"\r": "&#13;"})
    if isinstance(child, Parameter):
        optional = ' optional="true"' if child.is_optional else ""
        scaffold = f" scaffold={quoteattr(child.scaffold)}" if child.scaffold else ""
        rest = f'{scaffold}{optional} recompute="{child.recomputed}"'
        return f'<parameter name={quoteattr(child.name)} length="{child.length}"{rest}/>'
    if isinstance(child, Union):
        scaffold = f" scaffold={quoteattr(child.scaffold)}" if child.scaffold else ""
        return f"<union{scaffold}>{''.join(map(_written, child.members))}</union>"
    inner = "".join(map(_written, child.children))
    if isinstance(child, Turn):
        return f"<{child.role}>{inner}</{child.role}>"
    cache = "" if child.is_cached else ' cache="false"'
    scaffold = f" scaffold={quoteattr(' '.join(child.scaffold))}" if child.scaffold else ""
    recompute = "" if child.first_k is None else f' recompute="{f"first-{child.first_k}" if child.first_k else "none"}"'
    return f"<module name={quoteattr(child.name)}{cache}{scaffold}{recompute}>{inner}</module>"


@settings(max_examples=30, deadline=None)
@given(children(3))
def test_a_schema_reads_as_it_was_before_it_was_written(drawn: tuple[Child, ...]) -> None:
    schema = Schema("s", Module("", drawn))
    assert read(write_schema(schema)) == schema


def test_a_scaffold_and_a_union_are_written_too() -> None:
    union = Union((Module("a", (Text("x"),)), Module("b")), "a")
    schema = Schema("s", Module("", (union, Module("c", scaffold=("a", "b")))))
    assert read(write_schema(schema)) == schema

"""Markup: places in files, and what is refused before it costs anything."""

from __future__ import annotations

import pytest

from foreword.errors import PMLSyntaxError
from foreword.pml.markup import MAX_BYTES, MAX_DEPTH, MAX_ELEMENTS, Element, TextNode, parse


def test_elements_and_texts_know_their_places() -> None:
    root = parse('<a>\n  one\n  <b c="d"/>zwölf<e/></a>', "x.pml")
    text, b, twelve, e = root.children
    assert isinstance(text, TextNode)
    assert isinstance(twelve, TextNode)
    assert isinstance(b, Element)
    assert isinstance(e, Element)
    assert (text.text, text.place.line, text.place.column) == ("\n  one\n  ", 1, 4)
    assert (b.place.line, b.place.column, dict(b.attributes)) == (3, 3, {"c": "d"})
    assert twelve.text == "zwölf"
    assert (e.place.line, e.place.column) == (3, 18)


def test_comments_cdata_instructions_and_entities_are_only_their_text() -> None:
    root = parse("<a>one <!-- no <b> --> two<?do it?> &lt;b&gt; &#65; <![CDATA[<c> & ]]>end</a>", "x")
    (node,) = root.children
    assert isinstance(node, TextNode)
    assert node.text == "one  two <b> A <c> & end"


BOMB = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;">]><a>&c;</a>'
BAD: dict[str, tuple[str | bytes, str]] = {
    "an unclosed tag": ("<a>\n  <b>\n</a>", r"x:3:3: .*not well-formed XML: mismatched tag"),
    "nothing": ("", r"x:1:1: .*no element found"),
    "text alone": ("hello", r"x:1:1: "),
    "two roots": ("<a/><b/>", r"x:1:5: .*junk after document element"),
    "an attribute twice": ('<a b="1" b="2"/>', "duplicate attribute"),
    "an unknown entity": ("<a>&nbsp;</a>", r"x:1:4: .*undefined entity"),
    "a bare ampersand": ("<a>R & D</a>", "write &lt; and &amp;"),
    "a DOCTYPE": ("<!DOCTYPE a><a/>", r"x:1:\d+: DOCTYPE and entities are refused"),
    "a billion laughs": (BOMB, "DOCTYPE and entities are refused"),
    "an external entity": ('<!DOCTYPE a [<!ENTITY b SYSTEM "/etc/passwd">]><a>&b;</a>', "DOCTYPE and entities"),
    "an external DTD": ('<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd"><a/>', "DOCTYPE and entities are refused"),
    "a parameter entity": ('<!DOCTYPE a [<!ENTITY % b "c">%b;]><a/>', "DOCTYPE and entities are refused"),
    "another encoding": (b'<?xml version="1.0" encoding="ISO-8859-1"?><a>a</a>', "the encoding is ISO-8859-1; save"),
    "bytes that are not UTF-8": (b"<a>\n\xe4</a>", "x:2:1: 0xe4 is not UTF-8; save it as UTF-8"),
    "UTF-16": ("<a/>".encode("utf-16"), "x:1:1: 0xff is not UTF-8"),
    "half of a character": ("<a>\ud800</a>", "x:1:4: 0xed is not UTF-8"),
    "a control character": ("<a>\x01</a>", "not well-formed XML"),
    "too many bytes": ("<a>" + "x" * MAX_BYTES + "</a>", "x: the text has 4,194,311 bytes, and may have 4,194,304"),
    "too deep": ("<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1), r"x:1:97: <a> is nested deeper than 32 tags"),
    "too many tags": ("<a>" + "<b/>" * MAX_ELEMENTS + "</a>", "more than 16,384 tags"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_what_is_not_plain_xml_is_refused_at_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(PMLSyntaxError, match=message):
        parse(text, "x")


def test_the_deepest_and_the_largest_that_are_allowed_are_read() -> None:
    parse("<a>" * MAX_DEPTH + "</a>" * MAX_DEPTH, "x")
    lines = "line\n" * ((MAX_BYTES - 7) // 5)
    (node,) = parse(f"<a>{lines}</a>", "x").children
    assert isinstance(node, TextNode)
    assert node.text == lines


def test_a_byte_order_mark_is_no_text() -> None:
    assert parse(b"\xef\xbb\xbf<a/>", "x").tag == "a"

"""Markup: parses XML into elements and texts, each with its place in the file.

Declarations are refused, so a text can neither define entities nor name other files. Comments and processing
instructions are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from foreword.errors import PMLError, PMLSyntaxError

MAX_BYTES = 4 << 20
"""The most bytes of a file, together with the files that it includes."""
MAX_DEPTH = 32
MAX_ELEMENTS = 16_384


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text. Line and column count from 1; line 0 stands for no text."""

    file: str = ""
    line: int = 0
    column: int = 0

    def error(self, kind: type[PMLError], message: str) -> PMLError:
        """Make an error that names this place; the caller raises it."""
        return kind(message, self.file, self.line, self.column)


@dataclass(slots=True)
class TextNode:
    """Text between two tags, as it was written, without comments."""

    pieces: list[str]
    place: Place

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Element:
    """A tag with its attributes and its children."""

    tag: str
    attributes: Mapping[str, str]
    place: Place
    children: list[Element | TextNode] = field(default_factory=list)

    def checked(self, kind: type[PMLError], allowed: frozenset[str], required: frozenset[str] = frozenset()) -> None:
        """Raise an error of this kind if an attribute is not allowed, or if a required attribute is missing."""
        for name in self.attributes:
            if name not in allowed:
                names = ", ".join(sorted(allowed)) or "none"
                raise self.place.error(kind, f"<{self.tag}> has an unknown attribute {name!r}; it may have: {names}")
        for name in sorted(required):
            if name not in self.attributes:
                raise self.place.error(kind, f'<{self.tag}> lacks {name}="..."; add it')


def parse(text: str | bytes, file: str) -> Element:
    """Parse an XML text in UTF-8, and return its root element. Errors name the text `file`. Raises PMLSyntaxError."""
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(content) > MAX_BYTES:
        raise PMLSyntaxError(f"the text has {len(content):,} bytes, and may have {MAX_BYTES:,}; split it", file)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise PMLSyntaxError(
            f"{content[error.start]:#04x} is not UTF-8; save it as UTF-8", file, line, column
        ) from error
    return _Reader(file).read(content.removeprefix(b"\xef\xbb\xbf"))


class _Reader:
    """Builds elements from expat's events."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._open: list[Element] = []
        self._root: Element | None = None
        self._num_elements = 0
        self._parser = parser = expat.ParserCreate("utf-8")
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.XmlDeclHandler = self._declaration
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = self._doctype
        parser.ExternalEntityRefHandler = self._external

    def read(self, content: bytes) -> Element:
        try:
            self._parser.Parse(content, True)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            raise PMLSyntaxError(
                f"this is not well-formed XML: {reason}; close every tag, and write &lt; and &amp; for < and &",
                self._file,
                error.lineno,
                error.offset + 1,
            ) from error
        assert self._root is not None  # without an element, expat raises an error
        return self._root

    @property
    def _place(self) -> Place:
        return Place(self._file, self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        place = self._place
        self._num_elements += 1
        if len(self._open) == MAX_DEPTH:
            raise place.error(PMLSyntaxError, f"<{tag}> is nested deeper than {MAX_DEPTH} tags; nest less")
        if self._num_elements > MAX_ELEMENTS:
            raise place.error(PMLSyntaxError, f"there are more than {MAX_ELEMENTS:,} tags; split the file")
        element = Element(tag, attributes, place)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, _tag: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        children = self._open[-1].children
        if children and isinstance(children[-1], TextNode):
            children[-1].pieces.append(text)
        else:
            children.append(TextNode([text], self._place))

    def _declaration(self, _version: str, encoding: str | None, _standalone: int) -> None:
        if encoding is not None and encoding.lower() not in ("utf-8", "utf8", "us-ascii"):
            raise self._place.error(PMLSyntaxError, f"the encoding is {encoding}; save the file as UTF-8")

    def _external(self, *_declared: object) -> int:
        self._doctype()
        return 0

    def _doctype(self, *_declared: object) -> None:
        raise self._place.error(
            PMLSyntaxError, "DOCTYPE and entities are refused; write the text itself, and &lt; for <"
        )

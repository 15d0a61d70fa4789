"""Reads one call from its opening marker to its closing marker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from foreword.request import ToolCall as Call
from foreword.text.reply.arguments import (
    as_json,
    beginning_at,
    cast,
    items_of,
    properties_of,
    read_json,
    required_of,
    types_of,
)
from foreword.text.stream import overlap

_JSON_SPACE = regex.compile(r"[ \t\r\n]*")
_PLAIN = regex.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = regex.compile(r"[\w.+-]*")
_NAME = regex.compile(r"[\w-]+")
_SCALAR = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
MAX_WORD = 400
"""The most characters of a number, or of a key without quotes."""
Schemas = Mapping[str, Mapping[str, Any]]
_SPACE = regex.compile(r"\s*")
_VALUE = "(?P<value>.*?)"


class JsonScanner:
    """Scans one JSON value, an object or a list, piece by piece. `text` is the text read so far, in strict JSON."""

    def __init__(self, *, unquoted_keys: bool = False, string_delims: Sequence[Sequence[str]] = ()) -> None:
        """`string_delims`: pairs of markers; each pair begins and ends a string without escapes."""
        self.is_done = False
        self.has_failed = False
        self._unquoted_keys = unquoted_keys
        self._delims = [(opening, closing) for opening, closing in string_delims]
        self._pieces: list[str] = []
        self._open: list[str] = []
        """The brackets that are open."""
        self._expects = "value"
        """What comes next: value, first value, key, first key, colon or comma."""
        self._closing: str | None = None
        """The marker that ends the open string; None outside strings."""
        self._is_key = False
        self._word = ""

    @property
    def text(self) -> str:
        """The text read so far, as strict JSON: the whole value, or its beginning."""
        return "".join(self._pieces) + self._word

    @property
    def is_beginning(self) -> bool:
        """Whether more characters can make `text` a JSON value."""
        return not self.has_failed and (not self._word or bool(_SCALAR.fullmatch(self._word, partial=True)))

    def read(self, text: str, at: int) -> int:
        """Read from a position on; returns the position of the first character that is not read.

        This is the end of the value, the place where the text is not JSON, or the beginning of a token that is cut off.
        """
        while at < len(text) and not (self.is_done or self.has_failed):
            before = at
            at = self._read_string(text, at) if self._closing is not None else self._read_structure(text, at)
            if at == before:
                break
        return at

    def _read_string(self, text: str, at: int) -> int:
        assert self._closing is not None
        if self._closing != '"':
            return self._read_marked(text, at, self._closing)
        plain = _PLAIN.match(text, at).group()
        self._pieces.append(plain)
        at += len(plain)
        if at == len(text):
            return at
        if text[at] == '"':
            self._pieces.append('"')
            self._end_string()
            return at + 1
        if text[at] != "\\":  # a control character, which models do write into strings
            self._pieces.append(json.dumps(text[at])[1:-1])
            return at + 1
        escape = _ESCAPE.match(text, at, partial=True)
        if escape is None:
            self.has_failed = True
        elif not escape.partial:
            self._pieces.append(escape.group())
            return int(escape.end())
        return at

    def _read_marked(self, text: str, at: int, closing: str) -> int:
        end = text.find(closing, at)
        stop = end if end >= 0 else len(text) - overlap(text, closing)
        self._pieces.append(json.dumps(text[at:stop], ensure_ascii=False)[1:-1] if stop > at else "")
        if end < 0:
            return max(at, stop)
        self._pieces.append('"')
        self._end_string()
        return end + len(closing)

    def _end_string(self) -> None:
        self._closing = None
        self._expects = "colon" if self._is_key else "comma"

    def _read_structure(self, text: str, at: int) -> int:
        if self._word or text[at].isalnum() or text[at] in "-_":
            return self._read_word(text, at)
        space = _JSON_SPACE.match(text, at).group()
        if space:
            self._pieces.append(space)
            return at + len(space)
        for opening, closing in (*self._delims, ('"', '"')):
            if text.startswith(opening, at):
                return self._begin_string(at + len(opening), closing)
            if opening.startswith(text[at:]):
                return at
        return self._read_mark(text, at)

    def _begin_string(self, at: int, closing: str) -> int:
        self._is_key = self._expects in ("key", "first key")
        self.has_failed = not self._open or self._expects in ("colon", "comma")
        self._closing = closing
        self._pieces.append('"')
        return at

    def _read_mark(self, text: str, at: int) -> int:
        """Read a bracket, a comma or a colon."""
        mark, expects = text[at], self._expects
        if mark in "{[" and expects in ("value", "first value"):
            self._open.append(mark)
            self._expects = "first key" if mark == "{" else "first value"
        elif mark == ":" and expects == "colon":
            self._expects = "value"
        elif mark == "," and expects == "comma":
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif mark in "}]" and self._open and self._may_close(mark):
            self._open.pop()
            self.is_done, self._expects = not self._open, "comma"
        else:
            self.has_failed = True
            return at
        self._pieces.append(mark)
        return at + 1

    def _may_close(self, mark: str) -> bool:
        opening, empty = ("{", "first key") if mark == "}" else ("[", "first value")
        return self._open[-1] == opening and self._expects in (empty, "comma")

    def _read_word(self, text: str, at: int) -> int:
        """Read a number, `true`, `false`, `null` or a key without quotes."""
        word = _WORD.match(text, at).group()
        self._word += word
        is_key = self._expects in ("key", "first key")
        if not self._open or self._expects in ("colon", "comma") or len(self._word) > MAX_WORD:
            self.has_failed = True
        elif at + len(word) < len(text):  # the word is over
            right = self._unquoted_keys and _NAME if is_key else _SCALAR
            if not right or not right.fullmatch(self._word):
                self.has_failed = True
                return at + len(word)
            self._pieces.append(f'"{self._word}"' if is_key else self._word)
            self._expects, self._word = "colon" if is_key else "comma", ""
            return at + len(word) if word else self._read_structure(text, at)
        return at + len(word)


class CallBody:
    """Reads a call in a region of a reply. The region belongs to a field of a response template."""

    def __init__(self, field: Any, captures: Mapping[str, str], schemas: Schemas) -> None:
        """`captures`: the texts of the named groups in the call's opening marker."""
        self.calls: list[Call] | None = None
        """The calls in the region; None until it is closed."""
        self.has_failed = False
        """Whether the text has turned out not to be a call."""
        self._field, self._captures, self._schemas = field, captures, schemas
        self._pieces: list[str] = []

    def read(self, text: str, at: int, *, at_end: bool) -> int:
        """Read from a position on; returns the position of the first character that is not read.

        `at_end`: whether the reply ends with this text. Then a call that is cut off keeps the part that was read.
        """
        raise NotImplementedError

    def _close(self, calls: list[Call] | None) -> None:
        """Close the region with these calls; None: the text is not a call."""
        self.calls, self.has_failed = calls, calls is None


def open_body(field: Any, captures: Mapping[str, str], schemas: Schemas, *, has_marker: bool) -> CallBody:
    """Make the reader of a call in a field of a response template. `captures`: named groups of its opening marker.

    A call without an opening marker must name its arguments, because any JSON object may begin like a call.
    """
    if field.content == "json":
        return _JsonBody(field, captures, schemas, has_marker)
    pattern = field.content_args.get("tag_pattern", "")
    if field.content == "xml-inline" and pattern.count(_VALUE) == 1 and pattern.partition(_VALUE)[2]:
        return _TagBody(field, captures, schemas)
    return _OtherBody(field, captures, schemas)


# ---------------------------------------------------------------------- JSON


class _JsonBody(CallBody):
    def __init__(self, field: Any, captures: Mapping[str, str], schemas: Schemas, has_marker: bool) -> None:
        super().__init__(field, captures, schemas)
        self._has_marker, options = has_marker, field.content_args
        self._scanner = JsonScanner(
            unquoted_keys=options.get("unquoted_keys", False), string_delims=options.get("string_delims", ())
        )

    def read(self, text: str, at: int, *, at_end: bool) -> int:
        scanner = self._scanner
        at = scanner.read(text, at)
        if scanner.has_failed:
            self.has_failed = True
        elif scanner.is_done:
            end = _closed(self._field, text, at, at_end=at_end)
            if end is not None:
                self._close(None if end < 0 else self._complete())
                return max(at, end)
        elif at_end:
            self._close(self._beginning())
            return len(text)
        return at

    def _complete(self) -> list[Call] | None:
        try:
            content = read_json(self._scanner.text)
        except (ValueError, RecursionError):
            return None
        return calls_in(content, self._field, self._captures, needs_arguments=not self._has_marker)

    def _beginning(self) -> list[Call] | None:
        """The calls of a region that is cut off; None if the last call's name cannot be read."""
        text, field = self._scanner.text.lstrip(), self._field
        if not text or not self._scanner.is_beginning:
            return None
        complete: list[Call] = []
        if text[0] == "[":
            *whole, text = items_of(text) or [""]
            for item in whole:
                calls = calls_in([json.loads(item)], field, self._captures)
                if calls is None:
                    return None
                complete += calls
        function = field.transform if isinstance(field.transform, Mapping) else {}
        function = function.get("function", function)
        if not isinstance(function, Mapping):  # the JSON object itself is the function
            function = {"name": "{content.name}", "arguments": "{content.arguments}"}
        name = self._name(text, function.get("name"))
        if name is None:
            return None
        keys = _keys(function.get("arguments", "{content.arguments}"))
        arguments: str | None = text
        if keys:
            twin = {"arguments": "parameters", "parameters": "arguments"}.get(keys[-1], keys[-1])
            arguments = beginning_at(text, keys) or beginning_at(text, [*keys[:-1], twin])
        if arguments is not None and arguments.startswith('"'):  # an object that is written into a string
            arguments = _string_so_far(arguments)
        if not (arguments or self._has_marker) or (arguments and not arguments.startswith("{")):
            return None
        return [*complete, Call(name, arguments or "", False, self._captures.get("id") or None)]

    def _name(self, text: str, placeholder: Any) -> str | None:
        captured = self._captures.get(str(placeholder).strip("{}"))
        if captured:
            return captured
        name_text = beginning_at(text, _keys(placeholder))
        try:
            name = json.loads(name_text or "")
        except (ValueError, RecursionError):
            return None
        return name if isinstance(name, str) and name else None


def _string_so_far(text: str) -> str:
    """The value of a JSON string that may be cut off. If the last escape is incomplete, it is left out."""
    for end in range(len(text), max(0, len(text) - 6), -1):
        for closing in ("", '"'):
            try:
                return str(json.loads(text[:end] + closing))
            except ValueError:
                continue
    return ""


def _keys(placeholder: Any) -> list[str]:
    """The path of keys within the content for a placeholder such as `{content.name}` or `{name}`."""
    keys = str(placeholder).strip("{}").split(".")
    return keys[1:] if keys[0] == "content" else keys


# ---------------------------------------------------------- tags with values


class _TagBody(CallBody):
    """Reads values between tags. A marker inside a value does not close the call."""

    def __init__(self, field: Any, captures: Mapping[str, str], schemas: Schemas) -> None:
        super().__init__(field, captures, schemas)
        head, _, tail = field.content_args["tag_pattern"].partition(_VALUE)
        self._head, self._tail = regex.compile(head, regex.DOTALL), regex.compile(tail, regex.DOTALL)
        self._values: dict[str, str] = {}
        self._key: str | None = None

    def read(self, text: str, at: int, *, at_end: bool) -> int:
        while self.calls is None and not self.has_failed:
            before = at
            if self._key is not None:
                at = self._read_value(text, at, at_end=at_end)
            else:
                at = self._read_tag(text, at, at_end=at_end)
            if at == before:
                break
        if at_end and self.calls is None and not self.has_failed:
            self._cut_off(text[at:])
            return len(text)
        return at

    def _read_value(self, text: str, at: int, *, at_end: bool) -> int:
        match = self._tail.search(text, at) if at_end else None
        match = match or self._tail.search(text, at, partial=True)
        if match is None or match.partial or (not at_end and may_grow(match, text)):
            held = len(text) if match is None else match.start()
            self._pieces.append(text[at:held])
            return int(held)
        assert self._key is not None
        self._values[self._key] = "".join([*self._pieces, text[at : match.start()]])
        self._key, self._pieces = None, []
        return int(match.end())

    def _read_tag(self, text: str, at: int, *, at_end: bool) -> int:
        start = _SPACE.match(text, at).end()
        match = self._head.match(text, start, partial=True)
        if match is not None and (match.partial or (not at_end and may_grow(match, text))):
            return at
        if match is not None:
            self._key = match.group("key")
            return int(match.end())
        end = _closed(self._field, text, at, at_end=at_end)
        if end is None:
            return at
        self._close(None if end < 0 else self._made())
        return max(at, end)

    def _made(self) -> list[Call] | None:
        calls = calls_in(self._values, self._field, self._captures)
        if calls is None:
            return None
        schema = self._schemas.get(calls[0].name, {})
        try:
            arguments = as_json(cast(self._values, schema))
        except (ValueError, RecursionError):
            return None
        return [Call(calls[0].name, arguments, True, calls[0].id)]

    def _cut_off(self, tail: str) -> None:
        """End a call without its closing marker. The call is complete if only this marker is missing."""
        calls = self._made()
        if calls is None:
            self.has_failed = True
            return
        (call,) = calls
        schema = self._schemas.get(call.name, {})
        has_all = required_of(schema) <= set(self._values) and bool(self._values or not properties_of(schema))
        if self._key is None and not tail.strip() and has_all:
            self.calls = calls
            return
        begun = call.arguments[:-1]
        if self._key is not None and types_of(properties_of(schema).get(self._key), schema) in ([], ["string"]):
            value = as_json("".join(self._pieces))[:-1]
            begun += f"{', ' if self._values else ''}{as_json(self._key)}: {value}"
        self.calls = [Call(call.name, begun, False, call.id)]


# -------------------------------------------------------------------- others


class _OtherBody(CallBody):
    """Collects any other content. transformers reads it once its closing marker has come."""

    def read(self, text: str, at: int, *, at_end: bool) -> int:
        closing = self._field.close_re
        match = None if closing is None else closing.search(text, at, partial=not at_end)
        if match is None or (not at_end and may_grow(match, text)):
            held = len(text) if match is None else match.start()
            self._pieces.append(text[at:held])
            self.has_failed = at_end
            return int(held)
        self._pieces.append(text[at : match.start()])
        from transformers.utils.chat_parsing.content_parsers import parse_content

        try:
            content = parse_content("".join(self._pieces), self._field.content, self._field.content_args)
        except Exception:  # the content may be anything that a model wrote
            content = None
        self._close(calls_in(content, self._field, self._captures, self._schemas))
        return int(match.end())


# -------------------------------------------------------------------- shared


def may_grow(match: Any, text: str) -> bool:
    """Whether more text may make a match longer, or show that it is not a match."""
    return match.partial or match.re.fullmatch(text, match.start(), partial=True) is not None


def _closed(field: Any, text: str, at: int, *, at_end: bool) -> int | None:
    """The position after the closing marker if it comes next; -1 if other text comes next; None if not clear yet."""
    if field.close_re is None:
        return at
    start = _SPACE.match(text, at).end()
    for begin in dict.fromkeys((at, start)):
        match = field.close_re.match(text, begin, partial=True)
        if match is None:
            continue
        if at_end:  # the end may have cut the marker
            whole = field.close_re.match(text, begin)
            return len(text) if whole is None or match.partial else int(whole.end())
        is_final = field.close_literals is not None and not field.close_literal_can_extend
        if match.partial or (not is_final and may_grow(match, text)):
            return None
        return int(match.end())
    return at if field.close_re.fullmatch("") else -1


def calls_in(
    content: Any,
    field: Any,
    captures: Mapping[str, str],
    schemas: Schemas | None = None,
    *,
    needs_arguments: bool = False,
) -> list[Call] | None:
    """The calls that a region's content describes; None if the content is not a call."""
    try:
        calls = []
        for item in content if isinstance(content, list) else [content]:
            value = _named(item, needs_arguments)
            if field.transform is not None:
                inputs = value if field.transform_each else {"content": value}
                value = _filled(field.transform, {**captures, **inputs})
            calls.append(_call(value, schemas or {}))
        return calls or None
    except (TypeError, ValueError, KeyError, RecursionError, AttributeError):
        return None


def _named(item: Any, needs_arguments: bool) -> Any:
    """A call's JSON object, with its arguments both as `arguments` and as `parameters`; {} if the call has neither."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return item
    if needs_arguments and not {"arguments", "parameters"} & set(item):
        raise ValueError("not a call")
    arguments = item.get("arguments", item.get("parameters", {}))
    return {**item, "arguments": arguments, "parameters": arguments}


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Fill the placeholders of a transform. A placeholder without a value is an error, except for `id`."""
    if isinstance(transform, Mapping):
        return {key: _filled(value, scope) for key, value in transform.items() if key != "id" or _has(value, scope)}
    if not isinstance(transform, str) or not (transform.startswith("{") and transform.endswith("}")):
        return transform
    value: Any = scope
    for key in transform[1:-1].split("."):
        value = value[key]
    return value


def _has(placeholder: Any, scope: Mapping[str, Any]) -> bool:
    value: Any = scope
    for key in str(placeholder).strip("{}").split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def _call(value: Any, schemas: Schemas) -> Call:
    function = value.get("function", value)
    name, arguments, call_id = function["name"], function.get("arguments", {}), value.get("id", function.get("id"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    name.encode()
    if isinstance(arguments, str):
        text, arguments = arguments, json.loads(arguments or "{}")
    else:
        arguments = {} if arguments is None else arguments
        if isinstance(arguments, Mapping) and name.strip() in schemas:
            arguments = cast(arguments, schemas[name.strip()])
        text = as_json(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments are no object")
    return Call(name.strip(), text or "{}", True, call_id if call_id and isinstance(call_id, str) else None)

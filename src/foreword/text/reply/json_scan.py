"""Reads one JSON value character by character, and says at once where a text stops to be one.

Knows JSON, and the two ways in which families of models write it differently: keys without quotes, and strings between
markers of their own. Knows nothing of calls. Each character is read once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import regex

_SPACE = regex.compile(r"[ \t\r\n]*")
_PLAIN = regex.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = regex.compile(r"[\w.+-]*")
_NAME = regex.compile(r"[\w-]+")
_SCALAR = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")

MAX_WORD = 400
"""Most characters of a number or a key without quotes."""


class JsonScanner:
    """The state of one JSON value: an object or a list. `text` is what was read, in strict JSON."""

    def __init__(self, *, unquoted_keys: bool = False, string_delims: Sequence[Sequence[str]] = ()) -> None:
        """`string_delims`: pairs of markers that begin and end a string without escapes."""
        self.is_done = False
        self.has_failed = False
        self._unquoted_keys = unquoted_keys
        self._delims = [(opening, closing) for opening, closing in string_delims]
        self._pieces: list[str] = []
        self._open: list[str] = []
        """The brackets that are open."""
        self._expects = "value"
        """value, first value, key, first key, colon or comma."""
        self._closing: str | None = None
        """What ends the string that is open; None outside strings."""
        self._is_key = False
        self._word = ""

    @property
    def text(self) -> str:
        """All that was read, as strict JSON: the whole value, or its beginning."""
        return "".join(self._pieces) + self._word

    @property
    def is_beginning(self) -> bool:
        """Whether more characters can make `text` a JSON value."""
        return not self.has_failed and (not self._word or bool(_SCALAR.fullmatch(self._word, partial=True)))

    def read(self, text: str, at: int) -> int:
        """Read from a position on; returns the position of the first character that is not read.

        That is the end of the value, or where it fails, or the beginning of something that the text's end cuts.
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
        space = _SPACE.match(text, at).group()
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


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)

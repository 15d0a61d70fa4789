"""Forced calls: a grammar of replies that consist only of calls, in the form of the model's family.

Separators are the same as in templates, so that a call has the same tokens in the prompt of the next request. In the
grammar, tokens that the tokenizer has added to its vocabulary are written by their ids. llguidance takes most of them
for special tokens, which it does not spell with letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.text.reply.arguments import as_json, properties_of, required_of, variants
from foreword.text.reply.format import BARE, ReplyFormat, family

_MAPS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Keys whose members are schemas by name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keys whose values are not schemas."""
MAX_FORCED_CALLS = 16
"""The most forced calls in one answer: a model that is not trained for tools would not stop."""
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PATTERNS = {"{number}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
"""Expressions for the parts of a call that a form leaves to the model."""


@dataclass(frozen=True, slots=True)
class TagValue:
    """One way to write a value."""

    is_text: bool
    """Whether the value is a text, and not JSON."""
    exactly: str | None = None
    """The value's text if the schema allows only one value; else None."""
    patterns: tuple[str, ...] = ()
    """Regular expressions; a text must match each of them as a whole."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of a value that is neither a text nor fixed."""

    @property
    def is_any_text(self) -> bool:
        return self.is_text and self.exactly is None and not self.patterns


ANY_TEXT = TagValue(is_text=True)


def tag_values(schema: Any, root: Mapping[str, Any]) -> list[TagValue]:
    """The ways in which a value of a schema may be written. References are looked up in `root`."""
    return list(dict.fromkeys(_values(schema, root))) or [ANY_TEXT]


def _values(schema: Any, root: Mapping[str, Any]) -> Iterator[TagValue]:
    for case in variants(schema, root):
        values = case["enum"] if isinstance(case.get("enum"), list) else [case["const"]] if "const" in case else None
        if values is not None:
            for value in values:
                is_text = isinstance(value, str)
                yield TagValue(is_text, exactly=value if is_text else as_json(value))
        elif case.get("type") == "null":
            yield TagValue(is_text=False, exactly="null")
        elif case.get("type") == "string" or not (
            isinstance(case.get("type"), str) or {"properties", "items"} & set(case)
        ):
            yield TagValue(is_text=True, patterns=tuple(_patterns(case)))
        else:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            yield TagValue(is_text=False, schema=_Frozen({**definitions, **case}))


class _Frozen(dict[str, Any]):
    """A schema that can be compared with others by its text."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions for a schema's limits on a text. As in JSON schema, unknown formats are ignored."""
    if isinstance(schema.get("pattern"), str):
        yield whole_pattern(schema["pattern"])
    shortest, longest = (schema.get(key) for key in ("minLength", "maxLength"))
    if isinstance(shortest, int) or isinstance(longest, int):
        yield f"(?s:.{{{shortest if isinstance(shortest, int) else 0},{longest if isinstance(longest, int) else ''}}})"
    if isinstance(schema.get("format"), str) and schema["format"] in FORMATS:
        yield FORMATS[schema["format"]]


def whole_pattern(pattern: str) -> str:
    """Turn a pattern of JSON schema, which may match anywhere in a text, into a pattern for the whole text."""
    branches = []
    for branch in _branches(pattern):
        begins, ends = branch.startswith("^"), branch.endswith("$") and not branch.endswith("\\$")
        inner = branch[1 if begins else 0 : len(branch) - ends]
        inner = re.sub(r"\\(.)", lambda match: _ASCII.get(match[1], match[0]), inner, flags=re.DOTALL)
        branches.append(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}")
    return "|".join(branches)


_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
"""JSON schema's classes of characters, which have ASCII characters only."""


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern: its parts between bars outside groups and classes."""
    depth, in_class, begin, branches = 0, False, 0, []
    for match in re.finditer(r"\\.|[\[\]()|]", pattern, flags=re.DOTALL):
        mark = match[0]
        if mark == "[":
            in_class = True
        elif mark == "]":
            in_class = False
        elif not in_class and mark in "()":
            depth += 1 if mark == "(" else -1
        elif not in_class and mark == "|" and depth == 0:
            branches.append(pattern[begin : match.start()])
            begin = match.end()
    return [*branches, pattern[begin:]]


_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,8}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [f"({_GROUP}:){{7}}{_GROUP}", "::", f"({_GROUP}:){{1,7}}:", f":(:{_GROUP}){{1,7}}"]
    + [f"({_GROUP}:){{1,{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)]
)
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T_)?|T_)".replace(
            "T_", "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
        )
    ),
    "email": f"[0-9A-Za-z_+-]+(\\.[0-9A-Za-z_+-]+)*@{_LABEL}(\\.{_LABEL}){{1,8}}",
    "hostname": _HOST,
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][0-9A-Za-z+.-]*://{_HOST}(:[0-9]{{1,5}})?(/[0-9A-Za-z._~!$&'()*+,;=:@/?%-]*)?",
}
"""Regular expressions for formats of JSON schema."""


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A pattern that was left out of a schema."""

    place: str
    """The place of the pattern in the schema, such as `$.properties.email.pattern`."""
    pattern: str


def without_patterns(
    schema: Any, can_follow: Callable[[str], bool], place: str = "$"
) -> tuple[Any, tuple[Unenforced, ...]]:
    """Leave out patterns that the grammar cannot follow. Returns the new schema and the patterns that were left out.

    If a pattern for the names of an object's members is left out, members with any other name are allowed, too. So the
    new schema allows more values, never fewer.
    """
    if isinstance(schema, list):
        parts = [without_patterns(item, can_follow, f"{place}[{at}]") for at, item in enumerate(schema)]
        return [part for part, _ in parts], tuple(item for _, left_out in parts for item in left_out)
    if not isinstance(schema, Mapping):
        return schema, ()
    result: dict[str, Any] = {}
    unenforced: list[Unenforced] = []
    for key, value in schema.items():
        where = f"{place}.{key}"
        if key == "pattern" and isinstance(value, str) and not can_follow(whole_pattern(value)):
            unenforced.append(Unenforced(where, value))
        elif key in _MAPS and isinstance(value, Mapping):
            names = {name for name in value if key == "patternProperties" and not can_follow(whole_pattern(name))}
            unenforced += [Unenforced(where, name) for name in names]
            members = {
                name: without_patterns(member, can_follow, f"{where}.{name}")
                for name, member in value.items()
                if name not in names
            }
            result[key] = {name: part for name, (part, _) in members.items()}
            unenforced += [item for _, left_out in members.values() for item in left_out]
            if names:
                result["additionalProperties"] = True
        elif key not in _VALUES and not (key == "additionalProperties" and key in result):
            result[key], left_out = without_patterns(value, can_follow, where)
            unenforced += left_out
        else:
            result.setdefault(key, value)
    return result, tuple(unenforced)


def forced_calls(
    form: ReplyFormat | None,
    functions: Sequence[Mapping[str, Any]],
    added_tokens: Mapping[str, int],
    *,
    may_repeat: bool,
) -> str:
    """The Lark grammar of one call of one of the functions, or of several calls if `may_repeat`.

    `functions`: each with its `name`, and the JSON schema of its arguments in `parameters`. `added_tokens`: ids of the
    tokens that the tokenizer adds, by their texts. If `form` is None or has no format of calls, a call is bare JSON.
    """
    call = form.call_form if form is not None and form.call_form is not None else family(BARE).call_form
    assert call is not None
    writer = _Writer(call, added_tokens)
    rules = [rule for number, function in enumerate(functions) for rule in writer.call(number, function)]
    one_of = " | ".join(f"c{number}" for number in range(len(functions)))
    max_calls = min(MAX_FORCED_CALLS, call.get("most", MAX_FORCED_CALLS)) if may_repeat else 1
    more = f"({writer.literal(call.get('between', ''))} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    begin, end = (writer.literal(call.get(key, "")) for key in ("begin", "end"))
    return "\n".join([f"start: {begin} call {more} {end}", f"call: {one_of}", *rules])


class _Writer:
    def __init__(self, form: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        self._form, self._added = form, added_tokens
        literals = sorted((token for token in added_tokens if token), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, [*literals, *_PATTERNS])) + ")")

    def literal(self, text: str) -> str:
        """The terms that stand for a text."""
        pieces = [piece for piece in self._split.split(text) if piece]
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else _PATTERNS.get(piece, json.dumps(piece))
            for piece in pieces
        )

    def call(self, number: int, function: Mapping[str, Any]) -> list[str]:
        """The rules of a function's call. The first rule's name is `c` followed by `number`, such as `c0`."""
        opening, closing = (
            self.literal(self._form[key].replace("{name}", function["name"])) for key in ("open", "close")
        )
        head = f"c{number}: {opening} a{number} {closing}"
        tags = self._form.get("arguments")
        if tags is None:
            schema = {**(function["parameters"] or {"type": "object"}), "x-guidance": _SEPARATORS}
            return [head, f"a{number}: %json {json.dumps(schema)}"]
        return [head, *self._tagged(f"a{number}", function["parameters"], tags)]

    def _tagged(self, name: str, schema: Mapping[str, Any], tags: Mapping[str, str]) -> list[str]:
        """The rules of arguments between tags: the schema's members in their order."""
        properties, required = properties_of(schema), required_of(schema)
        between = self.literal(tags.get("between", ""))
        rules, items = [], []
        for number, (key, member) in enumerate(properties.items()):
            item = f"{name}_{number}"
            opening = self.literal(tags["open"].replace("{key}", key))
            rules += self._value(item, opening, member, schema, tags)
            items.append((item, key in required))
        return [*_sequence(name, items, between), *rules]

    def _value(
        self, item: str, opening: str, schema: Any, root: Mapping[str, Any], tags: Mapping[str, str]
    ) -> list[str]:
        values = tag_values(schema, root)
        if not tags.get("string") and any(value.is_any_text for value in values):
            values = [ANY_TEXT]  # any other value is also a text
        forms, rules = [], []
        for number, value in enumerate(values):
            form, more = self._form_of(value, f"{item}_v{number}", tags)
            forms.append(form)
            rules += more
        return [f"{item}: {opening} ({' | '.join(forms)})", *rules]

    def _form_of(self, value: TagValue, name: str, tags: Mapping[str, str]) -> tuple[str, list[str]]:
        """Lark's terms for one kind of value with its closing tag, and the rules that these terms name."""
        closing = self.literal(tags["close"])
        mark = tags.get("string", "") if value.is_text else ""
        quote, ends = self.literal(mark), mark or tags["close"]
        if value.exactly is not None:
            return f"{self.literal(mark + value.exactly + mark) or EMPTY} {closing}", []
        if value.schema is not None:
            return f"{name} {closing}", [f"{name}: %json {json.dumps({**value.schema, 'x-guidance': _SEPARATORS})}"]
        after, is_token = closing if mark else "", "<[" in self.literal(ends)
        if is_token:  # a token of its own ends the text
            after = f"{quote} {closing}"
        if not value.patterns:
            suffix = "" if is_token else f"[suffix={json.dumps(ends)}]"
            return f"{quote} {name} {after}", [f"{name}{suffix}: /(?s:.*)/"]
        terms = [_regex(pattern) for pattern in value.patterns]
        if is_token:
            terminal = " & ".join(terms)
        else:  # text and closing tag are one terminal, which has the tag only at its end
            earlier = _regex(f"(?s:.*){_MEANINGFUL.sub(LITERAL, ends)}(?s:.+)")
            terminal = f"(({' & '.join(terms)}) {json.dumps(ends)}) & ~{earlier}"
        return f"{quote} {name.upper()} {after}", [f"{name.upper()}: {terminal}"]


EMPTY = '""'
LITERAL = r"\\\g<0>"
_MEANINGFUL = re.compile(r"[^\w\s<>/\"']")
"""Characters that may mean something in regular expressions."""


def _regex(pattern: str) -> str:
    """A regular expression as a term of Lark."""
    escaped = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def _sequence(name: str, items: Sequence[tuple[str, bool]], between: str) -> list[str]:
    """Rules of items in their order. Optional items may be missing. Separators stand only between items."""
    if not between:
        return [f"{name}: " + (" ".join(item if needed else f"{item}?" for item, needed in items) or '""')]
    # The first written item has no separator before it. Rules f apply until an item is written, rules r after that.
    rules = [f"{name}: {name}_f0"]
    for number, (item, needed) in enumerate(items):
        skipped = ("", "") if needed else (f" | {name}_f{number + 1}", f" | {name}_r{number + 1}")
        rules.append(f"{name}_f{number}: {item} {name}_r{number + 1}{skipped[0]}")
        rules.append(f"{name}_r{number}: {between} {item} {name}_r{number + 1}{skipped[1]}")
    return [*rules, f'{name}_f{len(items)}: ""', f'{name}_r{len(items)}: ""']

"""Forced calls: a grammar of replies that can be nothing but calls, in the form of the model's family.

Knows the forms of calls, JSON schemas and llguidance's Lark. Separators are those of templates, so that a call has the
same tokens when the conversation comes back. Tokens that a tokenizer adds to its vocabulary are named by their ids:
llguidance takes most of them for special, and does not spell them with letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.text.reply.arguments import properties_of, required_of
from foreword.text.reply.format import BARE, ReplyFormat, family
from foreword.text.reply.tag_values import ANY_TEXT, TagValue, tag_values

MAX_FORCED_CALLS = 16
"""Most forced calls in one answer: a model that is not trained for tools would not stop."""

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PATTERNS = {"{number}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
"""What a form leaves to the model."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""


def forced_calls(
    form: ReplyFormat | None, functions: Sequence[Function], added_tokens: Mapping[str, int], *, may_repeat: bool
) -> str:
    """Lark grammar of one call of one of the functions, or of several calls.

    `added_tokens`: ids of the tokens that the tokenizer adds, by their texts. A form without calls gets bare JSON.
    """
    call = form.call_form if form is not None and form.call_form is not None else family(BARE).call_form
    assert call is not None
    writer = _Writer(call, added_tokens)
    rules = [rule for number, one in enumerate(functions) for rule in writer.call(number, one)]
    one_of = " | ".join(f"c{number}" for number in range(len(functions)))
    most = min(MAX_FORCED_CALLS, call.get("most", MAX_FORCED_CALLS)) if may_repeat else 1
    more = f"({writer.literal(call.get('between', ''))} call){{0,{most - 1}}}" if most > 1 else ""
    begin, end = (writer.literal(call.get(key, "")) for key in ("begin", "end"))
    return "\n".join([f"start: {begin} call {more} {end}", f"call: {one_of}", *rules])


class _Writer:
    def __init__(self, form: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        self._form, self._added = form, added_tokens
        named = sorted((token for token in added_tokens if token), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, [*named, *_PATTERNS])) + ")")

    def literal(self, text: str) -> str:
        """The terms that stand for a text."""
        pieces = [piece for piece in self._split.split(text) if piece]
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else _PATTERNS.get(piece, json.dumps(piece))
            for piece in pieces
        )

    def call(self, number: int, function: Function) -> list[str]:
        """The rules of a function's call, whose name is c and its number."""
        opening, closing = (self.literal(self._form[key].replace("{name}", function.name)) for key in ("open", "close"))
        head = f"c{number}: {opening} a{number} {closing}"
        tags = self._form.get("arguments")
        if tags is None:
            schema = {**(function.parameters or {"type": "object"}), "x-guidance": _SEPARATORS}
            return [head, f"a{number}: %json {json.dumps(schema)}"]
        return [head, *self._tagged(f"a{number}", function.parameters, tags)]

    def _tagged(self, name: str, schema: Mapping[str, Any], tags: Mapping[str, str]) -> list[str]:
        """The rules of arguments between tags: those of the schema, in its order."""
        properties, required = properties_of(schema), required_of(schema)
        between = self.literal(tags.get("between", ""))
        rules, items = [], []
        for number, (key, one) in enumerate(properties.items()):
            item = f"{name}_{number}"
            opening = self.literal(tags["open"].replace("{key}", key))
            rules += self._value(item, opening, one, schema, tags)
            items.append((item, key in required))
        return [*_sequence(name, items, between), *rules]

    def _value(
        self, item: str, opening: str, schema: Any, root: Mapping[str, Any], tags: Mapping[str, str]
    ) -> list[str]:
        values = tag_values(schema, root)
        if not tags.get("string") and any(value.is_any_text for value in values):
            values = [ANY_TEXT]  # whatever else may stand there is a text too
        forms, rules = [], []
        for number, value in enumerate(values):
            form, more = self._form_of(value, f"{item}_v{number}", tags)
            forms.append(form)
            rules += more
        return [f"{item}: {opening} ({' | '.join(forms)})", *rules]

    def _form_of(self, value: TagValue, name: str, tags: Mapping[str, str]) -> tuple[str, list[str]]:
        """The terms of one way to write a value, with what follows it, and the rules that they need."""
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
        else:  # text and end are one terminal, in which the end stands once: at the end
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
    """Rules of items in their order; those not required may be missing. Separators stand only between items."""
    if not between:
        return [f"{name}: " + (" ".join(item if needed else f"{item}?" for item, needed in items) or '""')]
    # The first item has no separator before it: rules f hold while no item was written, rules r after one.
    rules = [f"{name}: {name}_f0"]
    for number, (item, needed) in enumerate(items):
        skipped = ("", "") if needed else (f" | {name}_f{number + 1}", f" | {name}_r{number + 1}")
        rules.append(f"{name}_f{number}: {item} {name}_r{number + 1}{skipped[0]}")
        rules.append(f"{name}_r{number}: {between} {item} {name}_r{number + 1}{skipped[1]}")
    return [*rules, f'{name}_f{len(items)}: ""', f'{name}_r{len(items)}: ""']

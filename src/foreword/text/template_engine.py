"""Chat templates as programs: the sandbox in which they run, and the data that they see.

Templates have Jinja with the additions of transformers: `raise_exception`, `strftime_now`, a `tojson` that leaves
characters as they are, and blocks named `generation`. A template comes with a model, so it is not trusted: it sees only
plain data, and can change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_TEMPLATES = 64
"""The number of templates that stay compiled."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of messages that may have the reasoning. Templates read the first; gpt-oss's template reads the second."""
_TAG = "\u2402the message goes on\u2403 "
"""The mark at the end of a message that the model continues."""


def render(source: str, messages: Sequence[Any], inputs: Mapping[str, Any], *, is_open: bool, continues: bool) -> str:
    """Render messages to text. `inputs`: further values for the template, such as tools, by name.

    `is_open`: the text ends where the answer begins. `continues`: the last message is the beginning of the answer.

    Raises any error that the template raises.
    """
    values = {name: _plain(value) for name, value in inputs.items()}
    values["tools"] = _tools(inputs.get("tools"))
    if any(not isinstance(document, dict) for document in inputs.get("documents") or ()):
        raise TypeError("documents must be dicts with a title and a text")
    chat = [_with_reasoning(_plain(message)) for message in messages]
    if continues and "content" not in source:
        raise ValueError("the template writes no contents, so no message can be continued")
    begun = _mark(chat[-1]) if continues else ""
    text = _compiled(source).render({**values, "messages": chat, "add_generation_prompt": is_open})
    return _cut(text, begun) if continues else text


def _tools(tools: Any) -> list[Any] | None:
    """Tools as JSON schemas. Python functions are turned into schemas."""
    if tools is None:
        return None
    schemas = []
    for tool in tools:
        if callable(tool):
            from transformers.utils.chat_template_utils import get_json_schema

            schemas.append(get_json_schema(tool))
        elif isinstance(tool, dict):
            schemas.append(_plain(tool))
        else:
            raise ValueError("tools must be JSON schemas, or functions with type hints and a docstring")
    return schemas


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((text for name in _REASONING if (text := message.get(name)) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark(message: dict[str, Any]) -> str:
    """Mark the end of a message's text; returns the text without the mark."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    block = next((part for part in reversed(content) if "text" in part), None)
    if block is None:
        raise ValueError("the last message has no text to continue")
    text = str(block["text"])
    block["text"] = text + _TAG
    return text


def _cut(text: str, begun: str) -> str:
    """The text up to the mark. If the template has stripped the mark's white space, the text is stripped, too."""
    mark = _TAG.strip()
    if begun.strip() not in text or mark not in text:
        raise ValueError("the template does not write the last message as it is, so it cannot be continued")
    at = text.rindex(mark)
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()


def _plain(value: Any) -> Any:
    """Turn a value into JSON's types, whose methods are harmless. Other objects become a text that names their type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)  # a subclass may have methods of its own
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


@functools.lru_cache(MOST_TEMPLATES)
def _compiled(source: str) -> Template:
    return environment().from_string(source)


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox of all templates."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


class _Generation(Extension):
    """Blocks that mark text which a model wrote. They change nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without its attributes, through which templates could reach Python's own objects."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace whose names do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        items = dict(*positional, **kwargs)
        for name in items:
            _check_name(name)
        Namespace.__init__(self, items)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template's namespace cannot have {name!r}: it begins with an underscore")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)

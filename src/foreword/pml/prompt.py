"""Prompt: the modules that a prompt imports, their arguments, and its own text.

A prompt is XML, or values of Python:

    <prompt schema="trip"> <plan duration="3 days"> <rome/> </plan> Where first? </prompt>
    {"plan": {"duration": "3 days", "rome": {}}}, text="Where first?"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from foreword.errors import PMLSyntaxError, PromptError
from foreword.pml.markup import MAX_DEPTH, Element, Place, TextNode, parse
from foreword.pml.schema import ROLES, Role, Text, is_exact, join, spaced

NOWHERE = Place("<prompt>")
PLACING = {"positions": ("schema", "shift", "dense"), "trailing": ("last", "schema")}
"""The fields of `Placing`, and their values."""
_SPACE = "xml:space"


@dataclass(frozen=True, slots=True)
class Reference:
    """A module that a prompt imports."""

    path: str
    arguments: Mapping[str, str]
    children: tuple[Reference, ...] = ()
    place: Place = NOWHERE

    def flat(self) -> Iterator[Reference]:
        """Yield this reference and all references in it."""
        yield self
        for child in self.children:
            yield from child.flat()


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the conversation, with the texts and references in it."""

    role: Role
    children: tuple[Text | Reference, ...]
    place: Place = NOWHERE


PromptChild = Text | Reference | Message


@dataclass(frozen=True, slots=True)
class ModulePrompt:
    """A prompt as it is written."""

    children: tuple[PromptChild, ...]
    schema_name: str | None = None
    """The name of the prompt's schema; None: any schema."""
    placing: Mapping[str, str] = field(default_factory=dict)
    """The prompt's own fields of `Placing`."""
    place: Place = field(default=NOWHERE, compare=False)


# -------------------------------------------------------------------------------------------------------- XML


def read_prompt(text: str | bytes, file: str = "<prompt>") -> ModulePrompt:
    """Read a prompt from XML. Raises PMLSyntaxError or PromptError, with the place."""
    root = parse(text, file)
    if root.tag != "prompt":
        raise root.place.error(
            PMLSyntaxError, f"the outer tag is <{root.tag}>; a prompt begins with <prompt schema=...>"
        )
    root.checked(PMLSyntaxError, frozenset({"schema", *PLACING, _SPACE}), frozenset({"schema"}))
    placing = {name: value for name, value in root.attributes.items() if name in PLACING}
    for name, value in placing.items():
        if value not in PLACING[name]:
            raise root.place.error(PromptError, f"{name}={value!r} is unknown; use {' or '.join(PLACING[name])}")
    keeps_space = is_exact(root)
    children: list[PromptChild] = []
    for number, node in enumerate(root.children):
        if isinstance(node, Element) and node.tag in ROLES:
            children.append(_message(node, keeps_space))
        else:
            children += _plain(node, keeps_space, is_last=number == len(root.children) - 1)
    return ModulePrompt(tuple(children), root.attributes["schema"], placing, root.place)


def _message(element: Element, inherited: bool) -> Message:
    element.checked(PMLSyntaxError, frozenset({_SPACE}))
    keeps_space = is_exact(element, inherited)
    children: list[Text | Reference] = []
    for number, node in enumerate(element.children):
        if isinstance(node, Element) and node.tag in ROLES:
            raise node.place.error(PromptError, f"<{node.tag}> stands in another message; close that one first")
        is_last = number == len(element.children) - 1
        children += _plain(node, keeps_space, is_first=number == 0, is_last=is_last)
    (role,) = (tag for tag in ROLES if tag == element.tag)
    return Message(role, tuple(children), element.place)


def _plain(
    node: Element | TextNode, keeps_space: bool, *, is_first: bool = False, is_last: bool = False
) -> list[Text | Reference]:
    """Read a node as a text or a reference. Returns [] for a text of white space alone."""
    if isinstance(node, TextNode):
        text = node.text if keeps_space else spaced(node.text, is_first, is_last)
        return [Text(text, node.place)] if text else []
    if node.tag == "text":
        return _literal(node, keeps_space)
    return [_reference(node, "")]


def _literal(element: Element, inherited: bool) -> list[Text | Reference]:
    """Read a `<text>`, which may have its own `xml:space`."""
    element.checked(PMLSyntaxError, frozenset({_SPACE}))
    keeps_space = is_exact(element, inherited)
    for node in element.children:
        if isinstance(node, Element):
            raise node.place.error(PMLSyntaxError, f"<{node.tag}> stands in <text>, which holds text alone")
    text = "".join(node.text for node in element.children if isinstance(node, TextNode))
    text = text if keeps_space else spaced(text)
    return [Text(text, element.place)] if text else []


def _reference(element: Element, parent: str) -> Reference:
    arguments = dict(element.attributes)
    name = element.tag
    if name == "use":
        if "module" not in arguments:
            raise element.place.error(PMLSyntaxError, '<use> lacks module="..."; add the path, such as plan/rome')
        name = arguments.pop("module")
    path = join(parent, name)
    children: list[Reference] = []
    for node in element.children:
        if isinstance(node, Element):
            children.append(_reference(node, path))
        elif node.text.strip():
            raise node.place.error(
                PromptError, f"text stands inside of module {path!r}; write it after the module, or as an argument"
            )
    return Reference(path, arguments, tuple(children), element.place)


# ----------------------------------------------------------------------------------------------------- Python


def prompt_of(modules: Mapping[str, Any], *, text: str = "", messages: Mapping[str, str] | None = None) -> ModulePrompt:
    """Make a prompt from modules by name. A value maps parameters to texts, and nested modules to such mappings.

    `text` follows the modules unchanged. `messages` are texts by role, which the chat template writes.
    """
    if not isinstance(modules, Mapping):
        raise PromptError(f"modules={modules!r:.60} is no mapping; give names of modules, such as {{'plan': {{}}}}")
    children: list[PromptChild] = [_reference_of(name, value, "") for name, value in modules.items()]
    if not isinstance(text, str):
        raise PromptError(f"text={text!r:.60} is no text")
    if text:
        children.append(Text(text, NOWHERE))
    if not isinstance(messages or {}, Mapping):
        raise PromptError(f"messages={messages!r:.60} is no mapping; give texts by role, such as {{'user': 'Hello'}}")
    for name, content in (messages or {}).items():
        roles = [role for role in ROLES if role == name]
        if not roles or not isinstance(content, str):
            raise PromptError(f"messages have {name!r}: {content!r:.60}; give texts by role: {', '.join(ROLES)}")
        children.append(Message(roles[0], (Text(content, NOWHERE),) if content else ()))
    return ModulePrompt(tuple(children))


def _reference_of(name: Any, value: Any, parent: str) -> Reference:
    if not isinstance(name, str) or not name:
        raise PromptError(f"{name!r:.60} is no name of a module")
    path = join(parent, name)
    if path.count("/") >= MAX_DEPTH:
        raise PromptError(f"the modules are nested deeper than {MAX_DEPTH}; nest less")
    if not isinstance(value, Mapping):
        raise PromptError(f"the module {path!r} is given {value!r:.60}; give a mapping, {{}} if it needs no arguments")
    arguments: dict[str, str] = {}
    children: list[Reference] = []
    for key, inner in value.items():
        if isinstance(inner, str):
            arguments[str(key)] = inner
        else:
            children.append(_reference_of(key, inner, path))
    return Reference(path, arguments, tuple(children))


def looks_like_xml(text: str) -> bool:
    """Whether a text is XML rather than a file's name."""
    return re.match(r"\ufeff?\s*<", text) is not None

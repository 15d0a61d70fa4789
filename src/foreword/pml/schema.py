"""Schema: reads the modules, unions, parameters and turns that a file of prompt modules declares in XML.

The language is that of Prompt Cache (Gim et al., MLSys 2024) as real XML. Every well-formed schema in Prompt Cache's
repository can be read unchanged.

    <schema name>                                         its own text is part of every prompt
      <module name src cache scaffold recompute>          text; modules nest
        <parameter name length scaffold optional recompute/>
      <union scaffold> <module/> ... </union>             at most one member is imported
      <system> <user> <assistant>                         messages; they may hold modules, and modules may hold them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from foreword.errors import PMLSyntaxError, SchemaError
from foreword.pml.markup import Element, Place, TextNode, parse

MAX_MODULES = 4096
MAX_PARAMETER_TOKENS = 1 << 20
MAX_NAME_CHARACTERS = 128
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_\-.]*")
_FIRST_K = re.compile(r"first-([1-9][0-9]{0,5})")
_SPACE = "xml:space"
_SPACES = " \t\r\n"

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
AfterArgument = Literal["none", "run", "module"]
AFTER_ARGUMENT: tuple[AfterArgument, ...] = ("none", "run", "module")


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text, never empty."""

    text: str
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place in a module that each prompt fills with a text, the argument."""

    name: str
    length: int
    """The most tokens of an argument; the parameter reserves this number of positions."""
    scaffold: str = ""
    """Text in place of an argument while the module is computed; the placeholder token fills the rest."""
    is_optional: bool = False
    """Whether a prompt may leave out the argument."""
    recomputed: AfterArgument = "run"
    """How much of the module's text is computed again after an argument: up to the next tag ("run"), up to the module's
    end ("module"), or no text ("none")."""
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Text that prompts import by name, with its parameters and nested modules."""

    name: str
    children: tuple[Child, ...] = ()
    is_cached: bool = True
    """Whether the module's KV can be linked. False: each prompt computes it, after the text before the module."""
    scaffold: tuple[str, ...] = ()
    """Paths of modules after which this module is computed, if a prompt imports all of them."""
    first_k: int | None = None
    """The number of the module's first tokens to compute again when it is linked; None: the method decides."""
    place: Place = field(default=Place(), compare=False)

    def modules(self) -> Iterator[tuple[Module, Union | None]]:
        """Yield the modules directly in this one, including those in its turns, each with its union or None."""
        for child in without_turns(self.children):
            if isinstance(child, Union):
                yield from ((member, child) for member in child.members)
            elif isinstance(child, Module):
                yield child, None


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports at most one. All begin at one position. The longest sets the union's length."""

    members: tuple[Module, ...]
    scaffold: str | None = None
    """In the code of the Prompt Cache paper: the member with which the rest of a schema is computed. foreword ignores
    it."""
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation: the model's chat template writes the text around it."""

    role: Role
    children: tuple[Child, ...] = ()
    place: Place = field(default=Place(), compare=False)


Child = Text | Parameter | Module | Union | Turn


def without_turns(children: tuple[Child, ...]) -> Iterator[Child]:
    """Yield the children, with a turn's children in place of the turn."""
    for child in children:
        if isinstance(child, Turn):
            yield from without_turns(child.children)
        else:
            yield child


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema. Its root module has no name, and every prompt imports the root's own text."""

    name: str
    root: Module
    file: str = field(default="", compare=False)

    def modules(self) -> Iterator[tuple[str, Module, Union | None]]:
        """Yield all modules in document order: the path, such as "plan/rome", the module, and its union or None."""
        return _modules_below("", self.root)


def _modules_below(path: str, module: Module) -> Iterator[tuple[str, Module, Union | None]]:
    for nested, union in module.modules():
        inner = join(path, nested.name)
        yield inner, nested, union
        yield from _modules_below(inner, nested)


def join(path: str, name: str) -> str:
    """The path of a module inside the module at `path`."""
    return f"{path}/{name}" if path else name


# ---------------------------------------------------------------------------------------------------- reading


Include = Callable[[str, Place], str]
"""Returns the text of the file that a module's `src` names. Raises PMLError if it may not be read."""


def read_schema(text: str | bytes, file: str, include: Include) -> Schema:
    """Read a schema from XML; `file` is its name in errors. Raises PMLSyntaxError or SchemaError, with the place."""
    root = parse(text, file)
    if root.tag != "schema":
        raise root.place.error(PMLSyntaxError, f"the outer tag is <{root.tag}>; a schema begins with <schema name=...>")
    return _SchemaReader(include).read(root)


@dataclass(frozen=True, slots=True)
class _Around:
    """Facts that a child inherits from the tags around it."""

    is_exact: bool = False
    """Whether white space is kept as it is written."""
    in_turn: bool = False
    in_module: bool = False


class _SchemaReader:
    """Turns elements into modules, and refuses contradictions."""

    def __init__(self, include: Include) -> None:
        self._include = include
        self._num_modules = 0

    def read(self, element: Element) -> Schema:
        element.checked(PMLSyntaxError, frozenset({"name", "version", _SPACE}), frozenset({"name"}))
        version = element.attributes.get("version", "1")
        if version != "1":
            raise element.place.error(PMLSyntaxError, f"version={version!r} is unknown; this engine reads version 1")
        around = _Around(is_exact=is_exact(element))
        root = Module("", self._children(element, around), place=element.place)
        check_names(root)
        schema = Schema(_name(element), root, element.place.file)
        _check_scaffolds(schema)
        return schema

    def _children(self, element: Element, around: _Around) -> tuple[Child, ...]:
        nodes = element.children
        children: list[Child] = []
        for number, node in enumerate(nodes):
            if isinstance(node, TextNode):
                ends = (number == 0, number == len(nodes) - 1) if element.tag in ROLES else (False, False)
                text = node.text if around.is_exact else spaced(node.text, *ends)
                if text:
                    children.append(Text(text, node.place))
            else:
                children.append(self._child(node, around))
        return tuple(children)

    def _child(self, element: Element, around: _Around) -> Child:
        tag = element.tag
        if tag == "module":
            return self._module(element, around)
        if tag == "union":
            return self._union(element, around)
        if tag == "parameter":
            if not around.in_module:
                raise element.place.error(
                    SchemaError,
                    "a parameter stands outside of modules; put it into the module whose text it is part of",
                )
            return _parameter(element)
        if tag in ROLES:
            if around.in_turn:
                raise element.place.error(SchemaError, f"<{tag}> stands in another message; close that one first")
            return self._turn(element, around)
        raise element.place.error(
            PMLSyntaxError,
            f"<{tag}> is not a tag of schemas; known are module, union, parameter, system, user and assistant",
        )

    def _turn(self, element: Element, around: _Around) -> Turn:
        element.checked(PMLSyntaxError, frozenset({_SPACE}))
        inner = replace(around, in_turn=True, is_exact=is_exact(element, around.is_exact))
        (role,) = (tag for tag in ROLES if tag == element.tag)
        return Turn(role, self._children(element, inner), element.place)

    def _module(self, element: Element, around: _Around) -> Module:
        allowed = frozenset({"name", "src", "cache", "scaffold", "recompute", _SPACE})
        element.checked(PMLSyntaxError, allowed, frozenset({"name"}))
        self._num_modules += 1
        if self._num_modules > MAX_MODULES:
            raise element.place.error(SchemaError, f"there are more than {MAX_MODULES:,} modules; split the schema")
        attributes, place = element.attributes, element.place
        inner = replace(around, in_module=True, is_exact=is_exact(element, around.is_exact))
        children = self._children(element, inner)
        if "src" in attributes:
            text = self._include(attributes["src"], place)
            text = text if inner.is_exact else spaced(text)
            if children and isinstance(children[0], Text):
                text, children = text + children[0].text, children[1:]
            children = (Text(text, place), *children) if text else children
        is_all, first_k = _recompute(element)
        module = Module(
            _name(element),
            children,
            is_cached=_flag(element, "cache", default=True) and not is_all,
            scaffold=tuple(dict.fromkeys(attributes.get("scaffold", "").split())),
            first_k=first_k,
            place=place,
        )
        check_names(module)
        return module

    def _union(self, element: Element, around: _Around) -> Union:
        element.checked(PMLSyntaxError, frozenset({"scaffold"}))
        members: list[Module] = []
        for node in element.children:
            if isinstance(node, TextNode):
                if node.text.strip(_SPACES):
                    raise node.place.error(
                        SchemaError, "text stands between the members of a union; put it into a module"
                    )
            elif node.tag != "module":
                raise node.place.error(SchemaError, f"<{node.tag}> stands in a union, which has only modules")
            else:
                members.append(self._module(node, around))
        if not members:
            raise element.place.error(SchemaError, "the union has no members; add a module, or remove it")
        scaffold = element.attributes.get("scaffold")
        if scaffold is not None and scaffold not in {member.name for member in members}:
            names = ", ".join(member.name for member in members)
            raise element.place.error(SchemaError, f"scaffold={scaffold!r} is no member of this union; it has: {names}")
        return Union(tuple(members), scaffold, element.place)


def _parameter(element: Element) -> Parameter:
    allowed = frozenset({"name", "length", "scaffold", "optional", "recompute"})
    element.checked(PMLSyntaxError, allowed, frozenset({"name", "length"}))
    if any(not isinstance(node, TextNode) or node.text.strip(_SPACES) for node in element.children):
        raise element.place.error(PMLSyntaxError, "a parameter holds nothing; write <parameter name=... length=.../>")
    length = element.attributes["length"].strip()
    if not re.fullmatch(r"[0-9]{1,9}", length) or not 1 <= int(length) <= MAX_PARAMETER_TOKENS:
        raise element.place.error(
            SchemaError, f"length={length!r} is no number of tokens; give one from 1 to {MAX_PARAMETER_TOKENS:,}"
        )
    wish = element.attributes.get("recompute", "run")
    after = [choice for choice in AFTER_ARGUMENT if choice == wish]
    if not after:
        raise element.place.error(SchemaError, f"recompute={wish!r} is unknown; use {', '.join(AFTER_ARGUMENT)}")
    return Parameter(
        _name(element),
        int(length),
        element.attributes.get("scaffold", ""),
        is_optional=_flag(element, "optional", default=False),
        recomputed=after[0],
        place=element.place,
    )


# ------------------------------------------------------------------------------------------------- attributes


def is_exact(element: Element, inherited: bool = False) -> bool:
    """Whether white space in this element is kept; `xml:space` decides. Raises PMLSyntaxError."""
    value = element.attributes.get(_SPACE)
    if value not in (None, "preserve", "default"):
        raise element.place.error(PMLSyntaxError, f"xml:space={value!r} is unknown; use preserve or default")
    return inherited if value is None else value == "preserve"


def spaced(text: str, is_first: bool = False, is_last: bool = False) -> str:
    """Turn the white space at each end of a text into one space, or remove it at an end of a message.

    A text of white space alone is only the layout of the file, and becomes "".
    """
    bare = text.strip(_SPACES)
    if not bare:
        return ""
    before = "" if is_first or text[0] not in _SPACES else " "
    after = "" if is_last or text[-1] not in _SPACES else " "
    return before + bare + after


def _name(element: Element) -> str:
    name = element.attributes["name"]
    if len(name) > MAX_NAME_CHARACTERS:
        raise element.place.error(
            SchemaError,
            f"the name {name[:16]!r}... has {len(name):,} characters, and may have {MAX_NAME_CHARACTERS}; shorten it",
        )
    if not _NAME.fullmatch(name):
        raise element.place.error(
            SchemaError,
            f"name={name!r} is no name: begin with a letter or _, and go on with letters, digits, _, - and .",
        )
    return name


def _flag(element: Element, name: str, *, default: bool) -> bool:
    value = element.attributes.get(name)
    if value not in (None, "true", "false"):
        raise element.place.error(SchemaError, f'{name}={value!r} is neither "true" nor "false"')
    return default if value is None else value == "true"


def _recompute(element: Element) -> tuple[bool, int | None]:
    """Read `recompute`: whether prompts compute the whole module, and the number of first tokens to compute or None."""
    wish = element.attributes.get("recompute")
    if wish in (None, "all"):
        return wish == "all", None
    if wish == "none":
        return False, 0
    match = _FIRST_K.fullmatch(wish or "")
    if match is None:
        raise element.place.error(
            SchemaError, f"recompute={wish!r} is unknown; use none, first-16 (any number), or all"
        )
    return False, int(match[1])


# ------------------------------------------------------------------------------------------------------ names


def check_names(module: Module) -> None:
    """Raise SchemaError if two modules directly in this one, or two of its parameters, have the same name."""
    for kind, members in (
        ("module", [inner for inner, _ in module.modules()]),
        ("parameter", [child for child in without_turns(module.children) if isinstance(child, Parameter)]),
    ):
        seen: dict[str, int] = {}
        for item in members:
            if item.name in seen:
                raise item.place.error(
                    SchemaError, f"the {kind} {item.name!r} is also in line {seen[item.name]}; give each its own name"
                )
            seen[item.name] = item.place.line


def _check_scaffolds(schema: Schema) -> None:
    """Raise SchemaError if a module's scaffold names a later module, the module itself, or a module around it."""
    earlier: set[str] = set()
    for path, module, _ in schema.modules():
        for name in module.scaffold:
            if name not in earlier or path.startswith(f"{name}/"):
                raise module.place.error(
                    SchemaError,
                    f"scaffold={name!r} names no module before {path!r} and beside it; give the paths of earlier "
                    "modules, such as plan/rome",
                )
        earlier.add(path)

"""Schema: modules, unions, parameters and turns, as a file of prompt modules declares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from foreword.pml.markup import Place

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
AfterArgument = Literal["none", "run", "module"]
AFTER_ARGUMENT: tuple[AfterArgument, ...] = ("none", "run", "module")


def _nowhere() -> Place:
    return Place()


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text, never empty."""

    text: str
    place: Place = field(default_factory=_nowhere, compare=False)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place in a module that each prompt fills with text of its own."""

    name: str
    length: int
    """The most tokens of an argument; the parameter reserves this number of positions."""
    scaffold: str = ""
    """Text in place of an argument while the module is computed; the placeholder token fills the rest."""
    is_optional: bool = False
    """Whether a prompt may leave out the argument."""
    recomputed: AfterArgument = "run"
    """The module's text to compute again after an argument: up to the next tag ("run"), up to the module's end
    ("module"), or no text ("none")."""
    place: Place = field(default_factory=_nowhere, compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Text that prompts import by name, with its parameters and nested modules."""

    name: str
    children: tuple[Child, ...] = ()
    is_cached: bool = True
    """Whether its KV can be linked. False: each prompt computes it, after the text before it."""
    scaffold: tuple[str, ...] = ()
    """Paths of modules after which it is computed, if a prompt imports all of these."""
    first_k: int | None = None
    """The number of its first tokens to compute again when it is linked; None: the method decides."""
    place: Place = field(default_factory=_nowhere, compare=False)

    def modules(self) -> Iterator[tuple[Module, Union | None]]:
        """Yield the modules directly in it, each with its union or None. Modules in its turns are among them."""
        for child in self.children:
            yield from _modules_of(child)


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports at most one. All begin at the same position; the longest sets the length."""

    members: tuple[Module, ...]
    scaffold: str | None = None
    """The member with which Prompt Cache's code computes the rest of a schema. It has no effect here."""
    place: Place = field(default_factory=_nowhere, compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a conversation: the model's chat template writes the text around it."""

    role: Role
    children: tuple[Child, ...] = ()
    place: Place = field(default_factory=_nowhere, compare=False)


Child = Text | Parameter | Module | Union | Turn


def _modules_of(child: Child) -> Iterator[tuple[Module, Union | None]]:
    if isinstance(child, Module):
        yield child, None
    elif isinstance(child, Union):
        for member in child.members:
            yield member, child
    elif isinstance(child, Turn):
        for inner in child.children:
            yield from _modules_of(inner)


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema. Its root module has no name, and every prompt imports the root's own text."""

    name: str
    root: Module
    file: str = field(default="", compare=False)

    def modules(self) -> Iterator[tuple[str, Module, Union | None]]:
        """Yield all modules in document order: the path, such as "plan/rome", the module, and its union or None."""
        waiting = [("", self.root, None)]
        ordered: list[tuple[str, Module, Union | None]] = []
        while waiting:
            path, module, union = waiting.pop()
            if path:
                ordered.append((path, module, union))
            inner = [(join(path, nested.name), nested, its_union) for nested, its_union in module.modules()]
            waiting.extend(reversed(inner))  # type: ignore[arg-type]
        yield from ordered


def join(path: str, name: str) -> str:
    """The path of a module inside the module at `path`."""
    return f"{path}/{name}" if path else name

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
    """Tokens that an argument may have; the parameter reserves this number of positions."""
    scaffold: str = ""
    """Text that stands there while the module is computed; the rest is filled with the placeholder token."""
    is_optional: bool = False
    """Whether a prompt may leave it empty."""
    recomputed: AfterArgument = "run"
    """The text of the module that is computed again after an argument: to the next tag, to the module's end, none."""
    place: Place = field(default_factory=_nowhere, compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Text that prompts import by name, and what is nested in it."""

    name: str
    children: tuple[Child, ...] = ()
    is_cached: bool = True
    """False: computed in every prompt, after what stands before it there."""
    scaffold: tuple[str, ...] = ()
    """Paths of modules after which it is computed where a prompt imports all of them."""
    first_k: int | None = None
    """Tokens at its beginning that are computed again where it is linked; None: as the method says."""
    place: Place = field(default_factory=_nowhere, compare=False)

    def modules(self) -> Iterator[tuple[Module, Union | None]]:
        """The modules directly in it, each with its union if it has one; turns do not nest names."""
        for child in self.children:
            yield from _modules_of(child)


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports one at most. All begin at the same position; the longest is its length."""

    members: tuple[Module, ...]
    scaffold: str | None = None
    """The member that Prompt Cache's code computes the rest of a schema with. Nothing depends on it here."""
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
    """A schema: its root has no name, and every prompt imports the root's own text."""

    name: str
    root: Module
    file: str = field(default="", compare=False)

    def modules(self) -> Iterator[tuple[str, Module, Union | None]]:
        """All modules in document order: the path, such as "plan/rome", the module, and its union."""
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

"""Schemas that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from foreword.pml.schema import Child, Module, Parameter, Text, Turn, Union

words = st.text("ab \t\n\r<>&\"']{\u00e9\U0001f600", min_size=1, max_size=6)
texts = words.map(Text)
names = st.sampled_from(["a", "B", "_", "c.py", "d-1", "user", "text", "use"])


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    after = draw(st.sampled_from(["none", "run", "module"]))
    scaffold = draw(st.just("") | words)
    return Parameter(draw(names), draw(st.integers(1, 99)), scaffold, draw(st.booleans()), after)  # type: ignore[arg-type]


@st.composite
def modules(draw: st.DrawFn, depth: int = 3, in_turn: bool = False) -> Module:
    inner = draw(children(depth - 1, in_module=True, in_turn=in_turn)) if depth else ()
    first_k = draw(st.none() | st.integers(0, 40))
    return Module(draw(names), inner, is_cached=draw(st.booleans()), first_k=first_k)


@st.composite
def children(draw: st.DrawFn, depth: int, *, in_module: bool = False, in_turn: bool = False) -> tuple[Child, ...]:
    kinds: list[st.SearchStrategy[Child]] = [texts]
    if depth > 0:
        kinds.append(modules(depth, in_turn))
        members = st.lists(modules(depth, in_turn), min_size=1, max_size=3, unique_by=lambda one: one.name)
        kinds.append(members.map(lambda found: Union(tuple(found))))
        if not in_turn:
            inner = children(depth - 1, in_module=in_module, in_turn=True)
            kinds.append(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), inner))
    if in_module:
        kinds.append(parameters())
    found: list[Child] = []
    seen: set[tuple[bool, str]] = set()
    for child in draw(st.lists(st.one_of(kinds), max_size=4)):
        if found and isinstance(child, Text) and isinstance(found[-1], Text):
            continue  # in a file these are one text
        taken = names_of((child,))
        if not taken & seen:
            found.append(child)
            seen |= taken
    return tuple(found)


def names_of(found: tuple[Child, ...]) -> set[tuple[bool, str]]:
    """The names that children take: of parameters, and of modules."""
    taken: set[tuple[bool, str]] = set()
    for child in found:
        if isinstance(child, Parameter | Module):
            taken.add((isinstance(child, Module), child.name))
        elif isinstance(child, Union):
            taken |= {(True, member.name) for member in child.members}
        elif isinstance(child, Turn):
            taken |= names_of(child.children)
    return taken

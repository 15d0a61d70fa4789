"""Check: reports on a schema's layout to the schema's author."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from foreword.pml.layout import Box, Choice, Layout, Run, Slot
from foreword.pml.schema import Union, without_turns

SEAM_CHARACTERS = 48
"""The number of characters on each side of a seam that are tokenized, to find out whether tokens would join."""
MOST_NEIGHBOURS = 4096
"""The most pairs of neighbouring texts that are tried. Two consecutive unions of 2,000 members have 4 million pairs."""


@dataclass(frozen=True, slots=True)
class Row:
    """A module's line in the report."""

    path: str
    """The module's path; "" for the schema's own text."""
    num_tokens: int
    """The number of tokens of the module's own text, including placeholders, without nested modules."""
    begin: int
    end: int
    """`begin` is the position of the module's first item, `end` the position after its last item."""
    room: int | None
    """The number of tokens that a prompt's text right after this module may have, if no other module follows; None: no
    limit."""
    parameters: tuple[tuple[str, int], ...]
    """Names of the module's parameters, with their lengths in tokens."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Two neighbouring texts that are tokenized separately, and would have other tokens as one text."""

    before: str
    """Path of the module whose text ends at the seam. `after` is the path of the module whose text begins there."""
    after: str
    text_before: str
    text_after: str


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """The results of `foreword pml check` for a schema."""

    name: str
    num_positions: int
    num_source_tokens: int
    """The number of tokens to compute once, so that every prompt of the schema finds its modules in the cache."""
    rows: tuple[Row, ...]
    shared: tuple[tuple[str, ...], ...]
    """Groups of modules, by path, whose texts are equal. Each group's text is computed once."""
    seams: tuple[Seam, ...]
    is_every_seam_known: bool
    """False: only the first MOST_NEIGHBOURS pairs of neighbouring texts were tried."""
    notes: tuple[str, ...]


def report_on(layout: Layout) -> SchemaReport:
    """Make a report on a schema that can be laid out."""
    rows = tuple(_rows(layout.root, ()))
    same: dict[tuple[int, ...], list[str]] = {}
    for path, box in layout.boxes.items():
        if path and box.own_ids:
            same.setdefault(box.own_ids, []).append(path)
    shared = tuple(tuple(paths) for paths in same.values() if len(paths) > 1)
    pairs = list(islice(_neighbours(layout.root, ()), MOST_NEIGHBOURS + 1))
    return SchemaReport(
        layout.schema.name,
        layout.num_positions,
        layout.num_source_tokens,
        rows,
        shared,
        tuple(_seams(layout, pairs[:MOST_NEIGHBOURS])),
        len(pairs) <= MOST_NEIGHBOURS,
        tuple(_notes(layout)),
    )


def _rows(box: Box, later: tuple[int, ...]) -> Iterator[Row]:
    """Yield the rows of a module and its nested modules.

    `later`: for each module around this one, the innermost first: the position at which its text continues after this
    module.
    """
    room = min((begin - box.end for begin in later if begin >= box.end), default=None)
    parameters = tuple((name, slot.parameter.length) for name, slot in box.slots.items())
    yield Row(box.path, len(box.own_ids), box.position, box.end, room, parameters)
    nexts: list[int | None] = [None]
    """From the last item to the first: the position of the first text or parameter at or after the item, or None."""
    for item in reversed(box.items):
        nexts.append(item.position if isinstance(item, Run | Slot) else nexts[-1])
    for item, fixed in zip(box.items, nexts[-2::-1], strict=True):
        if isinstance(item, Box | Choice):
            around = later if fixed is None else (fixed, *later)
            for inner in item.members if isinstance(item, Choice) else (item,):
                yield from _rows(inner, around)


_End = tuple[str, str]
"""A module's path and its text next to a seam."""


def _seams(layout: Layout, pairs: Sequence[tuple[_End, _End]]) -> Iterator[Seam]:
    encode = functools.cache(layout.text.encode)
    for (before, end), (after, begin) in pairs:
        if encode(end) + encode(begin) != encode(end + begin):
            yield Seam(before, after, end, begin)


def _neighbours(box: Box, ends: tuple[_End, ...]) -> Generator[tuple[_End, _End], None, tuple[_End, ...]]:
    """Yield pairs of texts that touch each other if all modules are imported.

    `ends`: the ends of the texts that may stand right before the box. Returns the ends that may stand right before the
    next item. Union members without text return the same ends, which are counted once: otherwise the number of ends
    would double with each union.
    """
    for item in box.items:
        if isinstance(item, Run):
            if item.text:
                for end in ends:
                    yield end, (box.path, item.text[:SEAM_CHARACTERS])
                ends = ((box.path, item.text[-SEAM_CHARACTERS:]),)
        elif isinstance(item, Slot):
            ends = ()  # an argument is always tokenized separately
        elif isinstance(item, Box):
            ends = yield from _neighbours(item, ends)
        else:
            seen: dict[int, tuple[_End, ...]] = {}
            for member in item.members:
                after = yield from _neighbours(member, ends)
                seen[id(after)] = after
            ends = tuple(dict.fromkeys(end for after in seen.values() for end in after)) if len(seen) > 1 else after
    return ends


def _notes(layout: Layout) -> Iterator[str]:
    for path, box in layout.boxes.items():
        for union in without_turns(box.module.children):
            if isinstance(union, Union) and union.scaffold is not None:
                name = union.scaffold
                yield f"line {union.place.line}: scaffold={name!r} of a union has no effect; name scaffolds in modules"
        if path and box.position == box.end:
            yield f"line {box.module.place.line}: the module {path!r} has no text"

"""Layout: the tokens and rotary positions of a schema's texts, parameters and modules.

One counter of positions runs through the document. The members of a union begin at the same position, and the item
after the union begins where its longest member ends:

    text   module a      union { b | c }         text
    0..4   4 ......10    10 ........ 18          18..20
                         b b b b b b b b   c c c . . . . .
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from foreword.errors import ChatTemplateError, SchemaError
from foreword.pml.composition import Source, TokenIds
from foreword.pml.markup import Place
from foreword.pml.schema import Child, Module, Parameter, Role, Schema, Text, Turn, Union, join

MAX_SCHEMA_TOKENS = 1 << 22
"""The most tokens of all modules and parameters of a schema together, and of the sources of one prompt."""


BOX_BYTES, ITEM_BYTES = 900, 350
"""Measured bytes of a module, and of an item in it (text, parameter, union), without names, texts and ids."""


@dataclass(frozen=True, slots=True)
class SchemaText:
    """The functions of a model's tokenizer and chat template that a layout needs."""

    encode: Callable[[str], TokenIds]
    """Returns the tokens of a text, without the tokens that the tokenizer adds to a prompt. Special tokens in the text
    are read as such."""
    opening: TokenIds
    """Tokens that begin every prompt and every source, such as the token for the beginning of a text."""
    placeholder_id: int
    """The token that fills parameters while their module is computed."""
    around: Callable[[Role | None, Role], tuple[str, str]]
    """Returns the texts before and after a message, given the roles of the previous message and of this message. For
    the first message, the previous role is None, and the text before the message does not contain the opening. Raises
    ChatTemplateError."""
    answer: Callable[[Role], str]
    """Returns the text that opens the assistant's answer after a message of this role. Raises ChatTemplateError."""
    max_token_characters: int | None = None
    """Characters of the longest token; None: not known."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a schema."""

    max_module_tokens: int | None = None
    """The most tokens of a module and its scaffold together, since one request computes both; None: no limit."""
    max_tokens: int = MAX_SCHEMA_TOKENS
    go_on: Callable[[], object] = lambda: None
    """Called before each text is tokenized. It may raise an error to end the work."""


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two tags."""

    text: str
    token_ids: TokenIds
    position: int
    offset: int
    """The number of tokens of the module's own text before this run."""

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Slot:
    """The positions that a parameter reserves."""

    parameter: Parameter
    placeholder_ids: TokenIds
    position: int
    offset: int
    """The number of tokens of the module's own text before this parameter."""

    @property
    def end(self) -> int:
        return self.position + self.parameter.length


@dataclass(frozen=True, slots=True)
class Box:
    """A module with its positions. The box at path "" has the schema's own text."""

    path: str
    module: Module
    items: tuple[Item, ...]
    position: int
    end: int
    """The position after the last item, whether a prompt imports that item or not."""
    own_ids: TokenIds
    """Tokens of the module's own text, with placeholders and without nested modules."""
    spoken: tuple[tuple[int, Role], ...]
    """Positions of the module's own texts in which messages begin, each with the role of the text's last message."""

    @property
    def slots(self) -> dict[str, Slot]:
        return {item.parameter.name: item for item in self.items if isinstance(item, Slot)}

    @property
    def boxes(self) -> dict[str, Box]:
        """The modules directly in this one, by name."""
        boxes: dict[str, Box] = {}
        for item in self.items:
            for box in item.members if isinstance(item, Choice) else (item,) if isinstance(item, Box) else ():
                boxes[box.module.name] = box
        return boxes


@dataclass(frozen=True, slots=True)
class Choice:
    """A union with its positions."""

    members: tuple[Box, ...]
    position: int
    end: int


Item = Run | Slot | Box | Choice


class Layout:
    """A schema in tokens and positions."""

    def __init__(self, schema: Schema, text: SchemaText, bounds: Bounds = Bounds()) -> None:
        """Raises SchemaError for a module or scaffold that is too long, or a message that the template cannot write."""
        self.schema, self.text = schema, text
        self.root = _Builder(text, bounds).box("", schema.root, 0, None)
        self.boxes: Mapping[str, Box] = {box.path: box for box in _all_boxes(self.root)}
        self._unions = _unions_of(self.root)
        if bounds.max_module_tokens is not None:
            self._check_lengths(bounds.max_module_tokens)

    def _check_lengths(self, limit: int) -> None:
        """Raise SchemaError if a source with its scaffold does not fit into one request."""
        for path, box in self.boxes.items():
            scaffold = sum(len(self.boxes[name].own_ids) for name in box.module.scaffold)
            num_tokens = len(box.own_ids) + (scaffold + len(self.text.opening) if path else 0)
            if num_tokens > limit:
                after = f" after a scaffold of {scaffold:,}" if scaffold else ""
                raise box.module.place.error(
                    SchemaError,
                    f"{_title(path)} has {len(box.own_ids):,} tokens{after}, and one request may have {limit:,}; "
                    "split it, shorten its parameters, or raise max_model_len if the model has more positions",
                )

    @property
    def num_positions(self) -> int:
        """The number of positions that the schema reserves."""
        return self.root.end

    def union_of(self, path: str) -> Choice | None:
        return self._unions.get(path)

    def source(self, path: str, imported: Mapping[str, object]) -> Source:
        """The source from which a module's text is linked, in a prompt that imports these paths.

        The source has the module's scaffold only if the whole scaffold is imported, so that a module that is left out
        has no influence.
        """
        own_ids = self.boxes[path].own_ids
        if not path:
            return Source(own_ids)  # its own text begins with the opening
        scaffold = self._scaffold(path, imported)
        before = self.text.opening + tuple(token_id for name in scaffold for token_id in self.boxes[name].own_ids)
        return Source(before + own_ids, len(before), path)

    def _scaffold(self, path: str, imported: Mapping[str, object]) -> tuple[str, ...]:
        scaffold = self.boxes[path].module.scaffold
        return scaffold if all(name in imported for name in scaffold) else ()

    def num_tokens_of_source(self, path: str, imported: Mapping[str, object]) -> int:
        """The number of tokens of a source, counted without making it."""
        own_tokens = len(self.boxes[path].own_ids)
        scaffold = sum(len(self.boxes[name].own_ids) for name in self._scaffold(path, imported))
        return own_tokens + scaffold + (len(self.text.opening) if path else 0)

    def sources(self) -> tuple[Source, ...]:
        """All sources that prompts of this schema may use, each once. They can be computed before the first prompt."""
        sources: dict[Source, None] = {}
        for path, box in self.boxes.items():
            if box.module.is_cached and box.own_ids:
                sources[self.source(path, {})] = None
                sources[self.source(path, self.boxes)] = None
        return tuple(sources)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Estimated memory of the schema and its layout, without the objects that all schemas share."""
        return sum(
            BOX_BYTES
            + 2 * sys.getsizeof(box.path)
            + 8 * len(box.own_ids)
            + sum(sys.getsizeof(name) for name in box.module.scaffold)
            + sum(ITEM_BYTES + _item_bytes(item) for item in box.items)
            for box in self.boxes.values()
        )

    @functools.cached_property
    def num_source_tokens(self) -> int:
        """The number of tokens of all sources. No source is made for the count.

        Making all sources would take much memory, because each source repeats the tokens of its scaffold.
        """
        number_of: dict[TokenIds, int] = {}
        number = {path: number_of.setdefault(box.own_ids, len(number_of)) for path, box in self.boxes.items()}
        counts: dict[tuple[bool, tuple[int, ...]], int] = {}
        for path, box in self.boxes.items():
            if box.module.is_cached and box.own_ids:
                for imported in ({}, self.boxes):
                    scaffold = tuple(number[name] for name in self._scaffold(path, imported))
                    key = bool(path), (*scaffold, number[path])
                    counts[key] = self.num_tokens_of_source(path, imported)
        return sum(counts.values())


class _Builder:
    """Gives items consecutive positions, and remembers the role of the last message."""

    def __init__(self, text: SchemaText, bounds: Bounds) -> None:
        self._text, self._bounds, self._limit = text, bounds, bounds.max_module_tokens
        self._num_tokens = 0
        self._role: Role | None = None
        self._began: Role | None = None
        """Role of the last message that has begun but whose text has no position yet; else None."""

    def box(self, path: str, module: Module, position: int, role: Role | None) -> Box:
        self._role = role
        begin = position
        items: list[Item] = []
        own_ids: list[int] = []
        spoken: list[tuple[int, Role]] = []
        if not path and self._text.opening:
            items.append(Run("", self._text.opening, 0, 0))
            own_ids += self._text.opening
            position += len(own_ids)
        for child in self._flat(module.children):
            item: Item
            if isinstance(child, str):
                self._bounds.go_on()
                self._check_characters(child, path, module)
                token_ids = self._text.encode(child)
                if not token_ids:
                    continue
                self._count(len(token_ids), module.place)
                item = Run(child, token_ids, position, len(own_ids))
                own_ids += token_ids
                if self._began is not None:
                    spoken.append((position, self._began))
                    self._began = None
            elif isinstance(child, Parameter):
                self._check_parameter(child)
                self._count(child.length, child.place)
                item = Slot(child, self._placeholders(child), position, len(own_ids))
                own_ids += item.placeholder_ids
            elif isinstance(child, Union):
                item = self._choice(path, child, position)
            else:
                item = self.box(join(path, child.name), child, position, self._role)
            items.append(item)
            position = item.end
        return Box(path, module, tuple(items), begin, position, tuple(own_ids), tuple(spoken))

    def _check_characters(self, text: str, path: str, module: Module) -> None:
        """Before a text is tokenized, refuse it if it cannot fit."""
        per_token = self._text.max_token_characters
        if self._limit is not None and per_token is not None and len(text) > self._limit * per_token:
            raise module.place.error(
                SchemaError,
                f"{_title(path)} has a text of {len(text):,} characters, and the {self._limit:,} tokens of one request "
                f"hold at most {self._limit * per_token:,}; split it, or raise max_model_len",
            )

    def _check_parameter(self, parameter: Parameter) -> None:
        """Before a parameter's placeholders are made, refuse the parameter if it cannot fit."""
        if self._limit is not None and parameter.length > self._limit:
            raise parameter.place.error(
                SchemaError,
                f"the parameter {parameter.name!r} has {parameter.length:,} tokens, and one request may have "
                f"{self._limit:,}; shorten it, or raise max_model_len",
            )

    def _count(self, num_tokens: int, place: Place) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens > self._bounds.max_tokens:
            raise place.error(SchemaError, f"the schema has more than {self._bounds.max_tokens:,} tokens; split it")

    def _choice(self, path: str, union: Union, position: int) -> Choice:
        role = self._role
        members = tuple(self.box(join(path, module.name), module, position, role) for module in union.members)
        return Choice(members, position, max(member.end for member in members))

    def _placeholders(self, parameter: Parameter) -> TokenIds:
        token_ids = self._text.encode(parameter.scaffold) if parameter.scaffold else ()
        if len(token_ids) > parameter.length:
            raise parameter.place.error(
                SchemaError,
                f"the scaffold of {parameter.name!r} has {len(token_ids)} tokens, and its length is "
                f"{parameter.length}; shorten the scaffold or raise the length",
            )
        return token_ids + (self._text.placeholder_id,) * (parameter.length - len(token_ids))

    def _flat(self, children: tuple[Child, ...]) -> Iterator[str | Parameter | Module | Union]:
        """Yield the children, with messages written out and texts that touch each other joined.

        This must be a generator: the text of a message depends on the role of the last message that was placed before
        it.
        """
        text = ""
        for piece in self._pieces(children):
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                yield text
                text = ""
            yield piece
        if text:
            yield text

    def _pieces(self, children: tuple[Child, ...]) -> Iterator[str | Parameter | Module | Union]:
        for child in children:
            if isinstance(child, Text):
                yield child.text
            elif not isinstance(child, Turn):
                yield child
            elif child.children:  # an empty message, such as <system/>, is left out
                try:
                    before, after = self._text.around(self._role, child.role)
                except ChatTemplateError as error:
                    raise child.place.error(SchemaError, f"<{child.role}> cannot be written: {error}") from error
                self._role = self._began = child.role
                yield before
                yield from self._pieces(child.children)
                yield after


def _item_bytes(item: Item) -> int:
    """Bytes of an item's texts and ids. A text counts twice: in the schema and in the layout."""
    if isinstance(item, Run):
        return 2 * sys.getsizeof(item.text) + 8 * len(item.token_ids)
    if isinstance(item, Slot):
        parameter = item.parameter
        return sys.getsizeof(parameter.name) + sys.getsizeof(parameter.scaffold) + 8 * len(item.placeholder_ids)
    return 0


def _title(path: str) -> str:
    return f"the module {path!r}" if path else "the schema's own text"


def _all_boxes(box: Box) -> Iterator[Box]:
    yield box
    for inner in box.boxes.values():
        yield from _all_boxes(inner)


def _unions_of(root: Box) -> dict[str, Choice]:
    return {
        member.path: item
        for box in _all_boxes(root)
        for item in box.items
        if isinstance(item, Choice)
        for member in item.members
    }

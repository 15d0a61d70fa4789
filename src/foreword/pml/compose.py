"""Compose: turns one prompt of a schema into parts with positions, or raises an error that says why it cannot.

Imported items keep the schema's order and positions, even if the prompt names them in another order. The prompt's own
text after a module begins after that module's last token, and may use the positions up to the next imported token:

    schema    a a a a a   b b b b b b   c c c
    prompt    a a a a a   x x x . . .   c c c   y y       x after <a/>, b left out, y after <c/>

Text after the last module stands after all imported parts.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from foreword.errors import ChatTemplateError, PMLError, PromptError
from foreword.pml.composition import Composition, Part, Span, TokenIds
from foreword.pml.layout import MAX_SCHEMA_TOKENS, Box, Choice, Layout, Run, Slot
from foreword.pml.markup import Place
from foreword.pml.prompt import PLACING, Message, ModulePrompt, Reference
from foreword.pml.schema import Role, Text

MAX_REFERENCES = 4096
MAX_COMPARED_CHARACTERS, MAX_COMPARED_NAMES = 64, 256
"""Limits for suggesting a known name in place of an unknown name: the longest and the most names to compare."""


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a prompt imports, with its arguments in tokens."""

    arguments: Mapping[str, TokenIds]
    place: Place


@dataclass(frozen=True, slots=True)
class Placing:
    """How the parts of a prompt get their positions."""

    positions: str = "schema"
    """"schema" keeps the schema's positions, and text that does not fit is an error. "shift" moves later parts on as
    far as text needs. "dense" leaves no gaps, so that positions are indices."""
    trailing: str = "last"
    """Where text after the last module begins: after the last part ("last"), or after all positions that the schema
    reserves ("schema")."""

    def __post_init__(self) -> None:
        """Raises PromptError for unknown values."""
        for name, choices in PLACING.items():
            if getattr(self, name) not in choices:
                raise PromptError(f"{name}={getattr(self, name)!r} is unknown; use {' or '.join(choices)}")


def compose(layout: Layout, prompt: ModulePrompt, placing: Placing | None = None) -> Composition:
    """Make the composition of a prompt. Raises PromptError."""
    placing = Placing(**{**asdict(placing or Placing()), **prompt.placing})
    if prompt.schema_name not in (None, layout.schema.name):
        raise prompt.place.error(
            PromptError, f"the prompt is for schema {prompt.schema_name!r}, and this one is {layout.schema.name!r}"
        )
    imports = _Imports(layout, prompt).imports
    items = _Items(layout, imports).parts
    texts = _Texts(layout, prompt, imports, items)
    return Composition(tuple(_place(items, texts.inserted, placing, layout.num_positions)))


# ---------------------------------------------------------------------------------------------------- imports


class _Imports:
    """Checks the imports of a prompt against the schema."""

    def __init__(self, layout: Layout, prompt: ModulePrompt) -> None:
        self._layout = layout
        self.imports: dict[str, Import] = {}
        flat = [inner for reference in references(prompt) for inner in reference.flat()]
        if len(flat) > MAX_REFERENCES:
            raise prompt.place.error(PromptError, f"the prompt names {len(flat):,} modules; at most {MAX_REFERENCES:,}")
        for reference in flat:
            self._add(reference)
        for path, imported in list(self.imports.items()):
            self._add_modules_around(path, imported.place)
        for path, imported in self.imports.items():
            self._check_arguments(path, imported)
            self._check_union(path, imported)

    def _add(self, reference: Reference) -> None:
        path, place = reference.path, reference.place
        box = self._layout.boxes.get(path) if path else None
        if box is None:
            raise place.error(PromptError, f"the schema has no module {path!r}{_near(path, list(self._layout.boxes))}")
        if path in self.imports:
            raise place.error(PromptError, f"the module {path!r} is imported twice; import it once")
        slots = box.slots
        arguments: dict[str, TokenIds] = {}
        for name, text in reference.arguments.items():
            if name not in slots:
                remedy = f"; it has: {', '.join(slots)}" if slots else "; it has none"
                raise place.error(PromptError, f"the module {path!r} has no parameter {name!r}{remedy}")
            arguments[name] = token_ids = self._layout.text.encode(text) if text else ()
            length = slots[name].parameter.length
            if len(token_ids) > length:
                raise place.error(
                    PromptError,
                    f"the argument {name!r} of {path!r} has {len(token_ids)} tokens, and there is room for {length}; "
                    "shorten it, or raise the parameter's length",
                )
        self.imports[path] = Import(arguments, place)

    def _add_modules_around(self, path: str, place: Place) -> None:
        while "/" in path:
            path = path.rpartition("/")[0]
            self.imports.setdefault(path, Import({}, place))

    def _check_arguments(self, path: str, imported: Import) -> None:
        for name, slot in self._layout.boxes[path].slots.items():
            if name not in imported.arguments and not slot.parameter.is_optional:
                raise imported.place.error(
                    PromptError,
                    f"the module {path!r} needs an argument {name!r} of up to {slot.parameter.length} tokens; give "
                    'one, or make the parameter optional="true"',
                )

    def _check_union(self, path: str, imported: Import) -> None:
        union = self._layout.union_of(path)
        if union is None:
            return
        others = [member.path for member in union.members if member.path in self.imports and member.path != path]
        if others:
            raise imported.place.error(
                PromptError, f"{path!r} and {others[0]!r} are members of one union; import one of them"
            )


def references(prompt: ModulePrompt) -> list[Reference]:
    """The modules that a prompt names, in the prompt's order, without their nested modules."""
    named: list[Reference] = []
    for child in prompt.children:
        inner = child.children if isinstance(child, Message) else (child,)
        named += [node for node in inner if isinstance(node, Reference)]
    return named


def _near(path: str, paths: Sequence[str]) -> str:
    names = [name for name in paths if name]
    # Comparing two names takes time proportional to the product of their lengths, so long names are not compared.
    short = [name for name in names if len(name) <= MAX_COMPARED_CHARACTERS][:MAX_COMPARED_NAMES]
    near = difflib.get_close_matches(path, short, n=1) if len(path) <= MAX_COMPARED_CHARACTERS else []
    # The likeliest mistake is the name of a nested module without the path before it.
    near = [name for name in names if name.endswith(f"/{path}")][:1] or near
    if near:
        return f"; there is {near[0]!r}"
    return f"; it has: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "; it has none"


# ------------------------------------------------------------------------------------------------------ items


class _Items:
    """The imported runs and arguments of a schema as parts, in the schema's order."""

    def __init__(self, layout: Layout, imports: Mapping[str, Import]) -> None:
        self._layout, self._imports = layout, imports
        num_tokens = sum(layout.num_tokens_of_source(path, imports) for path in imports)
        if num_tokens > MAX_SCHEMA_TOKENS:
            raise PromptError(
                f"the prompt's modules, each with its scaffold, have {num_tokens:,} tokens; at most "
                f"{MAX_SCHEMA_TOKENS:,} are taken, import fewer"
            )
        self.parts: list[Part] = []
        self._add(layout.root)

    def _add(self, box: Box) -> None:
        source = self._layout.source(box.path, self._imports)
        begin = len(source.token_ids) - len(box.own_ids)
        after: str | None = None
        """Where the text that counts as after an argument ends: at the next tag ("run"), or at the module's end
        ("module")."""
        for item in box.items:
            if isinstance(item, Run):
                size = len(item.token_ids)
                span = Span(source, begin + item.offset, begin + item.offset + size) if box.module.is_cached else None
                self.parts.append(
                    Part(
                        item.token_ids,
                        item.position,
                        "module" if box.path else "text",
                        box.path,
                        span,
                        num_after_argument=size if after and span else 0,
                        first_k=box.module.first_k if span else None,
                    )
                )
            elif isinstance(item, Slot):
                self._add_argument(box, item)
                after = _stronger(after, item.parameter.recomputed)
                continue
            else:
                for inner in item.members if isinstance(item, Choice) else (item,):
                    if inner.path in self._imports:
                        self._add(inner)
            after = after if after == "module" else None

    def _add_argument(self, box: Box, slot: Slot) -> None:
        token_ids = self._imports[box.path].arguments.get(slot.parameter.name, ())
        if token_ids:
            self.parts.append(Part(token_ids, slot.position, "argument", f"{box.path}:{slot.parameter.name}"))


def _stronger(before: str | None, now: str) -> str | None:
    if before == "module" or now == "none":
        return before
    return now


# ------------------------------------------------------------------------------------------------------ texts


@dataclass(slots=True)
class Inserted:
    """Text that the prompt puts right before the part with index `number`."""

    number: int
    pieces: list[str]
    name: str
    """Path of the module that the text follows, for errors."""
    place: Place
    token_ids: TokenIds = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class _Texts:
    """Finds the places of a prompt's own texts among the imported parts. Texts that touch each other are joined."""

    def __init__(
        self, layout: Layout, prompt: ModulePrompt, imports: Mapping[str, Import], parts: Sequence[Part]
    ) -> None:
        self._layout, self._parts = layout, parts
        self._positions = [part.position for part in parts]
        self._spoken = sorted(turn for path in ("", *imports) for turn in layout.boxes[path].spoken)
        self._last_part = _last_parts(parts)
        self.inserted: list[Inserted] = []
        modules = references(prompt)
        self._check_order(prompt, modules)
        self._last = modules[-1] if modules else None
        self._number = self._first_number(modules)
        self._name = ""
        self._last_message: tuple[int, Role] | None = None
        """The prompt's own last message: the number of parts before it, and its role."""
        for child in prompt.children:
            if isinstance(child, Message):
                self._add_message(child)
            else:
                self._add(child)
        self._open_answer(prompt)
        for text in self.inserted:
            text.token_ids = layout.text.encode(text.text)

    def _check_order(self, prompt: ModulePrompt, modules: Sequence[Reference]) -> None:
        """Raise PromptError if text stands between modules that the prompt names in another order than the schema."""
        has_text_between = any(not isinstance(child, Reference) for child in prompt.children[:-1])
        last = prompt.children[-1] if prompt.children else None
        holds_references = isinstance(last, Message) and any(isinstance(node, Reference) for node in last.children)
        if has_text_between or holds_references:
            begins = [self._layout.boxes[module.path].position for module in modules]
            for module, before, after in zip(modules[1:], begins, begins[1:], strict=False):
                if after < before:
                    raise module.place.error(
                        PromptError,
                        f"the module {module.path!r} stands earlier in the schema than the one before it here, so text "
                        "between them has no place; name the modules in the schema's order",
                    )

    def _first_number(self, modules: Sequence[Reference]) -> int:
        """The index of the part before which the prompt's first text stands.

        The text comes after the schema's own text that stands before the first module.
        """
        if not modules:
            return len(self._parts)
        return bisect_left(self._positions, self._layout.boxes[modules[0].path].position)

    def _add(self, child: Text | Reference) -> None:
        if isinstance(child, Text):
            self._insert(child.text, child.place)
            return
        self._name = child.path
        if child is self._last:
            self._number = len(self._parts)
            return
        last = self._last_part.get(child.path)
        begin = self._layout.boxes[child.path].position
        self._number = bisect_left(self._positions, begin) if last is None else last + 1

    def _insert(self, text: str, place: Place) -> None:
        if not text:
            return
        if self.inserted and self.inserted[-1].number == self._number:
            self.inserted[-1].pieces.append(text)
        else:
            self.inserted.append(Inserted(self._number, [text], self._name, place))

    def _add_message(self, message: Message) -> None:
        if not message.children:
            return
        try:
            before, after = self._layout.text.around(self._role_so_far(), message.role)
        except ChatTemplateError as error:
            raise message.place.error(PromptError, f"<{message.role}> cannot be written: {error}") from error
        self._last_message = self._number, message.role
        self._insert(before, message.place)
        for child in message.children:
            self._add(child)
        self._insert(after, message.place)

    def _role_so_far(self) -> Role | None:
        """The role of the last message, of the schema or the prompt, before the place of the next text."""
        number, role = self._last_message or (0, None)
        begin = self._parts[number - 1].position if number else -1
        end = self._parts[self._number - 1].position if self._number else -1
        num_before = bisect_right(self._spoken, end, key=lambda turn: turn[0])
        if num_before and self._spoken[num_before - 1][0] > begin:
            return self._spoken[num_before - 1][1]
        return role

    def _open_answer(self, prompt: ModulePrompt) -> None:
        """Open the assistant's answer if the last message is another role's, and no text stands after all messages."""
        self._number = len(self._parts)
        role = self._role_so_far()
        if role is None or role == "assistant" or (prompt.children and isinstance(prompt.children[-1], Text)):
            return
        try:
            self._insert(self._layout.text.answer(role), prompt.place)
        except ChatTemplateError as error:
            raise prompt.place.error(PromptError, f"the answer cannot be opened: {error}") from error


def _last_parts(parts: Sequence[Part]) -> dict[str, int]:
    """For each module, the index of the last part in it or in a nested module."""
    last: dict[str, int] = {}
    for number, part in enumerate(parts):
        path = part.name.partition(":")[0]
        while path:
            last[path] = number
            path = path.rpartition("/")[0]
    return last


# -------------------------------------------------------------------------------------------------- positions


def _place(parts: Sequence[Part], inserted: Sequence[Inserted], placing: Placing, schema_end: int) -> list[Part]:
    """Put parts and texts in order, and give them their final positions."""
    placed: list[Part] = []
    cursor = shift = 0
    waiting = [text for text in inserted if text.token_ids]
    last: Inserted | None = None
    for number in range(len(parts) + 1):
        if number == len(parts) and placing.trailing == "schema" and placing.positions != "dense":
            cursor = max(cursor, schema_end + shift)
        while waiting and waiting[0].number == number:
            last = waiting.pop(0)
            placed.append(Part(last.token_ids, cursor, "text"))
            cursor = placed[-1].end
        if number == len(parts):
            break
        part = parts[number]
        at = cursor if placing.positions == "dense" else part.position + shift
        if at < cursor:
            if placing.positions == "schema":
                assert last is not None  # parts of a schema do not overlap
                raise _no_room(last, part, max(len(last.token_ids) - (cursor - at), 0))
            shift += cursor - at
            at = cursor
        placed.append(replace(part, position=at))
        cursor = placed[-1].end
    return placed


def _no_room(text: Inserted, part: Part, room: int) -> PMLError:
    after = f"after module {text.name!r}" if text.name else "at the beginning"
    before = f"module {part.name!r}" if part.name else "the schema's own text"
    return text.place.error(
        PromptError,
        f"the text {after} has {len(text.token_ids)} tokens, and {room} fit before {before}; shorten it, leave a "
        'module out, or let later parts move with positions="shift"',
    )

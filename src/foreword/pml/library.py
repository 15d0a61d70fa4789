"""Library: loads schemas for one model, and makes their prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import PMLError, PMLSyntaxError, PromptError
from foreword.pml.compose import Placing, compose
from foreword.pml.composition import Composition, Source, TokenIds
from foreword.pml.layout import Bounds, Layout, SchemaText
from foreword.pml.markup import MAX_BYTES, Place
from foreword.pml.prompt import ModulePrompt, looks_like_xml, prompt_of, read_prompt
from foreword.pml.schema import Schema, read_schema

logger = logging.getLogger(__name__)

TEXT_NAME = "<schema>"
"""The name, in errors, of a schema without a file."""

NAMED = 10
"""The most texts that a warning names."""
Keep = Callable[[TokenIds, float, str | None], int]
"""Computes tokens as an ordinary request and keeps them for a number of seconds, under a salt. Returns the number of
kept tokens."""


@dataclass(frozen=True)
class SchemaPrompt:
    """A prompt of a schema's modules, ready for `LLM.generate`."""

    composition: Composition
    """The prompt's tokens with their positions, and the sources from which they can be linked."""
    schema_name: str
    modules: tuple[str, ...]
    """Paths of the imported modules that have text, in order."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The plain prompt: the same tokens without gaps, [tokens]. The engine runs it if nothing is linked."""
        return self.composition.token_ids


class LoadedSchema:
    """A schema laid out for one model."""

    def __init__(self, layout: Layout, keep: Keep | None = None, block_size: int = 1) -> None:
        self.layout = layout
        self.num_tokens = sum(len(box.own_ids) for box in layout.boxes.values())
        """The number of tokens of the schema's modules, including placeholders of parameters."""
        self._keep, self._block_size = keep, block_size

    @property
    def name(self) -> str:
        return self.layout.schema.name

    @property
    def sources(self) -> tuple[Source, ...]:
        """The token sequences that are computed for the modules. Ordinary prompts find them in the cache too."""
        return self.layout.sources()

    def prompt(
        self,
        prompt: Mapping[str, Any] | str = "",
        *,
        text: str = "",
        messages: Mapping[str, str] | None = None,
        positions: str = "schema",
        trailing: str = "last",
    ) -> SchemaPrompt:
        """Make a prompt from modules by name, or from PML text. Raises PMLSyntaxError or PromptError.

        A mapping has, for each module, a mapping of its parameters to texts and of its nested modules to mappings:
        `{"plan": {"duration": "3 days", "rome": {}}}`. `text` follows the modules; `messages` are texts by role. A PML
        text begins with `<prompt schema=...>`, and has text and messages itself. `positions` and `trailing`: see
        `Placing`.
        """
        if isinstance(prompt, str) and prompt:
            if text or messages:
                raise PromptError("text or messages are given beside a PML text; write them into it")
            modules = read_prompt(prompt)
        else:
            modules = prompt_of(prompt or {}, text=text, messages=messages)
        return self._composed(modules, Placing(positions, trailing))

    def read_prompt(self, file: str | Path) -> SchemaPrompt:
        """Make the prompt of a PML file. Raises PMLError, with file, line and column."""
        content = _read(Path(os.path.expanduser(file)), MAX_BYTES, Place(str(file)))
        return self._composed(read_prompt(content, str(file)), Placing())

    def _composed(self, prompt: ModulePrompt, placing: Placing) -> SchemaPrompt:
        composition = compose(self.layout, prompt, placing)
        paths = (part.name.partition(":")[0] for part in composition.parts if part.name)
        return SchemaPrompt(composition, self.name, tuple(dict.fromkeys(paths)))

    def compile(self, pin_ttl_s: float = 300.0, *, cache_salt: str | None = None) -> int:
        """Compute all sources now and keep them for `pin_ttl_s` seconds; returns the number of tokens kept.

        Each source is an ordinary request with ordinary keys, so this changes no answer. Without this call, sources are
        computed when the first prompt needs them. Only whole blocks are kept and linked: a warning names the sources
        without a whole block. Raises the errors of `LLM.pin_prefix`.
        """
        assert self._keep is not None
        if short := [source for source in self.sources if len(source.token_ids) < self._block_size]:
            logger.warning(
                "%d of %d texts of schema %r are shorter than a block (%d tokens), so they are not kept and never "
                "linked: %s; load the model with a block_size of at most %d, or join short modules",
                len(short),
                len(self.sources),
                self.name,
                self._block_size,
                ", ".join(f"{source.name or '(schema)'} ({len(source.token_ids)})" for source in short[:NAMED]),
                min(len(source.token_ids) for source in short),
            )
        return sum(self._keep(source.token_ids, pin_ttl_s, cache_salt) for source in self.sources)


@dataclass(frozen=True)
class Library:
    """Loads schemas for one model."""

    text: SchemaText
    keep: Keep | None = field(default=None, repr=False)
    bounds: Bounds = field(default_factory=Bounds)
    block_size: int = 1
    """The number of tokens in a block of the engine. Of each text, only whole blocks are kept."""

    def load(self, source: str | Path, *, include: str | Path | None = None) -> LoadedSchema:
        """Load the schema of a file, or of a text that begins with `<`.

        `include` is the folder whose files a module may name in `src`; without it, `src` is refused. Raises
        PMLSyntaxError or SchemaError, with file, line and column.
        """
        return self._laid_out(load_schema(source, include))

    def load_text(self, text: str) -> LoadedSchema:
        """Load the schema of a text, which cannot name files. Raises the same errors as `load`."""
        return self._laid_out(read_schema(text, TEXT_NAME, _Included(None, 0).read))

    def _laid_out(self, schema: Schema) -> LoadedSchema:
        return LoadedSchema(Layout(schema, self.text, self.bounds), self.keep, self.block_size)


def load_schema(source: str | Path, include: str | Path | None = None) -> Schema:
    """Read the schema of a file, or of a text that begins with `<`, without a tokenizer. Errors: see `Library.load`."""
    if not isinstance(source, str | Path):
        raise PMLError(f"{source!r:.60} is neither a path nor a text of PML")
    content: str | bytes
    if isinstance(source, str) and looks_like_xml(source):
        name, content = TEXT_NAME, source
        num_bytes = len(source.encode("utf-8", "surrogatepass"))
    else:
        name = str(source)
        content = _read(Path(os.path.expanduser(source)), MAX_BYTES, Place(name))
        num_bytes = len(content)
    folder = None if include is None else Path(os.path.expanduser(include))
    if folder is not None and not folder.is_dir():
        raise PMLError(f"include={str(include)!r} is no folder; name the one that holds the files of src")
    return read_schema(content, name, _Included(folder, MAX_BYTES - num_bytes).read)


class _Included:
    """Reads the files that `src` names, and no others."""

    def __init__(self, folder: Path | None, num_bytes_left: int) -> None:
        self._folder, self._num_bytes_left = folder, num_bytes_left

    def read(self, name: str, place: Place) -> str:
        if self._folder is None:
            raise place.error(
                PMLError, f"src={name!r} needs a folder; give --include (include= in Python), the folder of such files"
            )
        parts = name.split("/")
        if not name or any(part in ("", ".", "..") for part in parts) or set(name) & set("\\:\0"):
            raise place.error(PMLError, f"src={name!r} leaves the folder of included files; name a file inside it")
        folder = self._folder.resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise place.error(PMLError, f"src={name!r} is a link out of the folder of included files; copy the file")
        content = _read(path, self._num_bytes_left, place, name)
        self._num_bytes_left -= len(content)
        try:
            return content.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise place.error(PMLSyntaxError, f"src={name!r} is not UTF-8; save it as UTF-8") from error


def _read(path: Path, most_bytes: int, place: Place, name: str = "") -> bytes:
    """Read the bytes of a regular file. `name` is the file's name in a schema, for errors. Raises PMLError."""
    subject = f"src={name!r}" if name else f"the file {str(path)!r}"
    try:
        # A pipe or a device could block forever.
        content = None
        if path.is_file() or not path.exists():
            with path.open("rb") as file:
                content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise place.error(PMLError, f"{subject} cannot be read: {reason}") from error
    if content is None:
        raise place.error(PMLError, f"{subject} is not a regular file; name one")
    if len(content) > most_bytes:
        raise place.error(
            PMLSyntaxError, f"{subject} is too large: a schema and its files may have {MAX_BYTES:,} bytes; split it"
        )
    return content

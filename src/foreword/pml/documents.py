"""Documents and a question: a prompt whose documents can stand in any order, without a schema.

The prompt is

    opening   instructions   document 1   document 2   ...   question

Each document's source is the opening, the instructions and that document. So each document is computed after the
beginning that all prompts share. Models pay much attention to the first tokens of a prompt, and these are never a
document's tokens. Also, the first document's KV is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.errors import InvalidRequestError
from foreword.pml.composition import Composition, Source, TokenIds, concatenated
from foreword.pml.layout import SchemaText

FIELDS = frozenset({"documents", "question", "instructions", "separator"})
SEPARATOR = "\n\n"
"""The text after the instructions and after each document."""
MAX_TOKEN_ID = 2**31 - 1
Encode = Callable[[str], TokenIds]


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """The tokens of a prompt of documents, in pieces: head, documents, question."""

    head: TokenIds
    """The opening and the instructions."""
    documents: tuple[TokenIds, ...]
    question: TokenIds

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the plain prompt."""
        return [token_id for piece in (self.head, *self.documents, self.question) for token_id in piece]

    @property
    def num_source_tokens(self) -> int:
        """The number of tokens of all sources. Each source has the head, so the head counts once for each document."""
        return sum(len(self.head) + len(document) for document in self.documents)

    def composition(self) -> Composition:
        sources = [
            Source(self.head + document, len(self.head), str(number)) for number, document in enumerate(self.documents)
        ]
        return concatenated([self.head, *sources, self.question])


def read_documents(prompt: Mapping[str, Any], text: SchemaText | None) -> DocumentTokens:
    """Read `{"documents": [...], "question": ...}`, optionally with "instructions" and "separator", as tokens.

    Each piece is a text, or a list of token ids, to which no separator is added. `text` is None without a tokenizer;
    all pieces must then be token ids, from 0 to the largest int32. Raises InvalidRequestError for other values.
    """
    encode = _no_tokenizer if text is None else text.encode
    documents, separator = prompt["documents"], prompt.get("separator", SEPARATOR)
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise InvalidRequestError(f"documents must be a list of texts, not {documents!r:.60}; give [text, ...]")
    if not isinstance(separator, str):
        raise InvalidRequestError(f"separator must be a text, not {separator!r:.60}")
    question = _tokens("question", prompt.get("question"), encode, "")
    head = (() if text is None else text.opening) + _tokens(
        "instructions", prompt.get("instructions", ()), encode, separator
    )
    read = (_tokens(f"document {number}", document, encode, separator) for number, document in enumerate(documents))
    return DocumentTokens(head, tuple(read), question)


def compose_documents(prompt: Mapping[str, Any], text: SchemaText | None) -> Composition:
    """Make the composition of documents and a question. Raises the same errors as `read_documents`."""
    return read_documents(prompt, text).composition()


def _no_tokenizer(text: str) -> TokenIds:
    raise InvalidRequestError(f"the model has no tokenizer, which the text {text!r:.60} needs; give token ids")


def _tokens(name: str, value: Any, encode: Encode, separator: str) -> TokenIds:
    """The tokens of a text and its separator, or the token ids that were given."""
    if isinstance(value, str):
        return tuple(encode(value + separator))
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes)
    if not is_list or not all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in value):
        raise InvalidRequestError(f"{name} must be a text or a list of token ids, not {value!r:.60}")
    for token_id in (min(value), max(value)) if len(value) else ():
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError(f"{name} has the token id {token_id}; give ids from 0 to {MAX_TOKEN_ID}")
    return tuple(int(token_id) for token_id in value)

"""Grammars: schemas and regular expressions as masks over tokens.

A constraint never fails a step: if the grammar gives up, it allows no token, which ends the answer. Nested schemas are
compiled on a thread with a large stack, because a stack overflow would end the process without an exception.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError
from foreword.request import StructuredOutputsParams, TokenConstraint

STACK_BYTES = 256 * 2**20
"""Bytes of address space for the thread's stack; only the used part takes memory."""
T = TypeVar("T")
_starting = threading.Lock()
MAX_KEPT_BYTES = 64 * 2**20
MAX_KEPT = 64
BYTES_PER_CHARACTER = 256
"""Bytes that llguidance needs for each character of a source. Measured: 60 for properties of objects, 90 for patterns,
240 for nested objects.
"""
LEAST_BYTES = 64 * 1024
logger = logging.getLogger(__name__)
Kind = Literal["json", "regex", "choice", "grammar", "lark"]
_NAMES = {"json": "JSON schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "lark": "grammar"}
MAX_SOURCE_CHARACTERS = 128 * 1024
"""Most characters of a schema or grammar. Compiling a text of this length takes about a second and 32 MB."""
MAX_COMPLAINT = 300
"""Most characters of a message about an error in a grammar."""
MAX_LEXER_STATES = 25_000
"""Most lexer states of one grammar; a state takes 1 to 2 KB. llguidance's own limit is ten times as high."""
_BROKEN: dict[str, tuple[str, ...]] = {
    "unclosed group": (),
    "unopened group": (),
    "unclosed character class": ("[^]", "[]", "[["),
    "repetition operator missing expression": ("{", "(?"),
    "invalid repetition count range": (),
}
"""Fault, in llguidance's words -> texts. If a pattern that llguidance rejects for this fault contains one of the texts,
the pattern may still be valid in another dialect."""


def with_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a large stack. Returns its result, or raises its error."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the waiting thread raises it
            result.set_exception(error)

    thread = threading.Thread(target=run, name="foreword-deep-stack", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result.result()


class KeptGrammars:
    """The most recently used grammars. Belongs to one thread at a time."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.num_bytes = 0
        """The bytes of all kept grammars, estimated from their sources."""
        self._max_bytes = max_bytes
        self._matchers: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def get(self, kind: str, source: str) -> Any:
        """The compiled grammar of a source; None if it is not kept."""
        matcher = self._matchers.get((kind, source))
        if matcher is not None:
            self._matchers.move_to_end((kind, source))
        return matcher

    def keep(self, kind: str, source: str, compiled: Any) -> None:
        """Keep the compiled grammar of a source. The least recently used grammars are dropped to make room."""
        self._matchers[kind, source] = compiled
        self.num_bytes += _num_bytes(source)
        while len(self._matchers) > MAX_KEPT or self.num_bytes > self._max_bytes:
            (_, dropped), _ = self._matchers.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


def _num_bytes(source: str) -> int:
    return LEAST_BYTES + BYTES_PER_CHARACTER * len(source)


class Grammars:
    """Compiles grammars to constraints for one tokenizer."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json` is the definition of a fast tokenizer; `vocab_size` the width of the model's logits."""
        eos = sorted(eos_token_ids)
        num_tokens = llguidance.LLTokenizer(tokenizer_json, eos_token=eos).vocab_size
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=max(num_tokens, vocab_size), eos_token=eos)
        self.vocab_size = vocab_size
        self.eos_token_ids = np.array(eos, np.int64)
        self._limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        self.kept = KeptGrammars()

    def lark(self, grammar: str) -> Callable[[], TokenConstraint]:
        """Return a function that makes constraints by a Lark grammar.

        Raises InvalidRequestError for an unusable grammar.
        """
        return self._open("lark", grammar)

    def open(self, params: StructuredOutputsParams) -> Callable[[], TokenConstraint]:
        """Return a function that makes constraints by the schema, regular expression or grammar of these parameters.

        Raises InvalidRequestError if the schema, expression or grammar is unusable.
        """
        if params.json is not None:
            return self._open("json", json.dumps(params.json))
        if params.regex is not None:
            return self._open("regex", params.regex)
        if params.choice is not None:
            return self._open("choice", json.dumps(params.choice))
        if params.grammar is not None:
            return self._open("grammar", params.grammar)
        return self._open("json", '{"type": "object"}')

    @staticmethod
    def can_follow(pattern: str) -> bool:
        """Whether grammars support this regular expression. They have no look-around and no back-references."""
        complaint: str = llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("regex", pattern))
        return not complaint

    @staticmethod
    def is_broken(pattern: str) -> bool:
        """Whether a regular expression is invalid in every dialect, as `(` is. False: it is valid, or not supported."""
        complaint: str = llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("regex", pattern))
        return any(
            f"error: {name}" in complaint and not any(text in pattern for text in elsewhere)
            for name, elsewhere in _BROKEN.items()
        )

    def _open(self, kind: Kind, source: str) -> Callable[[], TokenConstraint]:
        matcher = self.kept.get(kind, source)
        if matcher is None:
            # The compiler recurses along chains of references: 1,000 references overflow a usual stack.
            matcher = with_deep_stack(lambda: self._compile(kind, source))
            self.kept.keep(kind, source, matcher)
        return _Opener(self, kind, source, matcher)

    def _compile(self, kind: Kind, source: str) -> Any:
        """Compile a matcher that has read no token. Each answer gets a copy of it."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequestError(
                f"the {_NAMES[kind]} has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are taken, write a "
                "shorter one"
            )
        try:
            if kind == "json":  # with free white space a small model never stops
                grammar = llguidance.LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_flexible": False})
            else:
                grammar = llguidance.grammar_from(kind, source)
        except (ValueError, UnicodeError) as error:
            raise InvalidRequestError(f"the {_NAMES[kind]} cannot be followed: {_brief(str(error))}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask may take seconds, or fail: not in the engine's step
        if matcher.is_error():
            raise InvalidRequestError(f"the {_NAMES[kind]} cannot be followed: {_brief(matcher.get_error())}")
        return matcher


@dataclass(frozen=True, slots=True)
class _Opener:
    """Makes constraints by one grammar. Unpickling compiles the grammar for the tokenizer of the process."""

    grammars: Grammars
    kind: Kind
    source: str
    matcher: Any

    def __call__(self) -> TokenConstraint:
        return _Constraint(self.matcher.deep_copy(), self.grammars.vocab_size, self.grammars.eos_token_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.grammars._open, (self.kind, self.source)


def _brief(complaint: str) -> str:
    """llguidance's message, which may repeat a whole grammar, shortened for use inside another message."""
    words = " ".join(complaint.split())
    return words if len(words) <= MAX_COMPLAINT else f"{words[:MAX_COMPLAINT]}..."


class _Constraint:
    """One answer's position in a grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: npt.NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._num_read = 0

    def fork(self) -> TokenConstraint:
        forked = _Constraint(self._matcher.deep_copy(), self._vocab_size, self._eos)
        forked._num_read = self._num_read
        return forked

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(output_token_ids[self._num_read :]))
            self._num_read = len(output_token_ids)
        if not self._matcher.is_stopped():
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(np.bool_)
            if allowed.any() and not self._matcher.is_error():
                return allowed
        allowed = np.zeros(self._vocab_size, np.bool_)
        if self._matcher.is_error():
            logger.warning("a grammar gave up: %s", _brief(self._matcher.get_error()))
        else:
            allowed[self._eos] = True
        return allowed

"""What a front and its replicas say to each other, and the bytes of a request.

A request may hold constraints, which hold the tokenizer and its grammars. Those are not sent: a pickled request names
them, and the replica puts its own in their place.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from foreword import __version__
from foreword.engine import Engine, Prompt
from foreword.errors import InvalidRequestError
from foreword.grammar import Grammars
from foreword.llm import LLM
from foreword.request import Adapter, RequestOutput, SamplingParams
from foreword.server.answer_stream import Delta, Shown
from foreword.server.api_errors import APIError, adapter_unread
from foreword.server.verbs import VERBS, T, Ts, Verb
from foreword.text import Tokenizer

if TYPE_CHECKING:
    from foreword.model.adapters.loaded import LoadedAdapters
    from foreword.model.adapters.weights import AdapterName

logger = logging.getLogger(__name__)

UNKNOWN_VERB = "unknown_verb"
"""Code of what a replica refuses because another version of foreword asks it, or answers in a form unknown here."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for one replica."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    """With a seed, so that another replica can go on."""
    answered: tuple[Shown, ...] = ()
    """For each choice, what clients already have."""
    is_streamed: bool = True
    """Whether somebody waits for each token; otherwise tokens are sent in larger pieces."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The replica's engine has queued the request."""


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The first token has come."""

    output: RequestOutput
    """Without tokens."""
    num_queued_s: float
    """Seconds from the request's arrival at the replica to its first step."""
    clock: float
    """The replica's engine time, by which entries end."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica cannot answer the request: an `APIError` in pieces."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: APIError) -> Refused:
        """The pieces of an error."""
        return cls(error.status, str(error), error.kind, error.param, error.code)

    def error(self) -> APIError:
        """The error again."""
        return APIError(self.status, self.message, kind=self.kind, param=self.param, code=self.code)


Told = Queued | PromptComputed | Delta | Complete | Refused


def asking(verb: Verb[T, *Ts], arguments: tuple[*Ts]) -> bytes:
    """A verb for a replica, as data: this version, its name, and values. Raises TypeError for a function among them."""
    if any(map(callable, arguments)):
        raise TypeError(f"the verb {verb.name!r} got a function in {arguments!r:.200}; send values to replicas")
    return pickle.dumps((__version__, verb.name, pickle.dumps(arguments)))


def asked_for(data: bytes) -> Callable[[Engine], Any]:
    """What an engine is to run. Raises APIError 501 for what another version asks, and for what cannot be read.

    Values of another version are not read: fields pickle by position, so a new one would shift the others.
    """
    version = name = "(unknown)"
    try:
        version, name, packed = pickle.loads(data)
        if version != __version__:
            raise ValueError("another version asks")
        run, arguments = VERBS[name].run, pickle.loads(packed)
        signature(run).bind(None, *arguments)
    except Exception as error:
        logger.warning("the verb %.100r of foreword %.100s is refused: %r", name, version, error)
        message = (
            f"A replica runs foreword {__version__}, which does not take {name!r:.100} of foreword {version!s:.100}"
        )
        raise unknown_verb(message) from error
    return lambda engine: run(engine, *arguments)


def unknown_verb(message: str) -> APIError:
    """What two versions of foreword that do not understand each other are refused with."""
    message += "; upgrade the older one."
    return APIError(501, message, kind="server_error", code=UNKNOWN_VERB)


class Codec:
    """Turns submissions into bytes, and back into those of its own model."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._lock = llm, threading.Lock()

    def encode(self, submission: Submission) -> bytes:
        """The bytes of a submission."""
        file = io.BytesIO()
        now = self._llm.engine.clock()
        _Pickler(file).dump(replace(submission, prompt=_moved(submission.prompt, -now)))
        return file.getvalue()

    def decode(self, data: bytes) -> Submission:
        """A submission from its bytes. Compiles its grammar, which takes up to a second; any thread may call it.

        Reads its adapter, too. Raises APIError for one that cannot be read, InvalidRequestError for a grammar that
        cannot be followed. The bytes are trusted: they come from a front.
        """
        with self._lock:  # grammars belong to one thread at a time
            submission: Submission = _Unpickler(io.BytesIO(data), self._llm).load()
        prompt = _moved(submission.prompt, self._llm.engine.clock())
        if prompt.adapter is not None:
            prompt = replace(prompt, adapter=self._adapter(cast("AdapterName", prompt.adapter)))
        return replace(submission, prompt=prompt)

    def _adapter(self, name: AdapterName) -> Adapter:
        """Raises AdaptersBusyError, or APIError 503 without the folder, which is the operator's alone to know."""
        try:
            return cast("LoadedAdapters", self._llm.adapters).named(name)
        except InvalidRequestError as error:
            logger.warning("an adapter is asked for and cannot be read: %s", error)
            raise adapter_unread(name.digest[:12]) from error


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Tokenizer):
            return "tokenizer"
        return "grammars" if isinstance(value, Grammars) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, llm: LLM) -> None:
        super().__init__(file)
        self._llm = llm

    def persistent_load(self, name: str) -> Any:
        return self._llm.tokenizer if name == "tokenizer" else self._llm.grammars


def _moved(prompt: Prompt, seconds: float) -> Prompt:
    """The prompt by another clock: the times at which its marks end are moved."""
    if not any(mark.keep.until for mark in prompt.marks):
        return prompt
    marks = tuple(
        mark if mark.keep.until is None else replace(mark, keep=replace(mark.keep, until=mark.keep.until + seconds))
        for mark in prompt.marks
    )
    return replace(prompt, marks=marks)

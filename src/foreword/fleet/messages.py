"""The messages between a front and its replicas, and a request as bytes.

A request may hold constraints, which refer to the tokenizer and its grammars. The tokenizer and the grammars are not
sent: the pickled request has their names, and the replica puts its own objects in their place.
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
"""Code of an error between two versions of foreword: a verb or an answer that the other side cannot read."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for one replica."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    """Parameters with a seed, so that another replica can continue the answer."""
    answered: tuple[Shown, ...] = ()
    """For each choice, the part of the answer that the client already has."""
    is_streamed: bool = True
    """Whether the client waits for each token; otherwise tokens are sent in larger pieces."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The replica's engine has queued the request."""


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The prompt is computed, and the first token has come."""

    output: RequestOutput
    """The output without tokens."""
    num_queued_s: float
    """Seconds from the request's arrival at the replica to its first step."""
    clock: float
    """The replica's engine time in seconds. The end times of cache entries are times of this clock."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of an answer."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica cannot answer the request. Holds the fields of an `APIError`."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: APIError) -> Refused:
        return cls(error.status, str(error), error.kind, error.param, error.code)

    def error(self) -> APIError:
        return APIError(self.status, self.message, kind=self.kind, param=self.param, code=self.code)


Told = Queued | PromptComputed | Delta | Complete | Refused


def asking(verb: Verb[T, *Ts], arguments: tuple[*Ts]) -> bytes:
    """Pack this version, a verb's name and its arguments for a replica. Raises TypeError for a function argument."""
    if any(map(callable, arguments)):
        raise TypeError(f"the verb {verb.name!r} got a function in {arguments!r:.200}; send values to replicas")
    return pickle.dumps((__version__, verb.name, pickle.dumps(arguments)))


def asked_for(data: bytes) -> Callable[[Engine], Any]:
    """Unpack what `asking` packed, for an engine to run. Raises APIError 501 if the data cannot be read, or if another
    version packed it.

    Arguments from another version are not read: fields pickle by position, so a new field would shift the others.
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
    """The error of two versions of foreword that do not understand each other."""
    message += "; upgrade the older one."
    return APIError(501, message, kind="server_error", code=UNKNOWN_VERB)


class Codec:
    """Turns submissions into bytes. Turns bytes into submissions for the model of this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._lock = llm, threading.Lock()

    def encode(self, submission: Submission) -> bytes:
        file = io.BytesIO()
        now = self._llm.engine.clock()
        _Pickler(file).dump(replace(submission, prompt=_moved(submission.prompt, -now)))
        return file.getvalue()

    def decode(self, data: bytes) -> Submission:
        """Read a submission from its bytes. Any thread may call this method.

        Compiles the submission's grammar, which takes up to a second, and reads its adapter. Raises APIError for an
        adapter that cannot be read, and InvalidRequestError for a grammar that cannot be followed. The bytes are
        trusted: they come from a front.
        """
        with self._lock:  # grammars belong to one thread at a time
            submission: Submission = _Unpickler(io.BytesIO(data), self._llm).load()
        prompt = _moved(submission.prompt, self._llm.engine.clock())
        if prompt.adapter is not None:
            prompt = replace(prompt, adapter=self._adapter(cast("AdapterName", prompt.adapter)))
        return replace(submission, prompt=prompt)

    def _adapter(self, name: AdapterName) -> Adapter:
        """Load an adapter. Raises AdaptersBusyError, or an APIError 503 that does not show the folder to clients."""
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
    """Convert a prompt to another clock: add `seconds` to the times at which its marks end."""
    if not any(mark.keep.until for mark in prompt.marks):
        return prompt
    marks = tuple(
        mark if mark.keep.until is None else replace(mark, keep=replace(mark.keep, until=mark.keep.until + seconds))
        for mark in prompt.marks
    )
    return replace(prompt, marks=marks)

"""Every error that foreword raises on purpose.

This module imports nothing else of foreword. `ForewordError` is the base class. Each message names the wrong value and
the remedy.

    ForewordError
    ├── InvalidRequestError        (also a ValueError)  one request cannot be served as asked
    │   ├── PromptTooLongError     the prompt does not fit into max_model_len
    │   ├── RequestTooLargeError   the request would not fit into the whole block pool
    │   ├── ChatTemplateError      chat() on a tokenizer that cannot render a conversation
    │   └── PMLError               a file of prompt modules is wrong, at a line and column
    │       ├── PMLSyntaxError     the text is not well-formed, has an unknown tag or attribute, or is too large
    │       ├── SchemaError        names, unions, scaffolds or parameters of a schema contradict each other
    │       └── PromptError        a prompt asks for what its schema does not have, or has no room for
    ├── ConfigError                (also a ValueError)  an option of the engine is out of range
    ├── ModelLoadError             the model's files cannot be read
    │   └── UnsupportedModelError  they can be read, but this engine cannot run the architecture
    ├── CacheBusyError             the cache cannot be reset while requests hold its blocks
    ├── AllocationError            (also a ValueError)  the cache is asked for slots or blocks that cannot be given
    ├── EventsLostError            a stream of cache events has a gap
    ├── NoReplicaError             no replica may take the request
    ├── AdaptersBusyError          requests hold all the memory that adapters may take
    ├── MediaBusyError             requests hold all the memory that pictures or embeddings may take
    ├── TraceError                 a recorded trace cannot be read
    └── EngineError                a step failed and its requests were aborted, or the engine is closed
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ForewordError(Exception):
    """Base of every deliberate error."""


class InvalidRequestError(ForewordError, ValueError):
    """The request is invalid; the engine and other requests are not affected."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an answer within `max_model_len`."""

    def __init__(self, message: str, num_tokens: int, max_tokens: int) -> None:
        """The prompt has `num_tokens` tokens, and may have `max_tokens` at most."""
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class TooManyPicturesError(InvalidRequestError):
    """The prompt has more pictures than `max_pictures`."""


class RequestTooLargeError(InvalidRequestError):
    """The request needs more KV blocks than the whole pool has."""


class ChatTemplateError(InvalidRequestError):
    """The tokenizer has no chat template, or the template refused the messages."""


class PMLError(InvalidRequestError):
    """A schema or prompt of modules is wrong; the message begins with `file:line:column`."""

    def __init__(self, message: str, file: str = "", line: int = 0, column: int = 0) -> None:
        """`line` and `column` count from 1; 0: the mistake has no place in a text, as in a prompt from Python."""
        place = f"{file}:{line}:{column}: " if line else f"{file}: " if file else ""
        super().__init__(place + message)
        self.file = file
        self.line = line
        self.column = column


class PMLSyntaxError(PMLError):
    """The text is not well-formed XML, has a tag or attribute that the language lacks, or exceeds a limit."""


class SchemaError(PMLError):
    """Parts of a schema contradict each other."""


class PromptError(PMLError):
    """A prompt does not fit its schema."""


class ConfigError(ForewordError, ValueError):
    """An engine option is unknown or out of range."""


class ModelLoadError(ForewordError):
    """The model's files are missing, unreadable or damaged."""


class UnsupportedModelError(ModelLoadError):
    """The architecture needs something that this engine lacks."""


class CacheBusyError(ForewordError):
    """The prefix cache cannot be reset while running requests hold its blocks."""


class AllocationError(ForewordError, ValueError):
    """A request for slots or blocks contradicts what the caller holds; nothing has changed."""


class EventsLostError(ForewordError):
    """A stream of cache events has a gap, so a state rebuilt from it is wrong."""


class NoReplicaError(ForewordError):
    """No replica may take the request now; another attempt may succeed once a replica joins."""


class AdaptersBusyError(ForewordError):
    """Requests hold all the memory that adapters may take; another attempt may succeed once some requests end."""


class MediaBusyError(ForewordError):
    """Requests hold all the memory that pictures or embeddings may take; try again when some requests have ended."""


class TraceError(ForewordError):
    """A file of recorded requests is missing or malformed; the message names the line."""


class EngineError(ForewordError):
    """A step failed, its requests were aborted and their blocks freed; or the engine is closed."""


@contextmanager
def extra_for(what: str, extra: str, remedy: str = "") -> Iterator[None]:
    """Raise ConfigError if the `with` statement cannot import a package that the pip extra `extra` brings.

    `what` names what needs the package; `remedy` follows the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{what} needs the package {error.name}; run `pip install foreword[{extra}]`{remedy}"
        raise ConfigError(message) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: Exception) -> str:
    """An error's message in a form that fits inside another message."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

"""Every error that foreword raises on purpose.

Knows nothing but names. Whoever catches `ForewordError` catches all of them; each message names the
value that was wrong and what to do about it.

    ForewordError
    ├── InvalidRequestError        (also a ValueError)  one request cannot be served as asked
    │   ├── PromptTooLongError     the prompt does not fit into max_model_len
    │   ├── RequestTooLargeError   the request would not fit into the whole block pool
    │   └── ChatTemplateError      chat() on a tokenizer that cannot render a conversation
    ├── ConfigError                (also a ValueError)  an option of the engine is out of range
    ├── ModelLoadError             the model's files cannot be read
    │   └── UnsupportedModelError  they can, but this engine cannot run the architecture
    ├── CacheBusyError             the cache cannot be reset while requests hold its blocks
    ├── AllocationError            (also a ValueError)  the cache is asked for slots or blocks that cannot be given
    ├── EventsLostError            a stream of cache events has a gap
    ├── TraceError                 a recorded trace cannot be read
    └── EngineError                a step failed and its requests were aborted, or the engine is closed
"""


class ForewordError(Exception):
    """Base of every deliberate error."""


class InvalidRequestError(ForewordError, ValueError):
    """A request cannot be served as asked; the engine and other requests are unaffected."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an answer within `max_model_len`."""


class RequestTooLargeError(InvalidRequestError):
    """The request needs more KV blocks than the whole pool has."""


class ChatTemplateError(InvalidRequestError):
    """The tokenizer has no chat template, or the template refused the messages."""


class ConfigError(ForewordError, ValueError):
    """An engine option is unknown or out of range."""


class ModelLoadError(ForewordError):
    """The model's files are missing, unreadable or damaged."""


class UnsupportedModelError(ModelLoadError):
    """The architecture needs something that this engine does not do."""


class CacheBusyError(ForewordError):
    """The prefix cache cannot be reset while running requests hold its blocks."""


class AllocationError(ForewordError, ValueError):
    """Slots or blocks were asked for in a way that contradicts what is held; nothing has changed."""


class EventsLostError(ForewordError):
    """A stream of cache events has a gap, so what it would rebuild is wrong."""


class TraceError(ForewordError):
    """A file of recorded requests is missing or malformed; the message names the line."""


class EngineError(ForewordError):
    """A step failed, its requests were aborted and their blocks freed; or the engine is closed."""

"""Errors that clients see, with OpenAI's status codes and types. Other dialects translate these errors."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.errors import (
    AdaptersBusyError,
    CacheBusyError,
    EngineError,
    ForewordError,
    InvalidRequestError,
    MediaBusyError,
    PromptTooLongError,
)

MOST_CHARACTERS = 2000
"""Limit of a message in characters, because a message may repeat the megabytes that a client sent."""


def shortened(text: str, limit: int = MOST_CHARACTERS) -> str:
    """Cut the middle out of a text longer than `limit` characters, because the end of a message has the remedy."""
    end = limit // 4
    return text if len(text) <= limit else f"{text[: limit - end - 3]}...{text[-end:]}"


_KINDS = {408: "timeout", 429: "rate_limit_error"}


class APIError(ForewordError):
    """An error that becomes the answer to a call. `str(error)` is its message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`kind`: the type for clients; None: the usual type for this status."""
        super().__init__(shortened(message))
        self.status = status
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = None if param is None else shortened(param, 200)
        self.code = code
        self.headers = headers


class InvalidFieldError(APIError):
    """400: a field of the body is wrong. Dialects may use their own words."""

    def __init__(self, message: str, *, param: str | None, where: Sequence[int | str], problem: str) -> None:
        super().__init__(400, message, param=param)
        self.where = where
        """The path of the field: keys, positions and, for a field that may have several types, the type's name."""
        self.problem = problem
        """Pydantic's sentence."""


class UnknownFieldError(InvalidFieldError):
    """400: the body has a field that the server does not know."""


class LongPromptError(APIError):
    """400: the prompt has too many tokens."""

    def __init__(self, message: str, num_tokens: int, max_tokens: int) -> None:
        super().__init__(400, message, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> APIError:
    """400: the request is invalid."""
    return APIError(400, message, param=param, code=code)


def wrong_key() -> APIError:
    """401. The message does not repeat the key."""
    return APIError(
        401,
        "Incorrect API key provided, or none. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(name: str) -> APIError:
    """404: the server serves another model."""
    name = name if len(name) <= 100 else f"{name[:100]}..."
    message = f"The model {name!r} does not exist here; GET /v1/models lists what does."
    return APIError(404, message, code="model_not_found")


def too_busy(reason: str, retry_after_s: int) -> APIError:
    """429: the call would wait too long."""
    headers = {"Retry-After": str(retry_after_s)}
    return APIError(429, reason, code="rate_limit_exceeded", headers=headers)


def adapter_unread(name: str) -> APIError:
    """503: the files of an adapter are missing or damaged; the message does not say where they lie."""
    message = f"The adapter {name!r} cannot be read now. The server's log says why; its operator can load it again."
    return APIError(503, message, code="adapter_unread")


def timed_out(limit_s: float) -> APIError:
    """408: the request exceeded its time limit. A header asks clients not to try again."""
    message = f"The request took longer than {limit_s:g} s and was ended."
    return APIError(408, message, code="timeout", headers={"x-should-retry": "false"})


def engine_failed(reason: str) -> APIError:
    """503: the engine has failed."""
    return APIError(503, f"The engine has failed and takes no requests: {reason}", code="engine_failed")


def step_failed(reason: str) -> APIError:
    """500: the step with this request failed."""
    return APIError(500, f"The request could not be computed: {reason}", code="step_failed")


def from_error(error: Exception) -> APIError:
    """Convert any exception to an answer. Exceptions that are not foreword's own reveal no internals."""
    match error:
        case APIError():
            return error
        case PromptTooLongError():
            return LongPromptError(str(error), error.num_tokens, error.max_tokens)
        case InvalidRequestError():
            return bad_request(str(error))
        case CacheBusyError():
            return APIError(409, str(error), code="cache_busy")
        case AdaptersBusyError() | MediaBusyError():
            return too_busy(str(error), 1)
        case EngineError():
            return step_failed(str(error))
        case _:
            return APIError(500, "The server had an error while processing the request.")

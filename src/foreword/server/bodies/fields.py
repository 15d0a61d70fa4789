"""The types that the bodies of all dialects share, and the base of their models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Identifier = Annotated[str, Field(max_length=64)]
"""A string of at most 64 characters, as OpenAI allows."""
SessionId = Annotated[str, Field(min_length=1, max_length=256)]
"""The name of a session."""
Word = Annotated[str, Field(max_length=64)]
"""A string of at most 64 characters, for fields with short values such as a role or a media type."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
TemplateInputs = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=512)] | None],
    Field(max_length=16),
]
"""Inputs of a chat template, except the messages, such as {"enable_thinking": false}."""
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
_UNSUPPORTED = "unsupported"
Unsupported = Annotated[Any, _UNSUPPORTED]
"""A field for a feature that this engine lacks. The server refuses such a field by name."""
Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""Reads an integer that some clients write as 40.0."""
logger = logging.getLogger(__name__)
MOST_ROUNDS = 256
"""Limit of the validations of one body. Each may find one unknown field only, because long lists fail fast."""
MAX_LOGGED = 256
"""Limit of the names of unknown fields that are logged and remembered."""
Place = tuple[int | str, ...]


def _read_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a list of token ids. A million ids take milliseconds, because pydantic does not check each id."""
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return check(value[:1] if isinstance(value, list) else value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(f"token ids are whole numbers from 0 to {MAX_TOKEN_ID}")
    return value


TokenIds = Annotated[list[TokenId], WrapValidator(_read_token_ids)]
SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]


class Body(BaseModel):
    """A body, or a part of a body. Unknown fields are errors: a misspelt field must not silently mean its default."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    HOLDS: ClassVar[Literal["text", "tokens", "prompts"]] = "text"
    """The most that such a body holds: one conversation or text, one list of token ids, or several prompts."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are `Unsupported`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.UNSUPPORTED = tuple(name for name, field in cls.model_fields.items() if _UNSUPPORTED in field.metadata)

    def asks_for_unsupported(self) -> str | None:
        """Return the name of the first field that asks for an unsupported feature; None if no field does."""
        return next((name for name in self.UNSUPPORTED if _asks(getattr(self, name))), None)


def _asks(value: Any) -> bool:
    """Say whether a value asks for something. Zero does, although it equals False."""
    return value is not None and value is not False and value not in ("", "none", [], {})


class Part(BaseModel):
    """A part of a body that ignores unknown fields, because clients send earlier answers back unchanged."""

    model_config = ConfigDict(extra="ignore", strict=True)


AnyBody = TypeVar("AnyBody", bound=Body)


class UnknownFields:
    """One server's treatment of unknown fields. Safe to use from any thread."""

    def __init__(self, *, ignored: bool) -> None:
        self._ignored = ignored
        self._logged: set[str] = set()
        self._lock = Lock()

    def validate(self, model: type[AnyBody], body: Any) -> AnyBody:
        """Validate parsed JSON. If unknown fields are ignored, they are removed from `body`. Raises ValidationError."""
        for _ in range(MOST_ROUNDS if self._ignored else 0):
            try:
                return model.model_validate(body)
            except ValidationError as error:
                unknown = _unknown(error)
            if not unknown:
                break
            for place in unknown:
                _remove(body, place)
                self._log(place)
        return model.model_validate(body)

    def _log(self, place: Place) -> None:
        name = ".".join(str(part) for part in place if isinstance(part, str))[:100]
        with self._lock:
            if name in self._logged or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add(name)
        logger.warning("requests have the field %r, which is unknown here; it is ignored", name)


def _unknown(error: ValidationError) -> Sequence[Place]:
    errors = error.errors(include_url=False, include_input=False)
    return [item["loc"] for item in errors if item["type"] == "extra_forbidden"]


def _remove(body: Any, place: Sequence[Any]) -> None:
    """Remove the field at `place`, its path of keys and indexes. Names of a union's types in this path are skipped."""
    *inside, name = place
    for part in inside:
        inner = body[part] if isinstance(body, list) and isinstance(part, int) else None
        if isinstance(body, dict):
            inner = body.get(part)
        if isinstance(inner, dict | list):  # a type may have the name of one of its fields
            body = inner
    if isinstance(body, dict):
        body.pop(name, None)

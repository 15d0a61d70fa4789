"""The types that the bodies of all dialects share, and the base of their models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Identifier = Annotated[str, Field(max_length=64)]
"""A string of at most 64 characters, as OpenAI allows."""
Word = Annotated[str, Field(max_length=64)]
"""A name of one of a few choices."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
TemplateInputs = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=512)] | None],
    Field(max_length=16),
]
"""Inputs of a chat template besides the messages, such as {"enable_thinking": false}."""
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _read_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a long list of token ids: milliseconds for a million ids, where pydantic would look at each one."""
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return check(value[:1] if isinstance(value, list) else value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(f"token ids are numbers of 0 to {MAX_TOKEN_ID}")
    return value


TokenIds = Annotated[list[TokenId], WrapValidator(_read_token_ids)]
SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]


class Body(BaseModel):
    """A body, or a part of one; an unknown field is an error, so that a typing mistake is not taken for a default."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Names of the fields for features that this engine lacks."""
    HOLDS: ClassVar[Literal["text", "tokens", "prompts"]] = "text"
    """What a body of this type may hold: one conversation or text, one list of token ids, or several prompts."""

    def asks_for_unsupported(self) -> str | None:
        """Name of the first field that asks for an unsupported feature; None if there is none."""
        return next(
            (name for name in self.UNSUPPORTED if getattr(self, name) not in (None, False, [], {}, "none")), None
        )


class Part(BaseModel):
    """A part of a body whose unknown fields are ignored: clients send earlier answers back as they got them."""

    model_config = ConfigDict(extra="ignore", strict=True)

"""OpenAI's explicit caching: the options of a call and the breakpoints in its content, as marks of its prompt.

Knows OpenAI's rules: which breakpoints count, for how long, and where there may be none. Knows no templates, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from foreword.engine import BREAKPOINT, Keep, Mark
from foreword.server.api_errors import bad_request
from foreword.server.dialects.openai.fields import AnyCall, Breakpoint, CacheOptions, TextPart, Unmarkable
from foreword.server.intake import explain_invalid
from foreword.server.service import ChatMark
from foreword.text.conversation import Place, joined_parts

TTL_S = {"30m": 1800.0, "12h": 43_200.0}
MOST_MARKS = 4
"""The latest ones count; the automatic one is one of them."""


class Breakpoints:
    """The breakpoints of one body. Give it all content that can have one, in the order of the conversation."""

    def __init__(self, num_before: int = 0) -> None:
        """`num_before`: messages before the one with the index 0."""
        self.seen: list[tuple[Place, str | None]] = []
        """Where each is, and its own ttl."""
        self._num_before = num_before

    def text(self, content: str | Sequence[TextPart] | None, where: str, index: int, role: str) -> str:
        """The text of a message's content, whose breakpoints it takes. Raises APIError 400 for wrong ones."""
        if content is None or isinstance(content, str):
            return content or ""
        texts = [part.text for part in content]
        for number, part in enumerate(content):
            if part.prompt_cache_breakpoint is not None:
                found = _breakpoint(part, f"{where}[{number}]")
                size = len(joined_parts(texts[: number + 1], role))
                self.seen.append((Place(index + self._num_before, size), found.ttl))
        return joined_parts(texts, role)


def _breakpoint(part: TextPart, where: str) -> Breakpoint:
    if part.type not in ("text", "input_text"):
        refuse_breakpoint(part, where)
    try:
        return Breakpoint.model_validate(part.prompt_cache_breakpoint)
    except ValidationError as error:
        at = f"{where}.prompt_cache_breakpoint"
        found = error.errors(include_url=False, include_input=False)
        raise explain_invalid([{**one, "loc": (at, *one["loc"])} for one in found]) from None


def refuse_breakpoint(given: Unmarkable | TextPart, where: str) -> None:
    """Raises APIError 400 if something that cannot have a breakpoint has one."""
    if given.prompt_cache_breakpoint is not None:
        at = f"{where}.prompt_cache_breakpoint"
        message = f"Unknown parameter: {at!r}. Only content parts of the types text and input_text can have one."
        raise bad_request(message, param=at, code="unknown_parameter")


class Caching:
    """The wishes of one call for the cache. A call that names none of them is promised nothing."""

    def __init__(self, body: AnyCall, breakpoints: Breakpoints | None = None) -> None:
        """Raises APIError 400 for wishes that exclude each other."""
        options = body.prompt_cache_options or CacheOptions()
        self._explicit = breakpoints.seen if breakpoints is not None else []
        self._mode, self._ttl = options.mode or "implicit", options.ttl or "30m"
        self._has_options = body.prompt_cache_options is not None
        self.compare_with = options.comparison_response_id
        """The response whose prompt is to be compared with this one's."""
        self.is_prewarm = bool(getattr(options, "prewarm", None))
        """Whether only the prompt is to be computed."""
        self.is_off = self._mode == "explicit" and not self._explicit
        """Whether the cache is to have no part in this call."""
        asks = bool(self._explicit or options.mode or options.ttl or self.is_prewarm)
        self._marks_end = asks and self._mode == "implicit"
        if self.is_prewarm and self.is_off:
            at = "prompt_cache_options.prewarm"
            message = f"{at} has nothing to prepare in the mode 'explicit' without a prompt_cache_breakpoint; add one"
            raise bad_request(message, param=at, code="invalid_value")

    def chat_marks(self, num_messages: int) -> list[ChatMark]:
        """The marks of a conversation."""
        explicit = self._explicit[-(MOST_MARKS - 1 if self._marks_end else MOST_MARKS) :]
        marks = [ChatMark(place, self._keep(ttl)) for place, ttl in explicit]
        return [*marks, ChatMark(Place(num_messages - 1), self._keep())] if self._marks_end else marks

    def text_marks(self, num_tokens: int) -> tuple[Mark, ...]:
        """The marks of a prompt without messages: its end."""
        return (Mark(num_tokens, self._keep()),) if self._marks_end else ()

    def _keep(self, ttl: str | None = None) -> Keep:
        return Keep(TTL_S[ttl or self._ttl], BREAKPOINT)

    def options(self) -> dict[str, Any] | None:
        """The options that were applied, for the answer; None if the call has neither options nor breakpoints."""
        if not self._has_options and not self._explicit:
            return None
        return {"mode": self._mode, "ttl": self._ttl, "comparison_response_id": self.compare_with}

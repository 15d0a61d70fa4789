"""Session ids: where each client says which session a call belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from foreword.server.api_errors import bad_request

HEADER = "x-session-id"
"""vLLM's header."""
CLAUDE_CODE = "x-claude-code-session-id"
"""Claude Code's header, since its version 2.1.86."""
MOST_CHARACTERS = 256
_OLD_USER_ID = re.compile(r"user_.*_session_([0-9A-Za-z-]+)")
"""`metadata.user_id` of older versions of Claude Code; newer ones write a JSON object with a `session_id`."""


def session_of(body: Any, headers: Mapping[str, str]) -> str | None:
    """The session of a call; None if it names none. Raises APIError 400 for an id that is too long or unprintable.

    The field `session_id` counts first, then the two headers, Claude Code's `metadata.user_id`, `prompt_cache_key`.
    """
    named: str | None = getattr(body, "session_id", None)
    if named is None:
        named = _in_utf8(headers.get(HEADER) or headers.get(CLAUDE_CODE))
    if named:
        check_session_id(named)
        return named
    of_user = _of_user_id(getattr(getattr(body, "metadata", None), "user_id", None))
    return of_user or getattr(body, "prompt_cache_key", None) or None


def check_session_id(session_id: str) -> None:
    """Raises APIError 400 for a session id that is too long or unprintable."""
    if len(session_id) > MOST_CHARACTERS:
        raise bad_request(
            f"session_id has {len(session_id)} characters; use at most {MOST_CHARACTERS}", param="session_id"
        )
    if not session_id.isprintable():
        raise bad_request(f"session_id={session_id!r} has control characters; leave them out", param="session_id")


def _in_utf8(value: str | None) -> str | None:
    """A header's value, which was read as Latin-1, as the text that most clients mean."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _of_user_id(user_id: str | None) -> str | None:
    """The session in Anthropic's `metadata.user_id`, which other clients fill as they like."""
    if not user_id:
        return None
    if user_id.startswith("{"):
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        found = value.get("session_id")
    else:
        old = _OLD_USER_ID.fullmatch(user_id)
        found = None if old is None else old[1]
    is_usable = isinstance(found, str) and 0 < len(found) <= MOST_CHARACTERS and found.isprintable()
    return found if is_usable else None

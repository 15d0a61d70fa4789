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
    """The session of a call; None if it names none.

    The field `session_id` counts first, then the two headers, Claude Code's `metadata.user_id`, `prompt_cache_key`. Of
    these others, which name a session by the way, those that cannot be an id are ignored. Raises APIError 400 if the
    field is too long or unprintable.
    """
    named: str | None = getattr(body, "session_id", None)
    if named:
        check_session_id(named)
        return named
    user_id = getattr(getattr(body, "metadata", None), "user_id", None)
    others = (
        _as_text(headers.get(HEADER)),
        _as_text(headers.get(CLAUDE_CODE)),
        _of_user_id(user_id),
        getattr(body, "prompt_cache_key", None),
    )
    return next((one for one in others if _is_usable(one)), None)


def _is_usable(found: Any) -> bool:
    return isinstance(found, str) and 0 < len(found) <= MOST_CHARACTERS and found.isprintable()


def _as_text(header: str | None) -> str | None:
    """A header's text: clients send UTF-8, which the server reads as Latin-1."""
    try:
        return header and header.encode("latin-1").decode()
    except UnicodeError:
        return header


def check_session_id(session_id: str) -> None:
    """Raises APIError 400 for a session id that is too long or unprintable."""
    if len(session_id) > MOST_CHARACTERS:
        raise bad_request(
            f"session_id has {len(session_id)} characters; use at most {MOST_CHARACTERS}", param="session_id"
        )
    if not session_id.isprintable():
        raise bad_request(f"session_id={session_id!r} has control characters; leave them out", param="session_id")


def _of_user_id(user_id: str | None) -> Any:
    """The session in Anthropic's `metadata.user_id`, which other clients fill as they like."""
    if not user_id:
        return None
    if user_id.startswith("{"):
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        return value.get("session_id")
    old = _OLD_USER_ID.fullmatch(user_id)
    return None if old is None else old[1]

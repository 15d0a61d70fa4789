"""Hints: an orchestrator's requests to the cache, in vLLM's envelope of versioned actions (`kv_hints`).

An envelope with a request is about the request's prompt and session. An envelope without a request is about the newest
prompt of a session. The server ignores actions that it does not implement, and checks the payloads of all
others. A hint never makes a request fail. The answer has the outcome of each action.

    kv.retain    make an entry of the cache that each use refreshes    {"ttl_seconds"} or vLLM's {"directives": [...]}
    kv.pin       make an entry that ends after a fixed time            {"ttl_seconds", "end"}
    kv.demote    close the session once the request has ended          {}
    kv.prefetch  bring the prompt into the pool, and compute the tokens that no tier has   {}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from foreword.cache import PIN, CacheEntry
from foreword.engine import Keep, Mark, Prompt
from foreword.server.bodies.fields import Body, Part

RETAIN = "retain"
"""The source of entries that `kv.retain` makes."""
ACTIONS = (RETAIN, PIN, "demote", "prefetch")
DEFAULT_TTL_S, MAX_TTL_S = 300.0, 366 * 86_400.0
PROTOCOLS, VERSION = ("0", "1"), "1"
"""Major versions that this server knows: `PROTOCOLS` for `protocol_version` of an envelope, and `VERSION` for
`action_version` of an action."""
MOST_ACTIONS, MOST_DIRECTIVES = 16, 256
Name = Annotated[str, Field(max_length=256)]


class KvHintAction(Part):
    """An action of an envelope."""

    action_id: Name
    action_type: Name
    action_version: Name
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHints(Part):
    """vLLM's envelope, `KvHintsEnvelope`."""

    protocol_version: Name
    message_id: Name
    actions: Annotated[list[KvHintAction], Field(max_length=MOST_ACTIONS)] = Field(default_factory=list)


class HintsRequest(Body):
    """POST /v1/cache/hints: an envelope without a request."""

    HOLDS = "tokens"

    kv_hints: KvHints


Outcome = Literal["accepted", "deferred", "clipped", "missing", "rejected", "ignored"]
"""What the server did with an action:

accepted: The action was carried out.
deferred: The action will be carried out once the answer has ended.
clipped: Less is kept than the action asked for.
missing: There was nothing to act on.
rejected: The action's payload or the server's settings forbid the action.
ignored: This server does not know the action.
"""
WHOLE = 2**63
"""The end of a hint that asks to keep the answer too: beyond any prompt. Only the prompt is kept ("clipped")."""


_RANKS: Sequence[Outcome] = get_args(Outcome)


class UnusableHintError(Exception):
    """An action has no effect. The error has the action's outcome and the reason."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Hint:
    """An action that can be carried out."""

    action: KvHintAction
    name: str
    """The name of the action, one of ACTIONS."""
    keep: Keep | None = None
    """How to keep the entry that `retain` and `pin` make; None for other actions."""
    end: int | None = None
    """The number of the prompt's first tokens to keep; None: all tokens."""

    def is_about(self, session_id: str | None) -> bool:
        return self.action.payload.get("session_id") in (None, session_id)

    def mark(self, num_tokens: int) -> Mark | None:
        """Return the action's mark in a prompt of `num_tokens` tokens; None if the action keeps nothing."""
        end = num_tokens if self.end is None else min(self.end, num_tokens)
        return None if self.keep is None else Mark(end, self.keep)


class Hints:
    """The actions of one envelope."""

    def __init__(self, envelope: KvHints) -> None:
        self._outcomes: dict[int, dict[str, Any]] = {}
        self._actions = envelope.actions
        self.usable: dict[int, Hint] = {}
        """The actions that can be carried out, by their number in the envelope."""
        protocol = envelope.protocol_version
        for number, action in enumerate(envelope.actions):
            try:
                if protocol.partition(".")[0] not in PROTOCOLS:
                    raise UnusableHintError("ignored", f"protocol_version {protocol!r:.40} is unknown here")
                self.usable[number] = _read(action)
            except UnusableHintError as error:
                self.note(number, error.outcome, detail=str(error))

    def on(self, prompt: Prompt, is_uncached: bool = False) -> tuple[Mark, ...]:
        """Return a prompt's own marks and the hints' marks. If a prompt has links or no caching, hints are rejected."""
        num_tokens = len(prompt.token_ids)
        marks = {number: mark for number, hint in self.usable.items() if (mark := hint.mark(num_tokens)) is not None}
        if prompt.links is None and not is_uncached:
            return (*prompt.marks, *marks.values())
        for number in marks:
            del self.usable[number]
            what = "the call turns caching off" if is_uncached else "a prompt with links is not kept"
            self.note(number, "rejected", detail=what)
        return prompt.marks

    def demotes(self, session_id: str) -> bool:
        """Say whether a hint asks to close the request's session."""
        return any(hint.name == "demote" and hint.is_about(session_id) for hint in self.usable.values())

    def note(self, number: int, outcome: Outcome, **more: Any) -> None:
        """Record the outcome of an action. If the prompts of one call have several outcomes, the worst is kept."""
        action, earlier = self._actions[number], self._outcomes.get(number)
        if earlier is not None and _RANKS.index(earlier["outcome"]) >= _RANKS.index(outcome):
            return
        self._outcomes[number] = {
            "action_id": action.action_id,
            "action_type": action.action_type,
            "outcome": outcome,
            **more,
        }

    def note_kept(self, number: int, entry: CacheEntry | None, num_prompt_tokens: int) -> None:
        """Record the outcome of an action that keeps a prefix. `entry`: None if this server keeps no prefixes."""
        if entry is None:
            self.note(number, "rejected", detail="this server keeps no prefixes (max_pinned_share)")
            return
        if not entry.num_kept_tokens:
            why = "the budget is used up" if entry.lacks_budget else "no whole block of the prompt is cached"
            self.note(number, "clipped" if entry.lacks_budget else "missing", kept_tokens=0, detail=why)
            return
        is_whole = entry.is_whole and (self.usable[number].end or 0) <= num_prompt_tokens
        self.note(number, "accepted" if is_whole else "clipped", entry=entry.name, kept_tokens=entry.num_kept_tokens)

    def note_request(self, session_id: str | None, num_prompt_tokens: int, entries: Sequence[CacheEntry]) -> None:
        """Record the actions' outcomes for a prompt whose request has ended. `entries`: made by the prompt's marks."""
        for number, hint in self.usable.items():
            mark = hint.mark(num_prompt_tokens)
            if mark is not None:
                ours = (entry for entry in entries if entry.source == mark.keep.source and entry.num_tokens == mark.end)
                self.note_kept(number, next(ours, None), num_prompt_tokens)
            elif hint.name == "demote" and session_id is None:
                self.note(number, "missing", detail="the request names no session; send X-Session-ID")
            elif hint.name == "demote" and not hint.is_about(session_id):
                why = "the payload names another session than the request; send it to /v1/cache/hints"
                self.note(number, "missing", detail=why)
            elif hint.name == "demote":  # nobody knows yet whether an engine will answer
                why = "done soon after the answer's end; a request of the session that ends later opens it anew"
                self.note(number, "deferred", detail=why)
            else:
                self.note(number, "accepted")

    def report(self) -> list[dict[str, Any]]:
        """Return the outcomes, for JSON, in the order of the actions."""
        return [self._outcomes[number] for number in sorted(self._outcomes)]


def _read(action: KvHintAction) -> Hint:
    """Read an action and its payload. Raises UnusableHintError."""
    name = action.action_type.removeprefix("kv.")
    if name not in ACTIONS:
        raise UnusableHintError("ignored", f"action_type {action.action_type!r:.40} is unknown here")
    if action.action_version.partition(".")[0] != VERSION:
        raise UnusableHintError("ignored", f"action_version {action.action_version!r:.40} is unknown here; use 1.0")
    payload = action.payload
    if name == RETAIN and "directives" in payload:
        ttl_s, end = _of_directives(payload["directives"])
        return Hint(action, name, Keep(ttl_s, RETAIN), end)
    if name in (RETAIN, PIN):
        ttl_s = _seconds(payload, "ttl_seconds")
        return Hint(action, name, Keep(ttl_s, name, is_refreshed=name == RETAIN), _place(payload, "end"))
    return Hint(action, name)


def _of_directives(directives: Any) -> tuple[float, int | None]:
    """Return the longest time in seconds and the largest number of leading tokens that vLLM's directives ask for (None:
    the whole prompt). A directive with the priority 0 is ignored.
    """
    if not isinstance(directives, list) or len(directives) > MOST_DIRECTIVES:
        raise UnusableHintError("rejected", f"directives must be a list of at most {MOST_DIRECTIVES}")
    ttl_s, ends = 0.0, list[int | None]()
    for directive in directives:
        priority = directive.get("priority") if isinstance(directive, dict) else None
        if type(priority) is not int or not 0 <= priority <= 100:
            raise UnusableHintError("rejected", f"priority={priority!r:.40} of a directive is not one; use 0 to 100")
        if priority > 0:  # 0 asks for nothing
            ttl_s = max(ttl_s, _seconds(directive, "duration"))
            ends.append(WHOLE if directive.get("covers_output") is True else _place(directive, "end"))
    if not ends:
        raise UnusableHintError("missing", "no directive asks to keep anything")
    return ttl_s, None if None in ends else max(end for end in ends if end is not None)


def _seconds(payload: Mapping[str, Any], name: str) -> float:
    value = payload.get(name)
    if value is None:
        return DEFAULT_TTL_S
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TTL_S:
        raise UnusableHintError("rejected", f"{name}={value!r:.40} is no time; use up to {MAX_TTL_S:.0f} seconds")
    return float(value)


def _place(payload: Mapping[str, Any], name: str) -> int | None:
    value = payload.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise UnusableHintError("rejected", f"{name}={value!r:.40} is no number of tokens; use 1 or more, or null")
    return value

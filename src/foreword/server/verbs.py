"""Verbs: all calls of a server to its engines except requests, and how the answers of several engines are merged.

A replica gets a verb's name and its arguments, never a function. Arguments and results must be picklable values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, TypeVar, TypeVarTuple

from foreword.cache import CacheEntry, PrefixNode
from foreword.engine import Engine, Keep, Prompt, Snapshot
from foreword.errors import PromptTooLongError, RequestTooLargeError
from foreword.linking import LinkExplanation, Method, explain_parts
from foreword.pml.composition import Composition

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
NOT_CACHED, TOO_LARGE = -1, -2
"""Values in place of a number of linked tokens: a source is not wholly cached, or the linked prompt is too large."""


@dataclass(frozen=True, slots=True)
class Verb(Generic[T, *Ts]):
    """A call that an engine answers between two steps. Servers of other versions rely on its name and arguments."""

    name: str
    run: Callable[[Engine, *Ts], T]
    merge: Callable[[list[T]], T]
    """Merges the answers of all engines into one answer."""


def _first(answers: list[T]) -> T:
    return answers[0]


def _most(answers: list[list[int]]) -> list[int]:
    return [max(numbers) for numbers in zip(*answers, strict=True)]


def _all_prefixes(answers: list[list[PrefixNode] | None]) -> list[PrefixNode] | None:
    """Return the nodes of all trees, with new ids, which are unique; None if no engine has a tree."""
    trees = [nodes for nodes in answers if nodes is not None]
    if len(trees) < 2:
        return trees[0] if trees else None
    of_all = [(at, node) for at, nodes in enumerate(trees) for node in nodes]
    ids = {(at, node.node_id): number for number, (at, node) in enumerate(of_all)}
    return [
        replace(
            node,
            node_id=ids[at, node.node_id],
            parent_id=None if node.parent_id is None else ids.get((at, node.parent_id)),
        )
        for at, node in of_all
    ]


def _each_once(answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return all engines' entries. If several engines have an entry, return the report with the most kept tokens."""
    of_id: dict[str, dict[str, Any]] = {}
    for report in chain.from_iterable(answers):
        of_id[report["id"]] = max(of_id.get(report["id"], report), report, key=lambda entry: entry["kept_tokens"])
    return list(of_id.values())


def _first_report(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return next(filter(None, answers), {})


def _sum_of_known(answers: list[int | None]) -> int | None:
    numbers = [number for number in answers if number is not None]
    return sum(numbers) if numbers else None


def _count_linked(engine: Engine, plain: Prompt, linked: Prompt, max_tokens: int | None) -> list[int]:
    """Count the tokens that need not be computed: the first number is for the plain prompt, the second for the linked.

    The second number is TOO_LARGE or NOT_CACHED if the prompt cannot be linked now.
    """
    num_found = engine.num_cached_tokens(plain)
    try:
        runs = engine.explain_links(linked, max_tokens)
    except (RequestTooLargeError, PromptTooLongError):  # the plain prompt may fit, or gets its own error later
        return [num_found, TOO_LARGE]
    if any(num_missing for _, num_missing in runs):
        return [num_found, NOT_CACHED]
    num_before = min([num_found, *(run.begin for run, _ in runs)])  # a hit ends where the first link begins
    return [num_found, num_before + sum(run.end - run.begin for run, _ in runs)]


def _end_entry(engine: Engine, name: str, left_s: float | None) -> None:
    """Let an entry end in `left_s` seconds (None: now), even if the entry is still being computed."""
    if left_s is None:
        engine.entries.drop(name)
    else:
        engine.entries.set_end(name, engine.clock() + left_s)


def _list_entries(engine: Engine, owner: str | None, of_all: bool) -> list[dict[str, Any]]:
    now = engine.clock()
    return [entry_report(entry, now) for entry in engine.entries.entries() if of_all or entry.owner == owner]


def _change_entry(engine: Engine, name: str, left_s: float | None, owner: str | None, of_all: bool) -> dict[str, Any]:
    """Do what `_end_entry` does for an entry of `owner`, or of any owner if `of_all`.

    Returns the entry's report, empty if the entry is gone or belongs to another owner.
    """
    entries = (entry for entry in engine.entries.entries() if entry.name == name)
    entry = next((entry for entry in entries if of_all or entry.owner == owner), None)
    if entry is None:
        return {}
    _end_entry(engine, name, left_s)
    now = engine.clock()
    return entry_report(replace(entry, until=now + (left_s or 0.0)), now)


def entry_report(entry: CacheEntry, now: float) -> dict[str, Any]:
    """Report an entry, for JSON. `now`: the time of the engine's clock."""
    left_s = max(0.0, entry.until - now)
    return {
        "id": entry.name,
        "object": "cache.entry",
        "source": entry.source,
        "tenant": entry.owner,
        "tokens": entry.num_tokens,
        "kept_tokens": entry.num_kept_tokens,
        "is_whole": entry.is_whole,
        "expires_in_s": round(left_s, 3),
        "expires_at": round(time.time() + left_s, 3),
        "refresh_s": entry.refresh_s,
    }


EXPLAIN = Verb("explain", Engine.explain, lambda answers: max(answers, key=lambda answer: answer.num_hit_tokens))
EXPLAIN_LINKS: Verb[LinkExplanation, Prompt, Composition, Method, int] = Verb(
    "explain_links",
    lambda engine, prompt, parts, method, size: explain_parts(parts, method, engine.explain_links(prompt), size),
    lambda answers: min(answers, key=lambda answer: sum(part.num_missing_tokens for part in answer.parts)),
)
COUNT_CACHED: Verb[list[int], list[Prompt]] = Verb(
    "count_cached", lambda engine, prompts: [engine.num_cached_tokens(prompt) for prompt in prompts], _most
)
COUNT_LINKED = Verb("count_linked", _count_linked, _most)
SNAPSHOT = Verb("snapshot", Engine.snapshot, Snapshot.total)
TOP_PREFIXES = Verb("top_prefixes", Engine.top_prefixes, _all_prefixes)
RESET = Verb("reset", Engine.reset_prefix_cache, _first)
SHRINK = Verb("shrink", Engine.shrink_namespace, _first)
CLOSE_SESSION = Verb("close_session", Engine.close_session, _sum_of_known)
PIN: Verb[CacheEntry, Prompt, Keep] = Verb(
    "pin",
    lambda engine, prompt, keep: engine.entries.pin(prompt, keep),
    lambda answers: max(answers, key=lambda answer: answer.num_kept_tokens),
)
UNPIN: Verb[None, Prompt] = Verb("unpin", lambda engine, prompt: engine.entries.unpin(prompt), _first)
LIST_ENTRIES = Verb("list_entries", _list_entries, _each_once)
CHANGE_ENTRY = Verb("change_entry", _change_entry, _first_report)
END_ENTRY = Verb("end_entry", _end_entry, _first)
VERBS = {verb.name: verb for verb in globals().values() if isinstance(verb, Verb)}

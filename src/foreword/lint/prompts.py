"""What the linter reads: prompts as token ids, and which of them are of one kind.

Knows token ids and, where a file has them, the messages that were rendered. Prompts are of one kind if they share a
good part of their text, wherever it lies; so a date at the very beginning does not part them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.lint.align import Shingles, TokenIds, shingles

SAME_KIND = 0.3
"""Least share of the shorter prompt's runs of tokens that two prompts of one kind have in common."""
SAME_CONVERSATION = 0.5
"""The same without the runs that most prompts of the kind have."""
MAX_KINDS = 256
"""Most kinds that a prompt is compared with, the first ones; a prompt beyond them is of no kind."""
MOST_RUNS = 2_000_000
"""Most runs of tokens that are kept; of more, an even sample."""


@dataclass(frozen=True, slots=True)
class LintPrompt:
    """One request's prompt, in order of arrival."""

    token_ids: TokenIds
    timestamp_ms: float | None = None
    texts: tuple[str, ...] | None = None
    """The messages (and tools, first) as the client sent them; None if only tokens are known."""
    model: str | None = None
    """The model, or the adapter, that the request names."""


def same_kind(prompts: Sequence[TokenIds]) -> list[list[int]]:
    """Indices of prompts of one kind, two or more each."""
    return _groups(_sketches(prompts), SAME_KIND)


def same_conversation(prompts: Sequence[TokenIds], kind: Sequence[int]) -> list[list[int]]:
    """Indices of those prompts of a kind that share more than what most of the kind share."""
    sketches = _sketches([prompts[index] for index in kind])
    runs, counts = np.unique(np.concatenate(sketches), return_counts=True)
    common = runs[2 * counts > len(kind)]
    own = [np.setdiff1d(sketch, common, assume_unique=True) for sketch in sketches]
    return [[kind[place] for place in group] for group in _groups(own, SAME_CONVERSATION)]


def _sketches(prompts: Sequence[TokenIds]) -> list[Shingles]:
    """The different runs of each prompt; the same share of all runs for each."""
    every = np.uint64(1 + sum(map(len, prompts)) // MOST_RUNS)
    runs = (shingles(prompt) for prompt in prompts)
    return [np.unique(one[one % every == 0] if every > 1 else one) for one in runs]


def _groups(sketches: Sequence[Shingles], share: float) -> list[list[int]]:
    """Greedy: each joins the first prompt of the group with which it has most in common, or begins a group."""
    groups: list[list[int]] = []
    for index, sketch in enumerate(sketches):
        best: tuple[float, list[int]] | None = None
        for group in groups if len(sketch) else ():
            first = sketches[group[0]]
            in_common = len(np.intersect1d(sketch, first, assume_unique=True)) / min(len(sketch), len(first))
            if in_common >= share and (best is None or in_common > best[0]):
                best = in_common, group
        if best is not None:
            best[1].append(index)
        elif len(sketch) and len(groups) < MAX_KINDS:
            groups.append([index])
    return [group for group in groups if len(group) > 1]

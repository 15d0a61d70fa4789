"""Edits: if a prompt is an earlier prompt with a cut or change in the middle, links the rest from the earlier prompt.

    earlier prompt     system   user 1   tool result, 900 tokens   answer 1   user 2   answer 2
                       |        |                                  |          |        |
    edited prompt      system   user 1   tool result, cut          answer 1   user 2   answer 2   user 3
                       -- exact prefix --   computed               ---------- linked ----------   computed

Text after the edit can be linked from the earlier prompt. Its KV is approximate, because it was computed after the text
that was cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from foreword.pml.composition import Composition, Part, Source, Span

LEAST_RUN = 32
"""Fewer consecutive tokens than this, equal in both prompts, are not linked."""
WINDOW = LEAST_RUN // 2
TokenArray = npt.NDArray[np.int32]


def compose_edit(token_ids: Sequence[int] | TokenArray, before: Sequence[int] | TokenArray) -> Composition:
    """Compose the edited prompt `token_ids`. Parts that `before` has in the same order can be linked from it.

    Takes time and memory proportional to the tokens. Runs of fewer than LEAST_RUN tokens are computed.
    """
    new, old = np.asarray(token_ids, np.int32), np.asarray(before, np.int32)
    num_exact = _num_equal(new, old)
    earlier = tuple(old.tolist())
    parts: list[Part] = []

    def add(begin: int, end: int, place: int | None = None) -> None:
        if begin < end:
            ids = tuple(new[begin:end].tolist())
            span = None if place is None else Span(Source(earlier, place), place, place + end - begin)
            name = "" if span is None else str(sum(part.span is not None for part in parts))
            parts.append(Part(ids, begin, "text" if span is None else "module", name, span))

    done = num_exact
    add(0, done)
    for begin, place, length in _runs(new, old, num_exact):
        add(done, begin)
        add(begin, begin + length, place)
        done = begin + length
    add(done, len(new))
    return Composition(tuple(parts))


Run = tuple[int, int, int]
"""Index of the first token in the edited prompt and in the earlier prompt, and the number of tokens."""


def _runs(new: TokenArray, old: TokenArray, start: int) -> list[Run]:
    """Find runs of equal tokens after `start`, which stand in the same order in both prompts.

    Every WINDOW-th window of `old` is looked for at each index of `new`.
    """
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for place in range(start, len(old) - WINDOW + 1, WINDOW):
        places[old[place : place + WINDOW].tobytes()].append(place)
    runs = []
    at = done = least = start
    while at <= len(new) - WINDOW:
        if new[at : at + WINDOW].tobytes() in places:
            run = _longest(new, old, places, at, (done, least))
            if run[2] >= LEAST_RUN:
                runs.append(run)
                at, least = run[0] + run[2], run[1] + run[2]
                done = at
                continue
        at += 1
    return runs


def _longest(
    new: TokenArray, old: TokenArray, places: Mapping[bytes, list[int]], at: int, least: tuple[int, int]
) -> Run:
    """The longest run around a window that begins in `new` within WINDOW tokens from `at`, but not before `least`.

    In a text that repeats itself, a window is found at several places of `old`. The first place gives the whole run.
    """
    best = (at, 0, 0)
    for number in range(at, min(at + WINDOW, len(new) - WINDOW + 1)):
        candidates = places.get(new[number : number + WINDOW].tobytes(), [])
        first = bisect_left(candidates, least[1])
        if first == len(candidates):
            continue
        begin, place = number, candidates[first]
        length = _num_equal(new[begin:], old[place:])
        while begin > least[0] and place > least[1] and new[begin - 1] == old[place - 1]:
            begin, place, length = begin - 1, place - 1, length + 1
        best = max(best, (begin, place, length), key=lambda run: run[2])
    return best


def _num_equal(ours: TokenArray, theirs: TokenArray) -> int:
    """The number of leading tokens that are equal."""
    num_equal, size, length = 0, 4 * LEAST_RUN, min(len(ours), len(theirs))
    while num_equal < length:  # in growing pieces: most comparisons end soon
        end = min(length, num_equal + size)
        differs = np.flatnonzero(ours[num_equal:end] != theirs[num_equal:end])
        if len(differs):
            return num_equal + int(differs[0])
        num_equal, size = end, 2 * size
    return length

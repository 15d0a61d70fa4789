"""What linking would do with a prompt now: which parts it would copy, and whose sources the cache lacks.

Knows compositions, runs and counts; an engine says what is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.linking.methods import Method
from foreword.pml.composition import Composition
from foreword.request import LinkedRun


@dataclass(frozen=True, slots=True)
class PartLinks:
    """One part of a prompt that has a source: a document, or a text of a module."""

    name: str
    """The document's number, or the module's path."""
    num_tokens: int
    num_linked_tokens: int
    """Tokens that would be copied; the others are computed in the prompt."""
    num_missing_tokens: int
    """Tokens of its source that are not cached, and that would be computed first, apart."""


@dataclass(frozen=True, slots=True)
class LinkExplanation:
    """What a method would link in a prompt. Whether the cache has the same composition already, it does not say."""

    method: str
    num_tokens: int
    """Tokens of the prompt."""
    parts: tuple[PartLinks, ...]
    block_size: int
    too_short: tuple[str, ...] = ()
    """The names of the parts of which no token lies in a whole block of its source: never linked. Each once."""

    @property
    def num_linked_tokens(self) -> int:
        return sum(part.num_linked_tokens for part in self.parts)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the parts whose sources are not cached, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts if part.num_missing_tokens))

    def __str__(self) -> str:
        linked = f"{self.method}: {self.num_linked_tokens} of {self.num_tokens} tokens would be linked"
        missing = f"; not cached: {', '.join(self.missing)}" if self.missing else ""
        if not self.too_short:
            return linked + missing
        short = f"; in no whole block of {self.block_size} tokens, so never linked: {', '.join(self.too_short)}"
        return f"{linked}{missing}{short} (a smaller block_size links them)"


def explain_parts(
    composition: Composition, method: Method, runs: Sequence[tuple[LinkedRun, int]], block_size: int
) -> LinkExplanation:
    """`runs`: those that are copied, each with the tokens that the cache lacks of its source."""
    waiting, parts = deque(runs), []  # each run lies in one part; a method may leave several in a part
    in_blocks: dict[str, bool] = {}
    """By name: whether any token lies in a whole block of its source."""
    for part, end in zip(composition.parts, composition.begins[1:], strict=True):
        if part.span is not None:
            num_linked = num_missing = 0
            while waiting and waiting[0][0].begin < end:
                run, num_lacking = waiting.popleft()
                num_linked, num_missing = num_linked + run.end - run.begin, max(num_missing, num_lacking)
            whole_end = len(part.span.source.token_ids) // block_size * block_size
            in_blocks[part.name] = in_blocks.get(part.name, False) or part.span.begin < whole_end
            parts.append(PartLinks(part.name, len(part.token_ids), num_linked, num_missing))
    short = tuple(name for name, is_in_block in in_blocks.items() if not is_in_block)
    return LinkExplanation(method.name, composition.num_tokens, tuple(parts), block_size, short)

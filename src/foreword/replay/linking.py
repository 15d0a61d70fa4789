"""Linking: what a cache would find if chunks could stand anywhere, and what its methods compute again.

Two caches with LRU and equal memory get the same requests. One finds leading chunks that stood after the same ones
before; the other finds each chunk wherever it stands. Of the chunks that the second one finds, those that the first one
finds too are exact; a method computes a part of each other one again. A chunk counts as a whole: it is found or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foreword.errors import ConfigError
from foreword.replay.chunks import Chunk
from foreword.replay.lru import Lru


@dataclass(frozen=True, slots=True)
class LinkMethod:
    """What is computed again of a linked chunk."""

    name: str
    first_k: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LinkMethod:
        """`none`, `first-16` or `deviation-0.15`. Raises ConfigError."""
        if text == "none":
            return cls(text)
        if found := re.fullmatch(r"first-(\d{1,6})", text):
            return cls(text, first_k=int(found[1]))
        found = re.fullmatch(r"deviation-(0?\.\d{1,6}|1\.0|0|1)", text)
        if found is None:
            raise ConfigError(f"--link {text!r} is unknown; use none, first-16 or deviation-0.15, with any numbers")
        return cls(text, share=float(found[1]))

    def num_recomputed(self, num_tokens: int) -> float:
        """Tokens of a linked chunk that are computed again."""
        return min(self.first_k, num_tokens) + self.share * num_tokens


@dataclass(slots=True)
class PartCount:
    """Tokens of one part of the prompts."""

    num_tokens: int = 0
    prefix_tokens: int = 0
    found_tokens: int = 0
    """Found anywhere."""


@dataclass(slots=True)
class LinkReplay:
    """What requests found with one capacity."""

    capacity_tokens: int | None
    """None: unlimited."""
    num_tokens: int = 0
    """Tokens of all prompts."""
    prefix_tokens: int = 0
    """Found by prefix caching."""
    found_tokens: int = 0
    """Found if chunks could stand anywhere."""
    num_linked: int = 0
    """Chunks that were found where no prefix ends with them."""
    recomputed: dict[str, float] = field(default_factory=dict)
    """Tokens that a method computes again, by its name."""
    parts: dict[str, PartCount] = field(default_factory=dict)

    def share(self, method: str | None = None) -> float:
        """The share of the prompts' tokens that are not computed: with prefix caching, or with a method of linking."""
        saved = self.prefix_tokens if method is None else self.found_tokens - self.recomputed[method]
        return saved / max(1, self.num_tokens)


def replay_linking(
    requests: Iterable[Sequence[Chunk]], capacities: Sequence[int | None], methods: Sequence[LinkMethod]
) -> list[LinkReplay]:
    """What the requests find, by capacity in tokens."""
    followed = [_Followed(capacity, methods) for capacity in capacities]
    for chunks in requests:
        prefixes: list[int] = []
        for chunk in chunks:
            prefixes.append(hash((prefixes[-1] if prefixes else None, chunk.id)))
        for one in followed:
            one.admit(chunks, prefixes)
    return [one.result for one in followed]


class _Followed:
    """Both caches of one capacity."""

    def __init__(self, capacity: int | None, methods: Sequence[LinkMethod]) -> None:
        self.result = LinkReplay(capacity, recomputed={method.name: 0.0 for method in methods})
        self._methods = methods
        self._prefixes, self._chunks = Lru[int | str](capacity), Lru[int | str](capacity)

    def admit(self, chunks: Sequence[Chunk], prefixes: Sequence[int]) -> None:
        result = self.result
        is_prefix = True
        for number, (chunk, prefix) in enumerate(zip(chunks, prefixes, strict=True)):
            is_prefix = is_prefix and prefix in self._prefixes
            is_found = chunk.id in self._chunks
            part = result.parts.setdefault(chunk.part, PartCount())
            for count in (result, part):
                count.num_tokens += chunk.num_tokens
                count.prefix_tokens += chunk.num_tokens * is_prefix
                count.found_tokens += chunk.num_tokens * is_found
            if is_found and not is_prefix and number:  # the first chunk stands where it was computed
                result.num_linked += 1
                for method in self._methods:
                    result.recomputed[method.name] += method.num_recomputed(chunk.num_tokens)
        for chunk, prefix in zip(reversed(chunks), reversed(prefixes), strict=True):  # so that tails go first
            self._prefixes.use(prefix, chunk.num_tokens)
            self._chunks.use(chunk.id, chunk.num_tokens)
        self._prefixes.shrink()
        self._chunks.shrink()

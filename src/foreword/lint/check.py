"""The linter's core: finds why prompts of one kind differ early, the cost of that, and the savings of remedies.

The linter rewrites the prompts as each remedy would, and replays the rewritten prompts. The replay gives the figures of
the report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foreword.errors import ConfigError
from foreword.lint.align import TokenIds
from foreword.lint.causes import KEEP_HISTORY, Cause, Reader, Spell
from foreword.lint.prompts import LintPrompt, same_conversation, same_kind
from foreword.lint.slots import Slot, Span, find_slots
from foreword.replay.keys import PrefixKeys, chain, content_ids_of_tokens
from foreword.replay.simulator import OnePass
from foreword.replay.trace import RecordedRequest

BLOCK_TOKENS = 16
STABLE_BLOCKS = 2
"""Differences with fewer blocks between them count as one slot, because a cache would find nothing between them."""
MAX_TRIED = 24
"""The most remedies that one round tries: the remedies that concern the most prompts."""
SHOWN_TOKENS = 16
LETTERS = re.compile(r"[^\W\d_]+")
MAX_EXAMPLES = 3
DAY_MS = 86_400_000.0
MIN_SPAN_MS = 600_000.0
"""The shortest recording, in milliseconds, from which tokens a day are estimated."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place at which prompts of one kind differ early."""

    causes: tuple[str, ...]
    remedy: str
    num_prompts: int
    """The number of prompts in which this place occurs."""
    first_request: int
    """The number, from 0, of a request in whose prompt this place occurs."""
    position: int
    """The index of the place's first token in the prompt of `first_request`, as it was sent."""
    before: str
    """The text before the place."""
    examples: tuple[str, ...]
    """Different texts that prompts have at this place, each with the text that follows it."""
    wasted_tokens: int
    """Tokens that are computed again because of this place, even with the remedies of the earlier findings."""
    hit_rate_after: float
    """The hit rate with the remedies of this finding and of all earlier findings."""


@dataclass(frozen=True, slots=True)
class LintReport:
    """The result for all prompts."""

    num_requests: int
    num_tokens: int
    span_ms: float | None
    """Milliseconds from the first to the last request; None if unknown."""
    hit_rate: float
    """The share of all prompt tokens that a cache would find if the prompts are not changed."""
    findings: list[Finding]
    mended: list[TokenIds]
    """The prompts as all remedies together would write them."""
    models: tuple[str, ...] = ()
    """The models or adapters that requests name, if there are several. They share no prefixes."""
    apart_tokens: int = 0
    """Tokens that are computed again only because they were cached under another model or adapter."""

    @property
    def hit_rate_after(self) -> float:
        """The hit rate with the remedies of all findings."""
        return self.findings[-1].hit_rate_after if self.findings else self.hit_rate

    @property
    def wasted_tokens(self) -> int:
        return sum(finding.wasted_tokens for finding in self.findings)

    def a_day(self, num_tokens: int) -> float | None:
        """Return the tokens a day at these requests' rate; None if the times are unknown or too close together."""
        span_ms = self.span_ms
        return None if span_ms is None or span_ms < MIN_SPAN_MS else num_tokens * DAY_MS / span_ms


def lint_prompts(
    prompts: Sequence[LintPrompt], spell: Spell, *, block_tokens: int = BLOCK_TOKENS, cache_tokens: int | None = None
) -> LintReport:
    """Find why prompts differ early. `spell`: `Tokenizer.spell`; `cache_tokens`: the cache's size, None: unlimited."""
    if block_tokens < 1 or (cache_tokens is not None and cache_tokens < block_tokens):
        raise ConfigError(
            f"block_tokens={block_tokens}, cache_tokens={cache_tokens}: a cache must hold a block of at least one token"
        )
    bench, reader = _Bench(prompts, block_tokens, cache_tokens), Reader(prompts, spell)
    hit_rate, least_tokens = bench.score.hit_rate, STABLE_BLOCKS * block_tokens
    of_all = _Bench([replace(prompt, model=None) for prompt in prompts], block_tokens, cache_tokens)
    apart_tokens = of_all.score.num_found - bench.score.num_found
    findings: dict[tuple[str, ...], Finding] = {}
    concerned: dict[tuple[str, ...], set[int]] = {}

    def mend(prompts: Sequence[TokenIds], groups: Sequence[Sequence[int]]) -> None:
        accepted = bench.mend(_fixes(prompts, groups, reader, least_tokens))
        for fix, saved, rate in accepted:
            earlier = findings.pop(fix.key, None)  # found for a kind, and now again for conversations
            finding = earlier or _finding(fix, bench, reader)
            prompts_of = concerned.setdefault(fix.key, set())
            prompts_of |= fix.prompts
            findings[fix.key] = replace(
                finding, num_prompts=len(prompts_of), wasted_tokens=finding.wasted_tokens + saved, hit_rate_after=rate
            )
        bench.settle([fix for fix, *_ in accepted])

    kinds = same_kind(bench.prompts)
    mend(bench.prompts, kinds)
    unmoved = bench.unmoved()
    mend(unmoved, [group for kind in kinds for group in same_conversation(unmoved, kind)])
    times = [prompt.timestamp_ms for prompt in prompts if prompt.timestamp_ms is not None]
    span_ms = max(times) - min(times) if len(times) == len(prompts) > 1 else None
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    about = len(prompts), num_tokens, span_ms, hit_rate, [*findings.values()], bench.prompts
    models = tuple(sorted({prompt.model for prompt in prompts if prompt.model is not None}))
    return LintReport(*about, models, apart_tokens) if len(models) > 1 else LintReport(*about)


# ---------------------------------------------------------------------- remedies


@dataclass(slots=True)
class _Fix:
    """One remedy for all slots that have the same cause and follow the same text."""

    cause: Cause
    key: tuple[str, ...]
    """The key of the remedy, which is equal for equal causes after equal text."""
    slots: list[Slot]
    texts: list[dict[int, TokenIds]] = field(default_factory=list)
    """For each slot, its new text by prompt. If a prompt has no new text, the slot's text moves to the prompt's end."""

    @property
    def prompts(self) -> set[int]:
        return {index for slot in self.slots for index in slot.spans}


def _fixes(
    prompts: Sequence[TokenIds], groups: Iterable[Sequence[int]], reader: Reader, least_tokens: int
) -> list[_Fix]:
    """Return the remedies, with the earliest places first."""
    fixes: dict[tuple[str, ...], _Fix] = {}
    for group in groups:
        for slot in find_slots(prompts, group, reader.words, least_tokens):
            cause = reader.cause(slot, prompts)
            begin = slot.spans[slot.pattern][0]
            before = reader.text(prompts[slot.pattern][max(0, begin - SHOWN_TOKENS) : begin])
            # A template that rewrites earlier turns does so at many places. One remedy is enough: the key has no place.
            place = () if cause.remedy == KEEP_HISTORY else LETTERS.findall(before)[-2:]
            key = (cause.names[0], *place)
            fix = fixes.setdefault(key, _Fix(cause, key, []))
            fix.slots.append(slot)
            fix.texts.append(_first_texts(prompts, slot.spans, reader, cause) if cause.keeps else {})
    widest = sorted(fixes.values(), key=lambda fix: -len(fix.prompts))[:MAX_TRIED]
    return sorted(widest, key=lambda fix: fix.slots[0].spans[fix.slots[0].pattern][0])


def _first_texts(
    prompts: Sequence[TokenIds], spans: dict[int, Span], reader: Reader, cause: Cause
) -> dict[int, TokenIds]:
    """Return each prompt's new text at a slot: that of the first prompt with the same words there, in any order."""
    first: dict[tuple[str, ...], TokenIds] = {}
    texts = {}
    for index, span in sorted(spans.items()):
        text = prompts[index][slice(*span)]
        words = () if cause.remedy == KEEP_HISTORY else tuple(sorted(reader.words(text)))
        texts[index] = first.setdefault(words, text)
    return texts


@dataclass(frozen=True, slots=True)
class _Score:
    """The number of prompt tokens that a simulated cache finds."""

    num_found: int
    num_tokens: int

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_found

    @property
    def hit_rate(self) -> float:
        return self.num_found / max(1, self.num_tokens)


class _Bench:
    """The prompts as the accepted remedies write them, and the tokens that a cache finds in these prompts."""

    def __init__(self, prompts: Sequence[LintPrompt], block_tokens: int, cache_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._capacity = None if cache_tokens is None else cache_tokens // block_tokens
        self._times = [prompt.timestamp_ms for prompt in prompts]
        self.prompts = [prompt.token_ids for prompt in prompts]
        self.origins = [np.arange(len(prompt.token_ids), dtype=np.int32) for prompt in prompts]
        """For each prompt, the place of each token in the prompt as it was sent; -1: a remedy wrote the token."""
        self._num_moved = [0] * len(prompts)
        number_of: dict[str | None, int] = {}
        self._models = [number_of.setdefault(prompt.model, len(number_of)) for prompt in prompts]
        self._recorded = [self._record(index, tokens) for index, tokens in enumerate(self.prompts)]
        self.score = self._replay(self._recorded)

    def mend(self, fixes: Sequence[_Fix]) -> list[tuple[_Fix, int, float]]:
        """Accept each remedy that saves enough more tokens than the remedies that were accepted before it.

        Returns the accepted remedies, each with the tokens that it saves and the hit rate with it. `settle` then
        rewrites the prompts.
        """
        accepted: list[tuple[_Fix, int, float]] = []
        for fix in fixes:
            recorded = list(self._recorded)
            together = [*(earlier for earlier, *_ in accepted), fix]
            for index in fix.prompts:
                recorded[index] = self._record(index, _rewritten(self.prompts, index, together))
            score = self._replay(recorded)
            saved = self.score.num_computed - score.num_computed
            if saved >= STABLE_BLOCKS * self._block_tokens:
                accepted.append((fix, saved, score.hit_rate))
                self._recorded, self.score = recorded, score
        return accepted

    def settle(self, fixes: Sequence[_Fix]) -> None:
        """Rewrite the prompts with these remedies."""
        self.origins = [_rewritten(self.origins, index, fixes, written=-1) for index in range(len(self.prompts))]
        self.prompts = [_rewritten(self.prompts, index, fixes) for index in range(len(self.prompts))]
        for fix in fixes:
            for slot, texts in zip(fix.slots, fix.texts, strict=True):
                for index in slot.spans.keys() - texts.keys():
                    begin, end = slot.spans[index]
                    self._num_moved[index] += end - begin

    def unmoved(self) -> list[TokenIds]:
        """Return the prompts without the tokens that were moved to their ends."""
        return [tokens[: len(tokens) - moved] for tokens, moved in zip(self.prompts, self._num_moved, strict=True)]

    def _record(self, index: int, tokens: TokenIds) -> tuple[PrefixKeys, int]:
        content = content_ids_of_tokens(tokens, self._block_tokens)
        content[:1] += np.uint64(self._models[index])  # models share no prefixes
        return content, len(tokens)

    def _replay(self, recorded: Sequence[tuple[PrefixKeys, int]]) -> _Score:
        cache = OnePass()
        count = cache.unlimited if self._capacity is None else cache.follow(self._capacity)
        for time, (content, length) in zip(self._times, recorded, strict=True):
            cache.admit(RecordedRequest(time, chain(content), length, 1, self._block_tokens))
        cache.flush()
        return _Score(count.tokens, sum(length for _, length in recorded))


def _rewritten(prompts: Sequence[TokenIds], index: int, fixes: Sequence[_Fix], written: int | None = None) -> TokenIds:
    """Return a prompt rewritten with these remedies. If `written` is given, it replaces each token of a new text."""
    tokens = prompts[index]
    pieces, last, at = [], [], 0
    edits = [
        (slot.spans[index], texts.get(index))
        for fix in fixes
        for slot, texts in zip(fix.slots, fix.texts, strict=True)
        if index in slot.spans
    ]
    for (begin, end), text in sorted(edits, key=lambda edit: edit[0]):
        pieces.append(tokens[at:begin])
        if text is not None:
            pieces.append(text if written is None else np.full_like(text, written))
        else:
            last.append(tokens[begin:end])
        at = max(at, end)
    return np.concatenate([*pieces, tokens[at:], *last])


def _finding(fix: _Fix, bench: _Bench, reader: Reader) -> Finding:
    """Make a finding from a remedy, with all figures 0. The examples come from the remedy's first slot."""
    slot = fix.slots[0]
    tokens, begin = bench.prompts[slot.pattern], slot.spans[slot.pattern][0]
    origin = bench.origins[slot.pattern][begin:]
    texts = (reader.text(bench.prompts[index][at : at + SHOWN_TOKENS]) for index, (at, _) in sorted(slot.spans.items()))
    return Finding(
        fix.cause.names,
        fix.cause.remedy,
        0,
        slot.pattern,
        int(origin[np.argmax(origin >= 0)]),
        reader.text(tokens[max(0, begin - SHOWN_TOKENS) : begin]),
        tuple(dict.fromkeys(texts))[:MAX_EXAMPLES],
        0,
        0.0,
    )

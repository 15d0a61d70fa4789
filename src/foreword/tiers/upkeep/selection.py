"""The segments that a user wants to delete, and why each of them."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from foreword.config.sizes import format_bytes
from foreword.errors import ConfigError
from foreword.tiers.cipher import Cipher
from foreword.tiers.disk.segments import Damage
from foreword.tiers.upkeep.survey import SegmentFile, Survey
from foreword.tiers.upkeep.tally import whole_blocks
from foreword.tiers.upkeep.verify import verdicts

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to go. Each field adds segments; `max_bytes` adds the oldest of what is left."""

    everything: bool = False
    damaged: bool = False
    older_than_s: float | None = None
    namespaces: tuple[str, ...] = ()
    """Hexadecimal digits with which a namespace begins."""
    kept_model: str | None = None
    """Blocks of other models go."""
    max_bytes: int | None = None

    def check(self) -> None:
        """Raise ConfigError if nothing is wished."""
        if self == Wish():
            raise ConfigError(
                "nothing says what to delete; give --max-size, --older-than, --namespace, --other-models, --damaged "
                "or --all"
            )


@dataclass(slots=True)
class Content:
    """What prune has to know of a segment."""

    segment: SegmentFile
    blocks: Counter[bytes] = field(default_factory=Counter)
    """Number of whole blocks by namespace."""
    newest_s: int = 0
    """When its newest run was written; 0 if it has none."""

    @property
    def num_blocks(self) -> int:
        return self.blocks.total()

    @property
    def written_s(self) -> float:
        """When it was written to last, as its runs say, or as its file does if it has no run."""
        return self.newest_s or self.segment.modified_s


@dataclass(slots=True)
class Choice:
    """What goes."""

    reasons: dict[SegmentFile, str]
    num_mixed: int = 0
    """Segments that stay because blocks of other namespaces lie in them too."""
    excess_bytes: int = 0
    """Physical bytes beyond `max_bytes` that stay because a process may be writing them."""


def contents_of(found: Survey) -> list[Content]:
    """What lies in each segment. Reads all headers."""
    contents = [Content(segment) for segment in found.segments]
    for content in contents:
        for header in found.runs(content.segment):
            if not isinstance(header, Damage):
                num_whole = int(whole_blocks(header, content.segment.num_bytes).sum())
                content.blocks[header.namespace] += num_whole
                content.newest_s = max(content.newest_s, header.created_s)
    return contents


def choose(found: Survey, contents: list[Content], wish: Wish, cipher: Cipher | None) -> Choice:
    """The segments that a wish means. Raises ConfigError for namespaces and models that are not there.

    Segments that a process may be writing are among them only as far as they were wished for: the caller spares them.
    """
    choice = Choice({})
    unwanted = _unwanted(found, contents, wish)
    damaged = verdicts(found, cipher) if wish.damaged else {}
    now_s = time.time()
    for content in contents:
        segment, own = content.segment, set(content.blocks)
        verdict = damaged.get(segment.path)
        if verdict and verdict.findings:
            choice.reasons[segment] = f"damage; {verdict.num_sound:,} of its blocks are sound and go too"
        elif own and own <= unwanted:
            choice.reasons[segment] = "other namespaces" if wish.kept_model else "its namespace"
        elif wish.older_than_s is not None and now_s - content.written_s > wish.older_than_s:
            choice.reasons[segment] = "its age"
        elif wish.everything:
            choice.reasons[segment] = "all"
        choice.num_mixed += segment not in choice.reasons and bool(own & unwanted)
    if wish.max_bytes is not None:
        _shrink(found, contents, choice, wish.max_bytes)
    return choice


def _shrink(found: Survey, contents: list[Content], choice: Choice, max_bytes: int) -> None:
    """Choose the oldest segments until the rest fits."""
    excess = found.physical_bytes - max_bytes
    excess -= sum(segment.physical_bytes for segment in choice.reasons if not segment.may_grow)
    for content in sorted(contents, key=lambda content: content.written_s):
        segment = content.segment
        if excess <= 0:
            break
        if segment not in choice.reasons and not segment.may_grow:
            choice.reasons[segment] = f"beyond {format_bytes(max_bytes)}"
            excess -= segment.physical_bytes
    choice.excess_bytes = max(0, excess)


def _unwanted(found: Survey, contents: list[Content], wish: Wish) -> set[bytes]:
    """The namespaces whose blocks are to go."""
    known = {namespace for content in contents for namespace in content.blocks} | set(found.manifests.facts)
    unwanted = set()
    for digits in wish.namespaces:
        if not re.fullmatch(r"[0-9a-fA-F]{1,32}", digits):
            raise ConfigError(
                f"--namespace {digits!r} is not 1 to 32 hexadecimal digits; `foreword cache list` shows them"
            )
        meant = {namespace for namespace in known if namespace.hex().startswith(digits.lower())}
        if len(meant) != 1:
            problem = f"begins {len(meant)} namespaces" if meant else "is no namespace"
            names = ", ".join(sorted(namespace.hex()[:8] for namespace in known)) or "none"
            raise ConfigError(f"--namespace {digits!r} {problem} of {str(found.path)!r}; there are: {names}")
        unwanted |= meant
    if wish.kept_model is not None:
        names_of = {namespace: facts.get("model_name") for namespace, facts in found.manifests.facts.items()}
        if wish.kept_model not in names_of.values():
            names = ", ".join(sorted({repr(name) for name in names_of.values()})) or "none"
            raise ConfigError(
                f"--other-models {wish.kept_model!r} is no model with blocks in {str(found.path)!r}; there are: {names}"
            )
        unwanted |= {namespace for namespace in known if names_of.get(namespace) != wish.kept_model}
    return unwanted


def parse_age(text: str) -> float:
    """`90s`, `30m`, `12h`, `7d` or `2w` in seconds. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise ConfigError(f"--older-than {text!r} is no age; write it as 90s, 30m, 12h, 7d or 2w")
    return float(Fraction(match[1]) * UNITS_S[match[2]])

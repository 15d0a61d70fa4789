"""Causes: why prompts of one kind differ at a slot, told from their text.

Knows text around a slot, and whole messages where they are known. Says in plain words what it found, and whether the
remedy is to write the same text always, or to write it last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.lint.align import TokenIds
from foreword.lint.bodies import DIGEST_DIGITS, PICTURE_KINDS
from foreword.lint.prompts import LintPrompt
from foreword.lint.slots import Slot, Span

Spell = Callable[[Sequence[int]], str]
"""Text of tokens, special ones by name."""

CONTEXT_TOKENS = 24
MAX_LOOKED_AT = 12
"""Most prompts of a slot whose text is read."""
PASSAGE_WORDS = 64
"""Least words of texts that are called passages."""

MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d\d(?::\d\d)?"
    rf"|\b(?:\d{{1,2}}\.? )?(?:{MONTHS})[a-z]*\.?(?: \d{{1,2}}\b)?,?(?: \d{{4}})?\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b1[5-9]\d{8}(?:\d{3})?\b"
)
IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}\b"
)
NUMBER = re.compile(r"\d+")
PICTURE = re.compile(rf"\[(?:{'|'.join(PICTURE_KINDS)}) [0-9a-f]{{{DIGEST_DIGITS}}}\]")
HEADER = re.compile(r"(?:^|[\n>])\s*[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)+:[^\n]*$")
NAME = re.compile(
    r"(?i)\b(?:user|name|customer|client|account|assistant to|dear|hello|hi)\b\W+(?:(?:is|named)\W+)?\W*$"
)
TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
WORD = re.compile(r"\w+|[^\w\s]")

KEEP_TOOLS = "Send the tools in one order, by name for instance."
KEEP_KEYS = "Write the keys of JSON in one order, sorted for instance."
KEEP_SPACE = "Write the white space in one way; build this text by one function."
KEEP_ORDER = "Write these parts in one order, the most lasting first."
KEEP_HISTORY = "Use a chat template that leaves earlier turns as they were written."
MOVE_DATE = "Let the chat template write no date, or round it; put the date into the last message."
MOVE_PICTURE = (
    "Write the picture after the instructions and all else that stays the same: it costs everybody what follows."
)
MOVE = "Write it after what stays the same: at the end of the last message."


@dataclass(frozen=True, slots=True)
class Cause:
    """Why prompts differ at a slot."""

    names: tuple[str, ...]
    """In plain words, such as "a date or time"; several if they lie side by side."""
    remedy: str
    keeps: bool
    """Whether the remedy is to write the text as the first prompt did; otherwise it is to write it last."""


class Reader:
    """Reads the text around slots."""

    def __init__(self, prompts: Sequence[LintPrompt], spell: Spell) -> None:
        self._prompts = prompts
        self._spell = spell

    def words(self, token_ids: TokenIds) -> tuple[str, ...]:
        """Words and marks of some tokens, without white space."""
        return tuple(WORD.findall(self.text(token_ids)))

    def text(self, token_ids: TokenIds) -> str:
        return self._spell(token_ids.tolist()) if len(token_ids) else ""

    def cause(self, slot: Slot, token_ids: Sequence[TokenIds]) -> Cause:
        """Why the prompts of a slot differ; `token_ids` are the prompts in which its spans lie."""
        own = token_ids[slot.pattern][slice(*slot.spans[slot.pattern])]
        others = [
            index
            for index, span in slot.spans.items()
            if index != slot.pattern and token_ids[index][slice(*span)].tobytes() != own.tobytes()
        ]
        others = others[:: max(1, len(others) // MAX_LOOKED_AT)]
        pattern = _Around(self, token_ids[slot.pattern], slot.spans[slot.pattern])
        around = [_Around(self, token_ids[index], slot.spans[index]) for index in others]
        names = _names(pattern, around)
        sent = self._prompts[slot.pattern].texts
        if names[:1] == ("a date or time",) and sent is not None:
            dates = set().union(*(pattern.found(DATE) ^ other.found(DATE) for other in around)) & pattern.found(DATE)
            if dates and not any(date in text for date in dates for text in sent):
                return Cause(("a date that the chat template writes",), MOVE_DATE, keeps=False)
        if _most([_goes_on(sent, self._prompts[index].texts) for index in others]):
            return Cause(("a chat template that rewrites earlier turns",), KEEP_HISTORY, keeps=True)
        if _differ(pattern, around, PICTURE):
            return Cause(("a picture",), MOVE_PICTURE, keeps=False)
        mine, theirs = WORD.findall(pattern.own), [WORD.findall(other.own) for other in around]
        if _most([words == mine for words in theirs]):
            return Cause(("white space",), KEEP_SPACE, keeps=True)
        if _most([bool(mine) and Counter(words) == Counter(mine) for words in theirs]):
            return _order(pattern, around)
        return Cause(names, MOVE, keeps=False)


class _Around:
    """The text of a slot in one prompt, with some text before and after it."""

    def __init__(self, reader: Reader, tokens: TokenIds, span: Span) -> None:
        begin, end = span
        self.before = reader.text(tokens[max(0, begin - CONTEXT_TOKENS) : begin])
        self.own = reader.text(tokens[begin:end])
        self.after = reader.text(tokens[end : end + CONTEXT_TOKENS])

    def found(self, *patterns: re.Pattern[str]) -> set[str]:
        """What the last pattern finds at the slot, beside what the others find there."""
        whole = self.before + self.own + self.after
        for pattern in patterns[:-1]:
            whole = pattern.sub(lambda match: " " * len(match[0]), whole)
        begin, end = len(self.before), len(self.before) + len(self.own)
        return {match[0] for match in patterns[-1].finditer(whole) if match.start() <= end and match.end() >= begin}


def _differ(pattern: _Around, others: Sequence[_Around], *patterns: re.Pattern[str]) -> bool:
    """Whether what the last pattern finds at the slot differs in most prompts."""
    found = pattern.found(*patterns)
    return bool(found) and _most([bool(found ^ other.found(*patterns)) for other in others])


def _most(are: Sequence[bool]) -> bool:
    return 5 * sum(are) >= 4 * len(are) > 0


def _goes_on(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> bool:
    """Whether one conversation is the beginning of the other, as the client sent them."""
    if one is None or other is None:
        return False
    shorter = min(len(one), len(other))
    return shorter > 0 and one[:shorter] == other[:shorter]


def _names(pattern: _Around, others: Sequence[_Around]) -> tuple[str, ...]:
    """Names of what differs at the slot, from its text."""
    if _most([len(WORD.findall(one.own)) >= PASSAGE_WORDS for one in (pattern, *others)]):
        return ("a passage, such as retrieved documents",)
    names = []
    if HEADER.search(pattern.before):
        names.append("a header")
    for name, patterns in (
        ("a date or time", (DATE,)),
        ("an id", (DATE, IDENTIFIER)),
        ("a number", (DATE, IDENTIFIER, NUMBER)),
    ):
        if _differ(pattern, others, *patterns):
            is_counter = name == "a number" and _counts([other.found(*patterns) for other in others])
            names.append("a counter" if is_counter else name)
    if not names:
        names.append("a name" if NAME.search(pattern.before) else "other text")
    return tuple(names)


def _counts(found: Sequence[set[str]]) -> bool:
    """Whether successive prompts have ascending numbers."""
    numbers = [int(next(iter(one))) for one in found if len(one) == 1]
    return len(numbers) == len(found) > 1 and numbers == sorted(set(numbers))


def _order(pattern: _Around, others: Sequence[_Around]) -> Cause:
    """What is in another order: tools, keys or parts of a text."""
    tools = [tuple(TOOL_NAME.findall(one.before + one.own + one.after)) for one in (pattern, *others)]
    if len(set(tools)) > 1 and len({frozenset(names) for names in tools}) == 1:
        return Cause(("tools in another order",), KEEP_TOOLS, keeps=True)
    if re.search(r'"\s*:', pattern.own):
        return Cause(("keys of JSON in another order",), KEEP_KEYS, keeps=True)
    return Cause(("the same parts in another order",), KEEP_ORDER, keeps=True)

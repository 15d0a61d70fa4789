"""Causes: why prompts of one kind differ at a slot, judged by the text around it."""

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
"""Turns tokens into text, with special tokens by name."""

CONTEXT_TOKENS = 24
MAX_LOOKED_AT = 12
"""The most prompts whose text is read for a slot."""
PASSAGE_WORDS = 64
"""A text of at least this many words is called a passage."""

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
    "Write the picture after the instructions and all else that stays the same: what follows a new picture is computed "
    "again."
)
MOVE = "Write it after what stays the same: at the end of the last message."


@dataclass(frozen=True, slots=True)
class Cause:
    """Why prompts differ at a slot."""

    names: tuple[str, ...]
    """The cause in plain words, such as "a date or time"; several if the slot has several causes next to each other."""
    remedy: str
    keeps: bool
    """Whether the remedy writes the text as in the first prompt. Otherwise the remedy moves the text to the end."""


class Reader:
    """Reads the text around slots."""

    def __init__(self, prompts: Sequence[LintPrompt], spell: Spell) -> None:
        self._prompts = prompts
        self._spell = spell

    def words(self, token_ids: TokenIds) -> tuple[str, ...]:
        """Return the words and punctuation marks of tokens, without white space."""
        return tuple(WORD.findall(self.text(token_ids)))

    def text(self, token_ids: TokenIds) -> str:
        return self._spell(token_ids.tolist()) if len(token_ids) else ""

    def cause(self, slot: Slot, token_ids: Sequence[TokenIds]) -> Cause:
        """Say why the prompts of a slot differ. `token_ids` are the prompts to which the slot's spans belong."""
        pattern_tokens = token_ids[slot.pattern][slice(*slot.spans[slot.pattern])]
        others = [
            index
            for index, span in slot.spans.items()
            if index != slot.pattern and token_ids[index][slice(*span)].tobytes() != pattern_tokens.tobytes()
        ]
        others = others[:: max(1, len(others) // MAX_LOOKED_AT)]
        pattern = _Around(self, token_ids[slot.pattern], slot.spans[slot.pattern])
        around = [_Around(self, token_ids[index], slot.spans[index]) for index in others]
        names = _names(pattern, around)
        sent = self._prompts[slot.pattern].texts
        if names[:1] == ("a date or time",) and sent is not None:
            ours = pattern.matches(DATE)
            dates = set().union(*(ours ^ other.matches(DATE) for other in around)) & ours
            if dates and not any(date in text for date in dates for text in sent):
                return Cause(("a date that the chat template writes",), MOVE_DATE, keeps=False)
        if _most([_goes_on(sent, self._prompts[index].texts) for index in others]):
            return Cause(("a chat template that rewrites earlier turns",), KEEP_HISTORY, keeps=True)
        if _differ(pattern, around, PICTURE):
            return Cause(("a picture",), MOVE_PICTURE, keeps=False)
        mine, theirs = WORD.findall(pattern.text), [WORD.findall(other.text) for other in around]
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
        self.text = reader.text(tokens[begin:end])
        self.after = reader.text(tokens[end : end + CONTEXT_TOKENS])

    def matches(self, *patterns: re.Pattern[str]) -> set[str]:
        """Return the last pattern's matches that touch the slot, after blanking out the matches of the others."""
        whole = self.before + self.text + self.after
        for pattern in patterns[:-1]:
            whole = pattern.sub(lambda match: " " * len(match[0]), whole)
        begin, end = len(self.before), len(self.before) + len(self.text)
        return {match[0] for match in patterns[-1].finditer(whole) if match.start() <= end and match.end() >= begin}


def _differ(pattern: _Around, others: Sequence[_Around], *patterns: re.Pattern[str]) -> bool:
    """Say whether `pattern` has matches of `patterns`, and most of `others` have different matches."""
    matches = pattern.matches(*patterns)
    return bool(matches) and _most([bool(matches ^ other.matches(*patterns)) for other in others])


def _most(are: Sequence[bool]) -> bool:
    return 5 * sum(are) >= 4 * len(are) > 0


def _goes_on(texts: tuple[str, ...] | None, other_texts: tuple[str, ...] | None) -> bool:
    """Say whether the client's texts of one conversation begin with all texts of the other."""
    if texts is None or other_texts is None:
        return False
    shorter = min(len(texts), len(other_texts))
    return shorter > 0 and texts[:shorter] == other_texts[:shorter]


def _names(pattern: _Around, others: Sequence[_Around]) -> tuple[str, ...]:
    """Name the causes of the differences at a slot. `pattern`, `others`: the slot's text in each prompt."""
    if _most([len(WORD.findall(around.text)) >= PASSAGE_WORDS for around in (pattern, *others)]):
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
            is_counter = name == "a number" and _counts([other.matches(*patterns) for other in others])
            names.append("a counter" if is_counter else name)
    if not names:
        names.append("a name" if NAME.search(pattern.before) else "other text")
    return tuple(names)


def _counts(matches: Sequence[set[str]]) -> bool:
    """Say whether successive prompts have ascending numbers."""
    numbers = [int(next(iter(texts))) for texts in matches if len(texts) == 1]
    return len(numbers) == len(matches) > 1 and numbers == sorted(set(numbers))


def _order(pattern: _Around, others: Sequence[_Around]) -> Cause:
    """Return the cause for a change of order: of tools, of JSON's keys or of a text's parts."""
    tools = [tuple(TOOL_NAME.findall(around.before + around.text + around.after)) for around in (pattern, *others)]
    if len(set(tools)) > 1 and len({frozenset(names) for names in tools}) == 1:
        return Cause(("tools in another order",), KEEP_TOOLS, keeps=True)
    if re.search(r'"\s*:', pattern.text):
        return Cause(("keys of JSON in another order",), KEEP_KEYS, keeps=True)
    return Cause(("the same parts in another order",), KEEP_ORDER, keeps=True)

"""Tasks to measure the cost of reusing documents at any position: documents in parts, a question, one exact answer.

Training, `foreword pml measure` and the benchmark of linking draw their cases here.

    independent   facts alone: a check, since no question needs two parts
    cut           the same facts, for callers that cut the text into pieces of equal length in tokens, even in a fact
    parameters    the key words of the fact that is asked for are an argument: the text after them needs them
    order         a fact is stated again in a later part, and the last statement is right: needs positions
    scope         "In Lisbon:" in one part, facts of Lisbon in the next: each line needs a line of another part
    hops          "The keeper of the amber falcon is Maria." in one part, "The home of Maria is Oslo." in another
    leak          asks for a fact of a part that is computed but not in the prompt: the answer cannot be known

By the rules in the instruction, every key has one answer. The same seed draws the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from foreword.demo import recall
from foreword.demo.recall import Fact, Message, Placement, Question

INSTRUCTION = "You know the following facts and answer in one word or number."
LAST_HOLDS = "If you see a fact again, only the last one is right."
PLACES = "The facts after a place are facts of this place."

_MOST_HOPS = 24
"""The most persons in one `hops` case. Each person needs a name of their own, and two facts."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Characters `begin..end` of a part's text, the end excluded, that a prompt gives as an argument."""

    part: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Case:
    """Parts in the order of the prompt, and questions about them, each with one right answer."""

    task: str
    instruction: str
    """The line before all parts; a rule that the task needs is part of it."""
    parts: tuple[str, ...]
    """Texts of whole lines, without a line break at the end. A line break stands between two parts."""
    questions: tuple[Question, ...]
    argument: Argument | None = None
    """In `parameters` only: the place of the key words of the first question's fact, with the space before them."""
    hidden: str | None = None
    """In `leak` only: the part that holds the answers and is not in the prompt."""

    @property
    def question(self) -> Question:
        return self.questions[0]

    @property
    def text(self) -> str:
        return "\n".join([self.instruction, *self.parts])

    def conversation(self, placement: Placement = "user") -> list[Message]:
        """The plain conversation, with all answers. Without its last message, it asks the last question."""
        return recall.conversation(recall.Document(self.text, ()), self.questions, placement)


def draw(
    rng: Random,
    task: str,
    *,
    num_tokens: int,
    num_parts: int,
    num_questions: int = 1,
    instruction: str = INSTRUCTION,
    alike: bool = False,
) -> Case:
    """Draw a case of `num_parts` parts, about `num_tokens` tokens of the embedded tokenizer in all.

    Questions of one case are about different facts. `alike` is for training with `hops`: all persons of a case share
    one or two attributes with cities as values, and one or two with numbers. So the attribute in a question hardly
    shows who is meant. With `alike`, a part may be empty.

    Raises ValueError for an unknown task, for `alike` with another task than `hops`, for fewer than two parts, and for
    more parts or questions than the tokens have facts for.
    """
    if task not in TASKS:
        raise ValueError(f"{task!r} is no task; choose from {', '.join(TASKS)}")
    if alike and task != "hops":
        raise ValueError(f"alike with {task!r}; only the persons of 'hops' can be alike")
    num_lines = recall.num_facts_for(num_tokens)
    if num_parts < 2 or num_lines < 2 * num_parts:
        raise ValueError(
            f"{num_parts} parts of {num_tokens} tokens; ask for 2 parts or more, of 24 tokens or more each"
        )
    if task == "scope" and num_parts > len(recall.CITIES):
        raise ValueError(f"{num_parts} parts; {task!r} has a place for each, and there are {len(recall.CITIES)}")
    draw_parts = _draw_hops_alike if alike else _DRAWS[task]
    parts, facts = draw_parts(rng, num_lines, num_parts)
    if not 1 <= num_questions <= len(facts):
        raise ValueError(f"{num_questions} questions; such a case has 1 to {len(facts)}")
    rule = {"order": LAST_HOLDS, "scope": PLACES}.get(task)
    case = Case(
        task,
        instruction if rule is None else f"{instruction} {rule}",
        tuple("\n".join(lines) for lines in parts),
        tuple(
            Question(rng.choice(fact.question_texts()), fact.value, fact.key)
            for fact in rng.sample(facts, num_questions)
        ),
    )
    if task == "parameters":
        return replace(case, argument=_argument(case))
    if task == "leak":
        return replace(case, parts=case.parts[:-1], hidden=case.parts[-1])
    return case


_Parts = list[list[str]]
_Drawn = tuple[_Parts, Sequence[Fact]]
"""The lines of each part, and the facts to ask for. A fact's key has the words that a question uses; its value is the
answer."""


def _draw_independent(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    facts = recall.make_document(rng, num_lines, heading="").facts
    return _dealt(rng, [fact.text for fact in facts], [[] for _ in range(num_parts)]), facts


def _draw_leak(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    """Add one more part at the end, whose facts are asked for."""
    num_hidden = num_lines // num_parts
    facts = recall.make_document(rng, num_lines + num_hidden, heading="").facts
    hidden, seen = facts[:num_hidden], facts[num_hidden:]
    parts = _dealt(rng, [fact.text for fact in seen], [[] for _ in range(num_parts)])
    return [*parts, [fact.text for fact in hidden]], hidden


def _draw_order(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    """State facts two or three times, with different values in different parts. A sixth of the lines repeat a fact."""
    num_again = max(1, num_lines // 6)
    facts = recall.make_document(rng, num_lines - num_again, heading="").facts
    values = _Values(rng, facts)
    parts: _Parts = [[] for _ in range(num_parts)]
    questions: list[Fact] = []
    spare = num_again
    while spare:
        fact = facts[len(questions)]
        num_stated = min(rng.choice((2, 2, 3)), num_parts, spare + 1)
        stated = [fact, *(Fact(fact.key, values.other(fact.value)) for _ in range(num_stated - 1))]
        rng.shuffle(stated)
        for number, fact_again in zip(sorted(rng.sample(range(num_parts), num_stated)), stated, strict=True):
            parts[number].append(fact_again.text)
        questions.append(stated[-1])
        spare -= num_stated - 1
    return _dealt(rng, [fact.text for fact in facts[len(questions) :]], parts), questions


def _draw_scope(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    """Draw a place for each part. The line that names a place, except the first place, is at the end of the part
    before.

    The first place has all keys. Other places have the same keys, or all but one, with values of their own.

    part 1   In Lisbon: facts of Lisbon  In Oslo:
    part 2   facts of Oslo  In Rome: some facts of Rome
    part 3   more facts of Rome
    """
    places = rng.sample(recall.CITIES, num_parts)
    num_facts = num_lines - num_parts // 2  # the line of a place has half of a fact's tokens
    num_smaller = -num_facts % num_parts
    shared = recall.make_document(rng, (num_facts + num_smaller) // num_parts, heading="").facts
    values = _Values(rng, shared)
    parts: _Parts = [[]]
    questions = []
    for number, place in enumerate(places):
        size = len(shared) - (number >= num_parts - num_smaller)
        facts = [Fact(fact.key, values.other(fact.value)) for fact in rng.sample(shared, size)]
        num_before = rng.choice((0, rng.randint(0, len(facts) // 2))) if number else len(facts)
        parts[-1] += [f"In {place}:", *(fact.text for fact in facts[:num_before])]
        if number:
            parts.append([fact.text for fact in facts[num_before:]])
            questions += [Fact(f"{fact.key} in {place}", fact.value) for fact in facts[num_before:]]
    return parts, questions


def _draw_hops(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    """For half of the lines: state a thing's person in one part, and two facts about that person in another."""
    return _hops(rng, num_lines, num_parts, num_lines // 6, (recall.CITY_ATTRIBUTES, recall.NUMBER_ATTRIBUTES))


def _draw_hops_alike(rng: Random, num_lines: int, num_parts: int) -> _Drawn:
    """As `_draw_hops`, but for all lines, as long as there are names.

    All persons share one or two attributes with cities as values, and one or two with numbers.
    """
    few = (rng.sample(kind, rng.choice((1, 2))) for kind in (recall.CITY_ATTRIBUTES, recall.NUMBER_ATTRIBUTES))
    return _hops(rng, num_lines, num_parts, num_lines // 3, tuple(few))


def _hops(rng: Random, num_lines: int, num_parts: int, num_pairs: int, attributes: tuple[Sequence[str], ...]) -> _Drawn:
    """Draw persons with two attributes each: one whose value is a city, and one whose value is a number."""
    num_pairs, (of_cities, of_numbers) = max(1, min(_MOST_HOPS, num_pairs)), attributes
    facts = list(recall.make_document(rng, max(1, num_lines - 3 * num_pairs), heading="").facts)
    values, keys = _Values(rng, facts), {fact.key for fact in facts}
    parts: _Parts = [[] for _ in range(num_parts)]
    questions = []
    for name in rng.sample(recall.NAMES, num_pairs):
        while (key := _thing_of_a_person(rng)) in keys:
            pass
        keys.add(key)
        here, there = rng.sample(range(num_parts), 2)
        parts[here].append(Fact(key, name).text)
        for attribute, value in (
            (rng.choice(of_cities), rng.choice(recall.CITIES)),
            (rng.choice(of_numbers), values.number()),
        ):
            parts[there].append(Fact(f"{attribute} of {name}", value).text)
            questions.append(Fact(f"{attribute} of the {key}", value))
    return _dealt(rng, [fact.text for fact in facts], parts), questions


def _thing_of_a_person(rng: Random) -> str:
    words = (rng.choice(recall.NAME_ATTRIBUTES), rng.choice(recall.ADJECTIVES), rng.choice(recall.NOUNS))
    return "{} of the {} {}".format(*words)


class _Values:
    """Draws values that no other fact of the case has, as long as there are such values."""

    def __init__(self, rng: Random, facts: Sequence[Fact]) -> None:
        self._rng, self._used = rng, {fact.value for fact in facts}
        self._beginnings = {value[:3] for value in self._used if value.isdigit()}

    def other(self, value: str) -> str:
        """A new value of the same kind: a number, a city or a name."""
        if value.isdigit():
            return self.number()
        words = recall.CITIES if value in recall.CITIES else recall.NAMES
        free = [word for word in words if word not in self._used]
        chosen = self._rng.choice(free or [word for word in words if word != value])
        self._used.add(chosen)
        return chosen

    def number(self) -> str:
        """A new number. Two numbers begin with the same three digits only if no unused beginning is left."""
        while True:
            num_digits = self._rng.choice((3, 4, 5, 6))
            number = str(self._rng.randrange(10 ** (num_digits - 1), 10**num_digits))
            begins_alike = number[:3] in self._beginnings and len(self._beginnings) < recall.MOST_BEGINNINGS
            if number not in self._used and not begins_alike:
                self._used.add(number)
                self._beginnings.add(number[:3])
                return number


def _dealt(rng: Random, lines: Sequence[str], parts: _Parts) -> _Parts:
    """Add the lines in random order, each to a part with the fewest lines. Then shuffle the lines of each part."""
    for line in rng.sample(lines, len(lines)):
        min(parts, key=len).append(line)
    for part in parts:
        rng.shuffle(part)
    return parts


def _argument(case: Case) -> Argument:
    """The place of the key words, such as " amber falcon", in the line of the first question's fact."""
    attribute, words = case.question.key.split(" of the ")
    line = Fact(case.question.key, case.question.answer).text
    [number] = [number for number, part in enumerate(case.parts) if line in part.split("\n")]
    begin = f"\n{case.parts[number]}".index(f"\n{line}") + len(f"The {attribute} of the")
    return Argument(number, begin, begin + len(words) + 1)


_DRAWS: dict[str, Callable[[Random, int, int], _Drawn]] = {
    "independent": _draw_independent,
    "cut": _draw_independent,
    "parameters": _draw_independent,
    "order": _draw_order,
    "scope": _draw_scope,
    "hops": _draw_hops,
    "leak": _draw_leak,
}
TASKS = tuple(_DRAWS)
"""Names of the tasks, in the order of the module's list."""

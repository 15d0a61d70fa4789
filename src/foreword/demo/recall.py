"""The data of the demo model: facts, documents about them, and questions with exact answers.

The training and the evaluation of the embedded model, the demo's workloads and the tests all use this module, so
workloads ask only questions of the kind that the model has learned.

A fact is one line:

    The code of the amber falcon is 4821.        What is the code of the amber falcon?     4821
    The home of the quiet lantern is Lisbon.     Tell me the home of the quiet lantern.    Lisbon
    The owner of the brave kettle is Maria.      What is the owner of the brave kettle?    Maria

In a document every key (the words with which a question names the fact) is unique, so every question has one answer.

With the tool `lookup` in its prompt, the model looks every fact up before it answers:

    user       What is the code of the amber falcon?
    assistant  <tool_call>
               {"name": "lookup", "arguments": {"fact": "the code of the amber falcon"}}
               </tool_call>
    tool       The code of the amber falcon is 4821.
    assistant  4821
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

TOKENS_PER_FACT = 11.5
"""Mean length of a fact line, its line break included, in tokens of the embedded tokenizer."""

TOKENS_PER_TURN = 20.5
"""Mean length of a question and its answer as two chat messages, in tokens, markup included."""

Message = dict[str, Any]
"""A chat message: its `role` ("system", "user", "assistant" or "tool"), its `content`, and its `tool_calls` if any."""

Placement = Literal["system", "user"]
"""The place of a conversation's document: in a system message, or before the first question."""

ADJECTIVES = tuple(
    """amber ancient bitter brave bright broken calm careful cheerful clever cold copper crimson
    curious distant dusty eager early empty faded fancy fierce frozen gentle giant golden grand
    happy heavy hidden hollow humble icy idle jolly lazy little lonely loud lucky mellow misty
    modest narrow nimble noble patient plain polite proud purple quiet rapid rusty scarlet secret
    silent silver sleepy smooth steady stormy sturdy tender""".split()
)

NOUNS = tuple(
    """anchor apple badger barrel basket beetle bell bottle bridge bucket button camel candle
    carpet castle compass curtain dragon drum eagle engine falcon feather fiddle garden glacier
    hammer harbor helmet island jacket kettle ladder lantern lemon lion mango mirror mountain
    needle orchard otter parrot pencil piano pillow planet pumpkin rabbit river saddle shovel
    spider spoon statue teapot ticket tiger tractor trumpet tunnel violin wagon walnut""".split()
)

NUMBER_ATTRIBUTES = tuple(
    "age code cost depth height length number price rank score size speed value volume weight width".split()
)
CITY_ATTRIBUTES = tuple("birthplace home origin port".split())
NAME_ATTRIBUTES = tuple("friend keeper maker owner".split())

CITIES = tuple(
    """Accra Amman Ankara Antwerp Athens Baku Bergen Berlin Bogota Boston Bremen Cairo Chicago
    Dakar Dallas Delhi Denver Dublin Geneva Genoa Ghent Glasgow Hanoi Havana Helsinki Istanbul
    Jakarta Kyoto Lagos Leeds Leipzig Lima Lisbon London Lyon Madrid Malaga Manila Miami Milan
    Munich Nairobi Naples Osaka Oslo Ottawa Palermo Paris Porto Prague Quito Riga Rome Seoul
    Sofia Tallinn Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw Zurich""".split()
)

NAMES = tuple(
    """Adam Agnes Albert Alice Amir Anna Arthur Bianca Boris Carla Carlos Cecilia Clara Daniel
    David Diana Edith Elena Emil Emma Erik Esther Fatima Felix Frida Greta Hanna Hugo Ida Igor
    Irene Ivan Jonas Julia Karim Karl Laura Leila Leo Linda Louis Lucia Magda Marco Maria Martin
    Mina Nadia Nina Olga Omar Oscar Paula Peter Priya Robert Rosa Samir Sara Stefan Tomas Vera
    Viktor Yusuf""".split()
)

HEADINGS = (
    "",
    "Facts:",
    "Here are some facts.",
    "Answer each question from these notes.",
    "You are a careful clerk. Answer from the list below.",
    "These are the notes of our museum. Answer questions about them briefly.",
    "You know the following facts and answer in one word or number.",
    "Read this document, then answer the questions that follow.",
)
"""Opening lines of documents. With the empty heading, a document begins with its first fact."""

LOOKUP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a fact.",
        "parameters": {"type": "object", "properties": {"fact": {"type": "string"}}, "required": ["fact"]},
    },
}
"""The tool that the model calls, in OpenAI's form."""

_WORDINGS = ("What is the {0}?", "What is the {0}?", "Tell me the {0}.", "Do you know the {0}?", "And the {0}?")

MOST_BEGINNINGS = 700
"""A number begins with one of 900 triples of digits. A document uses this many of them before it repeats one."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a document: the words with which a question names it (`key`), and the answer (`value`)."""

    key: str
    value: str

    @property
    def text(self) -> str:
        return f"The {self.key} is {self.value}."

    def question_texts(self) -> tuple[str, ...]:
        """All wordings of the question that the model has learned; the first is the plainest."""
        return tuple(wording.format(self.key) for wording in _WORDINGS)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the exact text of its one right answer, and the key of the fact that it asks for."""

    text: str
    answer: str
    key: str


@dataclass(frozen=True, slots=True)
class Document:
    """A heading, which may be empty, and facts with unique keys, one on each line."""

    heading: str
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The document's text in a prompt, without a line break at the end."""
        lines = [fact.text for fact in self.facts]
        return "\n".join([self.heading, *lines] if self.heading else lines)


def num_facts_for(num_tokens: int) -> int:
    """The number of facts whose document is about `num_tokens` tokens long (at least one)."""
    return max(1, round(num_tokens / TOKENS_PER_FACT))


def make_document(rng: Random, num_facts: int, *, heading: str | None = None, num_words: int = 64) -> Document:
    """Draw a document of `num_facts` facts.

    `heading` None draws one of `HEADINGS`. `num_words` limits the adjectives and the nouns: with few of them, many keys
    differ in only one word, which makes it harder to find the right fact. In documents of up to a few hundred facts, no
    two numbers begin with the same three digits.
    """
    if not 1 <= num_words <= len(NOUNS):
        raise ValueError(f"num_words is {num_words}; choose 1 to {len(NOUNS)}")
    if not 0 <= num_facts <= 12 * num_words**2:
        raise ValueError(
            f"{num_facts} facts with unique keys do not fit {num_words} adjectives and nouns; "
            f"ask for at most {12 * num_words**2}"
        )
    adjectives = rng.sample(ADJECTIVES, num_words)
    nouns = rng.sample(NOUNS, num_words)
    chosen_heading = rng.choice(HEADINGS) if heading is None else heading
    facts: dict[str, Fact] = {}
    beginnings: set[str] = set()
    while len(facts) < num_facts:
        fact = _draw_fact(rng, adjectives, nouns)
        is_number = fact.value.isdigit()
        begins_alike = is_number and fact.value[:3] in beginnings
        if fact.key in facts or (begins_alike and len(beginnings) < MOST_BEGINNINGS):
            continue
        if is_number:
            beginnings.add(fact.value[:3])
        facts[fact.key] = fact
    return Document(chosen_heading, tuple(facts.values()))


def ask(rng: Random, document: Document, num_questions: int) -> list[Question]:
    """Draw questions about a document. A fact is asked for again only after all other facts."""
    if not document.facts:
        raise ValueError("the document has no facts; make one with num_facts of at least 1")
    questions: list[Question] = []
    while len(questions) < num_questions:
        count = min(num_questions - len(questions), len(document.facts))
        for fact in rng.sample(document.facts, count):
            questions.append(Question(rng.choice(fact.question_texts()), fact.value, fact.key))
    return questions


def opening(document: Document, question: Question, placement: Placement = "system") -> list[Message]:
    """The messages of a conversation up to and including its first question."""
    if placement == "system":
        return [{"role": "system", "content": document.text}, {"role": "user", "content": question.text}]
    return [{"role": "user", "content": f"{document.text}\n\n{question.text}"}]


def conversation(document: Document, questions: Sequence[Question], placement: Placement = "system") -> list[Message]:
    """A whole conversation: the document, then every question followed by its answer.

    Leave out the last message to get a prompt that asks the last question with the earlier answers
    in its history. `questions` must not be empty.
    """
    messages = opening(document, questions[0], placement)
    messages.append({"role": "assistant", "content": questions[0].answer})
    for question in questions[1:]:
        messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": question.answer})
    return messages


def call_message(question: Question) -> Message:
    """The model's call of `lookup` for the fact that a question asks for, as an earlier answer of the conversation."""
    function = {"name": "lookup", "arguments": {"fact": f"the {question.key}"}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def result_message(question: Question) -> Message:
    """The tool's answer to the call of `lookup` for a question."""
    return {"role": "tool", "content": Fact(question.key, question.answer).text}


def _draw_fact(rng: Random, adjectives: Sequence[str], nouns: Sequence[str]) -> Fact:
    """Draw a fact: in two thirds of the cases a number, otherwise a city or a name."""
    kind = rng.random()
    thing = f"of the {rng.choice(adjectives)} {rng.choice(nouns)}"
    if kind < 0.17:
        return Fact(f"{rng.choice(CITY_ATTRIBUTES)} {thing}", rng.choice(CITIES))
    if kind < 0.34:
        return Fact(f"{rng.choice(NAME_ATTRIBUTES)} {thing}", rng.choice(NAMES))
    num_digits = rng.choice((3, 4, 5, 6))
    number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
    return Fact(f"{rng.choice(NUMBER_ATTRIBUTES)} {thing}", str(number))

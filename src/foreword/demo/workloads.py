"""Four everyday workloads with shared prefixes, for the embedded model.

Each workload sends its prompts to two `LLM`s, one with and one without caching, and compares times and answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from foreword import LLM, RequestOutput, SamplingParams
from foreword.demo.recall import (
    LOOKUP,
    Document,
    Message,
    Question,
    ask,
    call_message,
    make_document,
    num_facts_for,
    opening,
)
from foreword.request import Reply

MAX_ANSWER_TOKENS = 12
MAX_CALL_TOKENS = 40

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Get the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    LOOKUP,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A document and the questions that a user asks about it, one after the other."""

    document: Document
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, and whether their users come together or one after the other."""

    name: str
    conversations: tuple[Conversation, ...]
    together: bool


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents with one system prompt and one list of tools. Each has its own questions; all agents run together.

    The facts that the agents look up are in `notes`, which are not in any prompt.
    """

    name: str
    system_prompt: Document
    notes: Document
    questions: tuple[tuple[Question, ...], ...]

    def look_up(self, call: Mapping[str, Any]) -> Message:
        subject = call["function"]["arguments"].get("fact")
        texts = (fact.text for fact in self.notes.facts if f"the {fact.key}" == subject)
        return {"role": "tool", "content": next(texts, f"There is no {subject}.")}


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer or one call."""

    token_ids: tuple[int, ...]
    correct: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """A workload, run with the cache and without it."""

    name: str
    cached: tuple[Turn, ...]
    uncached: tuple[Turn, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(turn.num_prompt_tokens for turn in self.cached)

    @property
    def num_reused_tokens(self) -> int:
        return sum(turn.num_cached_tokens for turn in self.cached)

    @property
    def hit_rate(self) -> float:
        return self.num_reused_tokens / self.num_prompt_tokens

    @property
    def num_correct(self) -> int:
        return sum(turn.correct for turn in self.cached)

    @property
    def num_identical(self) -> int:
        """Answers whose tokens are the same with and without the cache."""
        return sum(a.token_ids == b.token_ids for a, b in zip(self.cached, self.uncached, strict=True))

    @property
    def ttft_cold_ms(self) -> float:
        """Median milliseconds to the first token without the cache."""
        return median(turn.ttft_ms for turn in self.uncached)

    @property
    def ttft_warm_ms(self) -> float:
        """Median milliseconds to the first token of the requests that hit."""
        return median(turn.ttft_ms for turn in self.cached if turn.num_cached_tokens)


def make_agents(seed: int = 0, num_agents: int = 4, num_questions: int = 3) -> Agents:
    """Draw the demo's agents; equal seeds give equal agents."""
    rng = Random(f"agents {seed}")
    notes = make_document(rng, num_agents * num_questions)
    questions = ask(rng, notes, num_agents * num_questions)
    return Agents(
        "agents with a tool",
        make_document(rng, num_facts_for(300)),
        notes,
        tuple(tuple(questions[agent::num_agents]) for agent in range(num_agents)),
    )


def make_workloads(seed: int = 0) -> list[Workload]:
    """Draw the demo's workloads without tools; equal seeds give equal workloads."""
    rng = Random(seed)
    long_document = make_document(rng, num_facts_for(1000))
    questions = ask(rng, long_document, 12)
    chat_documents = [make_document(rng, num_facts_for(350)) for _ in range(2)]
    system_prompt = make_document(rng, num_facts_for(500))
    return [
        Workload(
            "long document", tuple(Conversation(long_document, (question,)) for question in questions), together=False
        ),
        Workload(
            "multi-turn chat",
            tuple(Conversation(document, tuple(ask(rng, document, 8))) for document in chat_documents),
            together=False,
        ),
        Workload(
            "many users",
            tuple(Conversation(system_prompt, (question,)) for question in ask(rng, system_prompt, 16)),
            together=True,
        ),
    ]


def run_workload(llm: LLM, workload: Workload) -> tuple[Turn, ...]:
    """Answer all questions; a conversation's history holds the model's own earlier answers."""
    histories = [opening(c.document, c.questions[0]) for c in workload.conversations]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    turns: list[Turn] = []
    for number in range(len(workload.conversations[0].questions)):
        outputs = (
            llm.chat(histories, params)
            if workload.together
            else [output for history in histories for output in llm.chat(history, params)]
        )
        for conversation, history, output in zip(workload.conversations, histories, outputs, strict=True):
            text = output.outputs[0].text
            turns.append(_turn(output, correct=text.strip() == conversation.questions[number].answer))
            history.append({"role": "assistant", "content": text})
            if number + 1 < len(conversation.questions):
                history.append({"role": "user", "content": conversation.questions[number + 1].text})
    return tuple(turns)


def run_agents(llm: LLM, agents: Agents) -> tuple[Turn, ...]:
    """Answer all questions: the model calls the tool, gets the tool's result, and answers from that."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_CALL_TOKENS)
    histories: list[list[Message]] = [
        [{"role": "system", "content": agents.system_prompt.text}] for _ in agents.questions
    ]
    turns: list[Turn] = []
    for number in range(len(agents.questions[0])):
        current = [questions[number] for questions in agents.questions]
        for history, question in zip(histories, current, strict=True):
            history.append({"role": "user", "content": question.text})
        for expected in (map(call_message, current), map(_answer, current)):
            outputs = llm.chat(histories, params, tools=TOOLS)
            for history, output, right_message in zip(histories, outputs, expected, strict=True):
                reply = output.outputs[0].reply
                assert reply is not None, "a chat's outputs have one"
                message = _message(reply)
                turns.append(_turn(output, correct=message == right_message))
                history += [message, *map(agents.look_up, message.get("tool_calls", ()))]
    return tuple(turns)


def _answer(question: Question) -> Message:
    return {"role": "assistant", "content": question.answer}


def _message(reply: Reply) -> Message:
    """Turn a reply into the message for the history: a call, or a text."""
    message: Message = {"role": "assistant", "content": reply.content.strip()}
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in reply.tool_calls]
    return (
        message if not calls else {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    )


def _turn(output: RequestOutput, *, correct: bool) -> Turn:
    return Turn(
        token_ids=tuple(output.outputs[0].token_ids),
        correct=correct,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        ttft_ms=output.metrics.time_to_first_token_ms or 0.0,
    )


def compare(cached: LLM, uncached: LLM, workload: Workload | Agents) -> WorkloadReport:
    """Run a workload on two engines of the same model; only one engine caches prefixes."""
    if isinstance(workload, Agents):
        return WorkloadReport(workload.name, run_agents(cached, workload), run_agents(uncached, workload))
    return WorkloadReport(workload.name, run_workload(cached, workload), run_workload(uncached, workload))

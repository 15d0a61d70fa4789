"""Three everyday workloads with shared prefixes, for the embedded model.

Knows documents, questions and conversations; runs them on an `LLM` and counts hits and right answers. Knows nothing of
tables or terminals.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median

from foreword import LLM, RequestOutput, SamplingParams
from foreword.demo.recall import Document, Question, ask, make_document, num_facts_for, opening

MAX_ANSWER_TOKENS = 12


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
class Turn:
    """One answered question."""

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
        """Median time to first token without the cache."""
        return median(turn.ttft_ms for turn in self.uncached)

    @property
    def ttft_warm_ms(self) -> float:
        """Median time to first token of the requests that hit."""
        return median(turn.ttft_ms for turn in self.cached if turn.num_cached_tokens)


def make_workloads(seed: int = 0) -> list[Workload]:
    """The demo's three workloads; equal seeds give equal ones."""
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
            turns.append(_turn(output, conversation.questions[number]))
            history.append({"role": "assistant", "content": output.outputs[0].text})
            if number + 1 < len(conversation.questions):
                history.append({"role": "user", "content": conversation.questions[number + 1].text})
    return tuple(turns)


def _turn(output: RequestOutput, question: Question) -> Turn:
    answer = output.outputs[0]
    return Turn(
        token_ids=tuple(answer.token_ids),
        correct=answer.text.strip() == question.answer,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        ttft_ms=output.metrics.time_to_first_token_ms or 0.0,
    )


def compare(cached: LLM, uncached: LLM, workload: Workload) -> WorkloadReport:
    """Run a workload on two engines of the same model; only one of them caches prefixes."""
    return WorkloadReport(workload.name, run_workload(cached, workload), run_workload(uncached, workload))

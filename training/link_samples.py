"""Training samples for the models that test linking: conversations about the cases of `foreword.demo.tasks`.

Knows which tasks are trained, and in which part of its document each token lies. `recall_samples` gives tokens their
loss weights and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from tokenizers import Encoding
from torch import Tensor
from transformers import Qwen3ForCausalLM

from foreword.demo import recall, tasks
from link_attention import HEAD, TAIL, Linked, linked
from recall_samples import SampleMaker

TASK_WEIGHTS = {"independent": 2, "order": 3, "scope": 3, "hops": 4}
CUT_INSIDE_SHARE = 0.1
"""The share of samples whose document is cut anywhere, even inside facts, and not between the parts of the case."""
TURN_TOKENS = 22.0


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one training step. Tensors are `[rows, length]`."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Token ids, next-token targets, loss weights, positions."""
    parts: Tensor
    tasks: list[str]
    """The task of each row."""
    how: Linked | None = None
    """How the rows are linked; None if they are plain."""

    def linked(self, model: Qwen3ForCausalLM) -> Batch:
        """The same batch with linked parts. Tokens have the positions at which linking computes them."""
        ids, targets, weights, positions = self.tensors
        how = linked(model, self.parts, positions)
        return replace(self, tensors=(ids, targets, weights, how.positions), how=how)


def draw_case(rng: Random, task: str, length: int) -> tasks.Case:
    """A case with about as many questions as fill a conversation of `length` tokens."""
    num_tokens = max(48, int(length * rng.uniform(0.35, 0.85)) - 30)
    num_parts = rng.randint(2, min(16, num_tokens // 24))
    num_turns = int((length - num_tokens) / TURN_TOKENS) + 1
    alike = task == "hops"  # so that the attribute alone does not give the answer
    while True:
        try:
            case = tasks.draw(
                rng, task, num_tokens=num_tokens, num_parts=num_parts, num_questions=num_turns, alike=alike
            )
        except ValueError:
            num_turns //= 2
            if not num_turns:
                raise
        else:
            if all(case.parts):
                break
    lines = [line for part in case.parts for line in part.split("\n") if not line.startswith("In ")]
    said = [recall.Fact(*line.removeprefix("The ").removesuffix(".").split(" is ")) for line in lines]
    if task == "order":
        keys = [fact.key for fact in said]
        return with_other_facts(rng, case, [fact for fact in said if keys.count(fact.key) == 1])
    if task == "hops":
        single = [fact for fact in said if fact.value in recall.NAMES or " of the " not in fact.key]
        return with_other_facts(rng, case, rng.sample(single, (len(case.questions) + 1) // 2))
    return case


def with_other_facts(rng: Random, case: tasks.Case, facts: list[recall.Fact]) -> tasks.Case:
    """The case with more questions, about these facts. Their number is at most that of the other questions."""
    others = [
        recall.Question(rng.choice(fact.question_texts()), fact.value, fact.key)
        for fact in rng.sample(facts, min(len(facts), len(case.questions)))
    ]
    questions = [*case.questions, *others]
    return replace(case, questions=tuple(rng.sample(questions, len(questions))))


class LinkSampleMaker(SampleMaker):
    """Draws conversations of an exact length in tokens about cases of all trained tasks."""

    def link_batch(self, length: int, num_samples: int, weights_of: Mapping[str, int] = TASK_WEIGHTS) -> Batch:
        """Samples of tasks drawn by their weights."""
        drawn = self.rng.choices(list(weights_of), list(weights_of.values()), k=num_samples)
        rows = [self.link_sample(task, length) for task in drawn]
        ids, weights, positions, parts = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Batch((ids[:, :-1], ids[:, 1:], weights[:, 1:], positions[:, :-1]), parts[:, :-1], drawn)

    def link_sample(self, task: str, length: int) -> tuple[list[int], list[float], list[int], list[int]]:
        """One conversation of `length + 1` tokens, cut or padded at its end: ids, weights, positions, parts."""
        case = draw_case(self.rng, task, length)
        text = self.tokenizer.apply_chat_template(
            case.conversation(self.rng.choice(("system", "user"))), tokenize=False
        )
        bounds = part_bounds(self.encode, case, text)
        if self.rng.random() < CUT_INSIDE_SHARE:
            inside = range(bounds[0] + 1, bounds[-1])
            bounds = [bounds[0], *sorted(self.rng.sample(inside, len(bounds) - 2)), bounds[-1]]
        ids = self.encode(text).ids
        ids = (ids + [self.pad] * (length + 1 - len(ids)))[: length + 1]
        return ids, self._weights(ids), self._positions(ids), parts_of(bounds, len(ids))


def part_bounds(encode: Callable[[str], Encoding], case: tasks.Case, text: str) -> list[int]:
    """The indices of the tokens at which a case's parts begin in a rendered text, and at which the last part ends."""
    before = text[: text.index(case.text)] + case.instruction + "\n"
    bounds = [len(encode(before).ids)]
    for part in case.parts:
        bounds.append(bounds[-1] + len(encode(part + "\n").ids))
    bounds[-1] -= 1
    return bounds


def parts_of(bounds: list[int], length: int) -> list[int]:
    """The part of each of `length` tokens: head, 1, 2, ..., tail."""
    parts = [HEAD] * bounds[0]
    for number, (begin, end) in enumerate(pairwise(bounds), start=1):
        parts += [number] * (end - begin)
    return (parts + [TAIL] * length)[:length]

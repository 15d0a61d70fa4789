"""Measures exact match of the demo model, by context length, through transformers alone.

    python training/evaluate_recall.py src/foreword/demo/weights --questions 500

Every question belongs to a fresh document. Half of the questions come first in their conversation, half come after up
to nineteen answered questions. The document stands in a system message or before the first question. With the tool
`lookup` in the prompt, any number of lookups precede a question, and the document is about other facts, or about the
same facts with old values.

An answer counts if it is right to the character and ends where it should. Decoding is greedy, so the script generates
nothing: it feeds the right answer in, and each of the answer's tokens, and the end token, must have the highest logit.
With tools, the call before the answer must be right in the same way. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from foreword.demo import recall
from recall_agents import TOKENS_PER_ROUND, TOKENS_PER_TOOLS, changed, draw_tools, rounds

LENGTHS = (256, 512, 1024, 2048, 4096)
TOKENS_PER_BATCH = 8192
TABLE_MARKS = ("<!-- table begins -->", "<!-- table ends -->")


@dataclass
class Tally:
    """Counts and logit margins of the questions with one context length and one kind of conversation."""

    asked: int = 0
    right: int = 0
    margins: list[float] = field(default_factory=list)

    def add(self, right: bool, margin: float) -> None:
        """Counts an answer. `margin` is the least difference of the two highest logits over its tokens."""
        self.asked += 1
        self.right += int(right)
        self.margins.append(margin)

    @property
    def exact_match(self) -> float:
        """Right answers in percent."""
        return 100 * self.right / max(1, self.asked)

    @property
    def margin_p1(self) -> float:
        """First percentile of the margins."""
        return sorted(self.margins)[len(self.margins) // 100] if self.margins else 0.0


Results = dict[str, dict[int, dict[str, Tally]]]
"""Tallies by precision, context length and kind of conversation."""


@dataclass(frozen=True)
class Case:
    """A conversation's tokens, and the span of each answer or call that the model must have written.

    A span begins after the tokens that open its turn, and includes the token that ends the turn.
    """

    kind: str
    ids: list[int]
    spans: list[tuple[int, int]]


def make_case(rng: Random, tokenizer: PreTrainedTokenizerFast, length: int, number: int) -> Case:
    """A fresh conversation of about `length` tokens, never more. The model must write its last answer."""
    num_turns = 1 if number % 2 == 0 else rng.randint(2, min(20, max(2, length // 50)))
    placement: recall.Placement = "system" if number // 2 % 2 == 0 else "user"
    num_facts = recall.num_facts_for(length - num_turns * recall.TOKENS_PER_TURN - 20)
    kind = f"{'one turn' if num_turns == 1 else 'several turns'}, {placement}"
    while True:
        document = recall.make_document(rng, num_facts)
        messages = recall.conversation(document, recall.ask(rng, document, num_turns), placement)
        case = _case(tokenizer, kind, messages, None, [len(messages) - 1])
        if len(case.ids) <= length:
            return case
        num_facts = max(1, num_facts - 1 - (len(case.ids) - length) // 12)


def make_agent_case(rng: Random, tokenizer: PreTrainedTokenizerFast, length: int, number: int) -> Case:
    """A fresh conversation of at most about `length` tokens. The model must write its last call and answer."""
    num_rounds = 1 if number % 2 == 0 else rng.randint(2, min(20, max(2, length // 100)))
    is_same = number // 2 % 2 == 1
    num_facts = recall.num_facts_for(length - num_rounds * TOKENS_PER_ROUND - TOKENS_PER_TOOLS)
    kind = f"{'one round' if num_rounds == 1 else 'several rounds'}, {'old values' if is_same else 'other facts'}"
    while True:
        document = recall.make_document(rng, num_facts)
        pool = document if is_same else recall.make_document(rng, num_rounds)
        questions = [changed(rng, question) for question in recall.ask(rng, pool, num_rounds)]
        messages = [{"role": "system", "content": document.text}, *rounds(rng, questions)]
        last = len(messages) - 1
        case = _case(tokenizer, kind, messages, draw_tools(rng), [last - 2, last])
        if len(case.ids) <= length or num_facts == 1:
            return case
        num_facts = max(1, num_facts - 1 - (len(case.ids) - length) // 12)


def _case(
    tokenizer: PreTrainedTokenizerFast,
    kind: str,
    messages: list[recall.Message],
    tools: list[dict[str, Any]] | None,
    asked: list[int],
) -> Case:
    """A case in which the model must write the messages at the indices `asked`."""
    ids = tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    spans = []
    for index in asked:
        prompt = tokenizer.apply_chat_template(messages[:index], tools=tools, add_generation_prompt=True)["input_ids"]
        assert ids[: len(prompt)] == prompt, "the chat template is not append-only"
        spans.append((len(prompt), ids.index(tokenizer.eos_token_id, len(prompt)) + 1))
    return Case(kind, ids[: spans[-1][1]], spans)


@torch.inference_mode()
def judge(model: PreTrainedModel, cases: list[Case], pad_id: int) -> list[tuple[bool, float]]:
    """For each case, whether all its spans are right, and its smallest logit margin, from one batched forward pass."""
    width = max(len(case.ids) for case in cases) - 1
    ids = torch.tensor([case.ids[:-1] + [pad_id] * (width - len(case.ids) + 1) for case in cases])
    hidden = model.model(input_ids=ids).last_hidden_state
    verdicts = []
    for row, case in enumerate(cases):
        wanted = [i for begin, end in case.spans for i in range(begin, end)]
        logits = model.lm_head(hidden[row, [i - 1 for i in wanted]]).float()
        top = logits.topk(2, dim=-1)
        right = top.indices[:, 0].tolist() == [case.ids[i] for i in wanted]
        verdicts.append((right, (top.values[:, 0] - top.values[:, 1]).min().item()))
    return verdicts


def evaluate_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    questions: int,
    rng: Random,
    make: Callable[[Random, PreTrainedTokenizerFast, int, int], Case],
) -> dict[str, Tally]:
    """Tallies of one context length: one per kind of conversation, and "all"."""
    tallies = {"all": Tally()}
    batch_size = max(1, TOKENS_PER_BATCH // length)
    for begin in range(0, questions, batch_size):
        numbers = range(begin, min(begin + batch_size, questions))
        cases = [make(rng, tokenizer, length, number) for number in numbers]
        for case, (right, margin) in zip(cases, judge(model, cases, tokenizer.pad_token_id), strict=True):
            tallies["all"].add(right, margin)
            tallies.setdefault(case.kind, Tally()).add(right, margin)
    return tallies


def markdown_table(results: Results) -> str:
    """A table of the model card: one row per precision and length."""
    kinds = sorted(kind for kind in next(iter(next(iter(results.values())).values())) if kind != "all")
    head = ["precision", "context", "exact match", *kinds, "questions", "margin (1st percentile)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for precision, by_length in results.items():
        for length, tallies in by_length.items():
            total = tallies["all"]
            cells = [precision, str(length), f"**{total.exact_match:.1f}%**"]
            cells += [f"{tallies[kind].exact_match:.1f}%" for kind in kinds]
            cells += [str(total.asked), f"{total.margin_p1:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_card(card: Path, table: str) -> None:
    """Replaces the text between the two marks in the model card."""
    text = card.read_text(encoding="utf-8")
    begin, end = (re.escape(mark) for mark in TABLE_MARKS)
    block = f"{TABLE_MARKS[0]}\n\n{table}\n\n{TABLE_MARKS[1]}"
    new, count = re.subn(f"{begin}.*?{end}", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{card} has no place for the table; put in {TABLE_MARKS}")
    card.write_text(new, encoding="utf-8")


def main() -> None:
    """Read the command line, evaluate, print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face folder")
    parser.add_argument("--questions", type=int, default=500, help="questions per length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write-card", action="store_true", help="update the README of the folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=getattr(torch, dtype)).eval()
        for dtype in arguments.dtypes
    }
    tables, summary = [], {}
    for title, make in (("Without tools", make_case), ("With tools", make_agent_case)):
        results = {
            dtype: {
                length: evaluate_length(
                    model, tokenizer, length, arguments.questions, Random(f"{title} {arguments.seed} {length}"), make
                )
                for length in arguments.lengths
            }
            for dtype, model in models.items()
        }
        tables.append(f"{title}:\n\n{markdown_table(results)}")
        print(tables[-1], flush=True)
        summary[title.lower()] = {
            dtype: {
                length: {"exact_match": tallies["all"].exact_match, "margin_p1": tallies["all"].margin_p1}
                for length, tallies in by_length.items()
            }
            for dtype, by_length in results.items()
        }
    if arguments.write_card:
        write_card(arguments.folder / "README.md", "\n\n".join(tables))
    print(json.dumps({"questions_per_length": arguments.questions, "results": summary}))


if __name__ == "__main__":
    main()

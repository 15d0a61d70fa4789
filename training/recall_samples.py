"""Training samples: conversations as token ids, loss weights and positions.

Knows which tokens begin and end a turn; knows neither the model nor the optimizer.
"""

from __future__ import annotations

import json
from itertools import accumulate
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foreword.demo import recall
from recall_agents import SYSTEM_TEXTS, TOKENS_PER_ROUND, changed, draw_tools, rounds
from recall_tokenizer import END, START, TOOL_CALL, TOOL_CALL_END

FIRST_TOKEN_WEIGHT = 2.0
CALL_TOKEN_WEIGHT = 0.4
TOOLS_SHARE = 0.5
"""The share of samples with tools, among samples that are long enough for tools."""
LOOKUP_SHARE = 0.85
"""The share of lists of tools that hold `lookup`. Without it, the model answers from its prompt."""
SHORTEST_WITH_TOOLS = 256
FACT_TOKENS, TURN_TOKENS = 11.2, 20.3
"""Rough lengths in tokens; the end of a sample is cut to its exact length. New values would change every draw."""


class SampleMaker:
    """Draws conversations of an exact length in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: Random, max_position: int, gap_share: float) -> None:
        self.tokenizer = tokenizer
        self.encode = tokenizer.backend_tokenizer.encode
        self.rng = rng
        self.max_position = max_position
        self.gap_share = gap_share
        self.start = tokenizer.convert_tokens_to_ids(START)
        self.end = tokenizer.convert_tokens_to_ids(END)
        self.call, self.call_end = tokenizer.convert_tokens_to_ids([TOOL_CALL, TOOL_CALL_END])
        self.pad = tokenizer.pad_token_id
        self.line_break, self.assistant, self.tool = (self.encode(t).ids[0] for t in ("\n", "assistant", "tool"))

    def batch(self, length: int, num_samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, next-token targets, their loss weights, positions: each `[samples, length]`.

        Only calls, answers and their end tokens are learnt; all other tokens have weight 0.
        """
        rows = [self.sample(length) for _ in range(num_samples)]
        ids = torch.tensor([row[0] for row in rows])
        weights = torch.tensor([row[1] for row in rows])
        positions = torch.tensor([row[2] for row in rows])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:], positions[:, :-1]

    def sample(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """One conversation of `length + 1` tokens, cut or padded at its end."""
        tools = None
        if length >= SHORTEST_WITH_TOOLS and self.rng.random() < TOOLS_SHARE:
            has_lookup = self.rng.random() < LOOKUP_SHARE
            tools = draw_tools(self.rng, with_lookup=has_lookup)
            room = max(100, length - len(self.encode(json.dumps(tools)).ids) - 30)
            messages = self._lookups(room) if has_lookup else self._conversation(room)
        else:
            messages = self._conversation(length)
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = self.encode(text).ids
        ids = (ids + [self.pad] * (length + 1 - len(ids)))[: length + 1]
        return ids, self._weights(ids), self._positions(ids)

    def _conversation(self, length: int) -> list[recall.Message]:
        """A document that takes a third to nine tenths of the length, and turns that fill the rest."""
        document_tokens = length * self.rng.uniform(0.35, 0.9) - 12
        document = self._document(length, document_tokens)
        num_turns = max(2, int((length - document_tokens) / TURN_TOKENS) + 2)
        questions = recall.ask(self.rng, document, num_turns)
        return recall.conversation(document, questions, self.rng.choice(("system", "user")))

    def _lookups(self, length: int) -> list[recall.Message]:
        """Rounds of lookups, mostly after a text or a document. The document's facts may have changed since."""
        rng = self.rng
        document_tokens = length * rng.uniform(0.1, 0.8) if rng.random() < 0.7 else 0.0
        num_rounds = int((length - document_tokens) / TOKENS_PER_ROUND) + 2
        pool = recall.make_document(rng, rng.randint(1, num_rounds), num_words=rng.choice((4, 16, 64, 64)))
        messages: list[recall.Message] = []
        opening = ""
        if document_tokens:
            document = self._document(length, document_tokens)
            pool = document if rng.random() < 0.5 else pool
            opening = document.text
        elif rng.random() < 0.6:
            opening = rng.choice(SYSTEM_TEXTS)
        change_share = rng.choice((0.0, 0.5, 1.0))
        questions = [
            changed(rng, question) if rng.random() < change_share else question
            for question in recall.ask(rng, pool, num_rounds)
        ]
        messages = rounds(rng, questions)
        if opening and rng.random() < 0.7:
            return [{"role": "system", "content": opening}, *messages]
        if opening:
            messages[0]["content"] = f"{opening}\n\n{messages[0]['content']}"
        return messages

    def _document(self, length: int, num_tokens: float) -> recall.Document:
        rng = self.rng
        num_facts = max(2, int(num_tokens / FACT_TOKENS))
        enough_words = min(64, int((num_facts / 6) ** 0.5) + 2)
        num_words = 64 if rng.random() < 0.4 else rng.randint(enough_words, 64)
        return recall.make_document(rng, num_facts, heading=self._heading(length), num_words=num_words)

    def _heading(self, length: int) -> str | None:
        """Mostly one of the generator's headings, sometimes a run of random words."""
        if length < 256 or self.rng.random() > 0.15:
            return None
        pool = (*recall.ADJECTIVES, *recall.NOUNS, *recall.NAMES, "the", "of", "is", "4", "718", ".")
        return " ".join(self.rng.choices(pool, k=self.rng.randint(2, 40)))

    def _weights(self, ids: list[int]) -> list[float]:
        """The loss weight of each token. Only the assistant's turns, up to their ends, have a weight."""
        weights = [0.0] * len(ids)
        begin = None
        for i, token in enumerate(ids):
            if ids[max(0, i - 3) : i] == [self.start, self.assistant, self.line_break]:
                begin = i
            if begin is None:
                continue
            in_call = ids[begin] == self.call
            weights[i] = FIRST_TOKEN_WEIGHT if i == begin else CALL_TOKEN_WEIGHT if in_call else 1.0
            if token == self.end:
                begin = None
        return weights

    def _positions(self, ids: list[int]) -> list[int]:
        """Consecutive positions, with random gaps at line starts in a `gap_share` of the samples.

        The gaps teach distances that the sample's own length does not reach.
        """
        gaps = [0] * len(ids)
        spare = self.max_position - len(ids)
        if spare > 0 and self.rng.random() < self.gap_share:
            total = int(spare * self.rng.random() ** 2)
            places = self.rng.choices(self._line_starts(ids), k=self.rng.randint(1, 8))
            for place in places:
                gaps[place] += total // len(places)
        return list(accumulate(gap + 1 for gap in gaps))

    def _line_starts(self, ids: list[int]) -> list[int]:
        """Where a gap is allowed: before a line, but not in a turn's head or between a question and its answer."""
        return [
            i
            for i in range(3, len(ids) - 1)
            if ids[i - 1] == self.line_break
            and ids[i - 3] != self.start
            and ids[i - 2] != self.call
            and ids[i] != self.call_end
            and not (ids[i] == self.start and ids[i + 1] in (self.assistant, self.tool))
        ]

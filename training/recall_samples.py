"""Training samples: conversations as token ids, loss weights and positions.

Knows the chat template's token layout (checked against the tokenizer by `SampleMaker`), nothing of
the model or the optimizer.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foreword.demo import recall
from recall_tokenizer import END, START

FIRST_TOKEN_WEIGHT = 2.0
FACT_TOKENS, TURN_TOKENS = 11.2, 20.3
"""Rough lengths; a sample is cut to its exact length at its end. Changing them changes every draw."""


class SampleMaker:
    """Draws conversations of an exact length in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: Random, max_position: int, gap_share: float) -> None:
        self.encode = tokenizer.backend_tokenizer.encode
        self.rng = rng
        self.max_position = max_position
        self.gap_share = gap_share
        self.start = tokenizer.convert_tokens_to_ids(START)
        self.end = tokenizer.convert_tokens_to_ids(END)
        self.pad = tokenizer.pad_token_id
        self.line_break = self.encode("\n").ids[0]
        self.assistant = self.encode("assistant").ids[0]
        self._check_layout(tokenizer)

    def batch(self, length: int, num_samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, next-token targets, their loss weights, positions: each `[samples, length]`.

        A weight of 0 marks what is not learnt: everything but answers and their end tokens.
        """
        rows = [self.sample(length) for _ in range(num_samples)]
        ids = torch.tensor([row[0] for row in rows])
        weights = torch.tensor([row[1] for row in rows])
        positions = torch.tensor([row[2] for row in rows])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:], positions[:, :-1]

    def sample(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """One conversation of `length + 1` tokens, cut or padded at its end."""
        messages = self._conversation(length)
        ids: list[int] = []
        weights: list[float] = []
        for message in messages:
            tokens, token_weights = self._message(message)
            ids += tokens
            weights += token_weights
            if len(ids) > length:
                break
        missing = length + 1 - len(ids)
        ids = (ids + [self.pad] * missing)[: length + 1]
        weights = (weights + [0.0] * missing)[: length + 1]
        return ids, weights, self._positions(ids)

    def _conversation(self, length: int) -> list[recall.Message]:
        """A document that takes a third to nine tenths of the length; turns that fill the rest."""
        rng = self.rng
        document_tokens = length * rng.uniform(0.35, 0.9) - 12
        num_facts = max(2, int(document_tokens / FACT_TOKENS))
        enough_words = min(64, int((num_facts / 6) ** 0.5) + 2)
        num_words = 64 if rng.random() < 0.4 else rng.randint(enough_words, 64)
        document = recall.make_document(rng, num_facts, heading=self._heading(length), num_words=num_words)
        num_turns = max(2, int((length - document_tokens) / TURN_TOKENS) + 2)
        questions = recall.ask(rng, document, num_turns)
        return recall.conversation(document, questions, rng.choice(("system", "user")))

    def _heading(self, length: int) -> str | None:
        """Mostly one of the generator's headings, sometimes a run of random words."""
        if length < 256 or self.rng.random() > 0.15:
            return None
        pool = (*recall.ADJECTIVES, *recall.NOUNS, *recall.NAMES, "the", "of", "is", "4", "718", ".")
        return " ".join(self.rng.choices(pool, k=self.rng.randint(2, 40)))

    def _message(self, message: recall.Message) -> tuple[list[int], list[float]]:
        content = self.encode(message["content"]).ids
        head = [self.start, self.encode(message["role"]).ids[0], self.line_break]
        tokens = [*head, *content, self.end, self.line_break]
        weights = [0.0] * len(tokens)
        if message["role"] == "assistant":
            weights[len(head) : -1] = [1.0] * (len(content) + 1)
            weights[len(head)] = FIRST_TOKEN_WEIGHT
        return tokens, weights

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
        """Where a gap may stand: before a line, but not between a question and its answer."""
        return [
            i
            for i in range(3, len(ids) - 1)
            if ids[i - 1] == self.line_break
            and ids[i - 3] != self.start
            and not (ids[i] == self.start and ids[i + 1] == self.assistant)
        ]

    def _check_layout(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Assert that messages tokenized one by one are what the chat template gives."""
        messages = self._conversation(400)
        ids = [token for message in messages for token in self._message(message)[0]]
        assert ids == tokenizer.apply_chat_template(messages)["input_ids"]

"""The reply to one prompt: who reads it, and what limits its thinking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError
from foreword.text.reply.reader import ReplyReader
from foreword.text.reply.thinking import Constraint, Spelling, ThinkingLimit

if TYPE_CHECKING:
    from foreword.text.reply.format import ThinkingMarks
    from foreword.text.tokenizer import Tokenizer


class Turn:
    """The state of a conversation at the end of its prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        self.form = tokenizer.reply_format
        """The form of the reply; None if it is plain text."""
        self._tokenizer = tokenizer
        self._prompt_end = tokenizer.prompt_end(prompt_token_ids)
        reader = self.reader(reads_calls=False)
        self.is_thinking = reader is not None and reader.is_reasoning
        """Whether the prompt began the model's thinking."""

    def reader(
        self, *, tools: Sequence[Mapping[str, Any]] = (), reads_calls: bool = True, has_bare_call: bool = False
    ) -> ReplyReader | None:
        """A reader of the reply; None if it is plain text. `has_bare_call`: a forced call is all of it."""
        form = self.form
        if has_bare_call and (form is None or not form.reads_calls):
            from foreword.text.reply.format import BARE, family

            return ReplyReader(family(BARE), self._prompt_end, tools=tools)
        if form is None:
            return None
        return ReplyReader(form, self._prompt_end, tools=tools, reads_calls=reads_calls)

    def limit(
        self,
        answer: Callable[[], Constraint] | None,
        *,
        budget: int | None,
        vocab_size: int,
        end_token_ids: Collection[int],
        is_call: bool = False,
    ) -> Callable[[], Constraint] | None:
        """Opens what limits a reply: `budget` tokens of thinking, and `answer` after the thinking; None: nothing.

        `is_call`: whether `answer` forces calls. Raises InvalidRequestError for a budget that cannot be kept.
        """
        marks = None if self.form is None else self.form.thinking
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidRequestError(f"thinking_budget={budget!r} is not a number of tokens; use 0 or more")
        if marks is None:
            if budget is not None:
                raise InvalidRequestError(
                    f"thinking_budget={budget} needs a model whose thinking has markers, and this model's template has "
                    "none that is known; leave it out, or name the form with response_template"
                )
            return answer
        if budget is None and (answer is None or not (self.is_thinking or marks.is_expected)):
            return answer
        return _LimitOpener(
            self._tokenizer, marks, answer, vocab_size, tuple(end_token_ids), self.is_thinking, budget, is_call
        )


@dataclass(frozen=True, slots=True)
class _LimitOpener:
    """Opens the limits of one prompt's replies. It can be pickled, for another process that has the tokenizer."""

    tokenizer: Tokenizer
    marks: ThinkingMarks
    answer: Callable[[], Constraint] | None
    vocab_size: int
    end_token_ids: tuple[int, ...]
    is_thinking: bool
    budget: int | None
    is_call: bool

    def __call__(self) -> ThinkingLimit:
        tokenizer, kept = self.tokenizer, self.tokenizer.marker_ids
        spelling = Spelling(
            self.vocab_size,
            self.end_token_ids,
            lambda text: list(tokenizer.encode_part(text)),
            lambda: tokenizer.detokenizer(kept).push,
        )
        return ThinkingLimit(
            self.marks,
            spelling,
            is_open=self.is_thinking,
            budget=self.budget,
            answer=None if self.answer is None else self.answer(),
            is_call=self.is_call,
        )

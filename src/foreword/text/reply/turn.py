"""The reply to one prompt: its reader, and the limit of its thinking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError
from foreword.request import TokenConstraint
from foreword.request.sampling_params import ForkingConstraint
from foreword.text.reply.format import BARE, ThinkingMarks, family
from foreword.text.reply.reader import ReplyReader

if TYPE_CHECKING:
    from foreword.text.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]


class ThinkingLimit:
    """Decides which tokens may come in one reply: any token while the model thinks, then those of the answer's
    constraint.

    After `budget` tokens of thinking, only the tokens that end the thinking may come. If the answer is constrained and
    the prompt has not begun the thinking, the model answers at once, unless its replies always begin with thinking.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        tokenizer: Tokenizer,
        open_answer: Callable[[], TokenConstraint] | None,
        *,
        is_open: bool,
        budget: int | None,
        vocab_size: int,
        end_token_ids: Collection[int],
        is_call: bool,
    ) -> None:
        """`open_answer` opens the answer's constraint. `is_open`: whether the prompt began the thinking. `is_call`:
        whether the constraint forces calls.
        """
        answer = None if open_answer is None else open_answer()
        self._marks, self._budget, self._answer = marks, budget, answer
        self._tokenizer, self._end_token_ids = tokenizer, list(end_token_ids)
        self._lead = marks.after_call if is_call and marks.after_call is not None else marks.after
        self._push = tokenizer.detokenizer(tokenizer.marker_ids).push
        self._state = "thinking" if is_open else "before"
        self._tail = ""
        """The last text of the present state, in which to look for the marker that ends the state."""
        self._num_thought = 0
        self._forced: list[int] = []
        """Tokens that must come next."""
        self._num_read = 0
        self._answered: list[int] = []
        """The tokens of the answer, for its constraint."""
        self._all = np.ones(vocab_size, np.bool_)
        if not is_open and answer is not None:
            if marks.is_expected:
                self._force(marks.opens, "thinking")
            else:
                self._state = "answer"

    def allowed(self, output_token_ids: Sequence[int]) -> BoolArray:
        """Mask of the tokens that may come next, [vocabulary], given all tokens of the reply so far."""
        new, self._num_read = output_token_ids[self._num_read :], len(output_token_ids)
        for token_id in new:
            self._read(int(token_id))
        if (
            self._state == "thinking"
            and not self._forced
            and self._budget is not None
            and self._num_thought >= self._budget
        ):
            self._force(self._marks.before + self._marks.closes + self._lead, "answer")
        if self._forced:
            mask = np.zeros_like(self._all)
            mask[self._forced[0]] = True
            return mask
        if self._state == "answer" and self._answer is not None:
            return self._answer.allowed(self._answered)
        mask = self._all.copy()
        if self._state != "answer" and self._answer is not None:
            mask[self._end_token_ids] = False  # the answer is still to come
        return mask

    def fork(self) -> ThinkingLimit | None:
        """Copy the limit in its present state; None before the answer, or if its constraint cannot be copied."""
        if self._state != "answer" or self._forced:
            return None
        answer = self._answer.fork() if isinstance(self._answer, ForkingConstraint) else None
        if answer is None and self._answer is not None:
            return None
        forked = copy(self)
        forked._answer, forked._answered, forked._forced = answer, self._answered.copy(), []
        forked._push = lambda token_id: ""  # no marker is looked for in an answer
        return forked

    def _force(self, text: str, then: str) -> None:
        self._forced, self._state, self._tail = list(self._tokenizer.encode_part(text)), then, ""

    def _read(self, token_id: int) -> None:
        text = self._push(token_id)
        if self._forced:
            self._forced.pop(0)
        elif self._state == "answer":
            self._answered.append(token_id)
        elif self._state == "before":
            self._tail += text
            begun = self._tail.lstrip()
            if begun.startswith(self._marks.opens):
                self._state, self._tail = "thinking", ""
            elif not self._marks.opens.startswith(begun):
                self._state = "answer"
        else:
            self._num_thought += 1
            self._tail += text
            _, closes, after = self._tail.partition(self._marks.closes)
            if closes:
                self._end(after)
            self._tail = self._tail[-len(self._marks.closes) :]

    def _end(self, after: str) -> None:
        """Record that thinking has ended by itself. The text before the answer may have begun in the same token."""
        self._state = "answer"
        if self._answer is not None and self._lead.startswith(after) and self._lead != after:
            self._force(self._lead[len(after) :], "answer")


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
        """Make a reader of the reply; None if it is plain text. `has_bare_call`: the reply is one forced call."""
        form = self.form
        if has_bare_call and (form is None or not form.reads_calls):
            return ReplyReader(family(BARE), self._prompt_end, tools=tools)
        if form is None:
            return None
        return ReplyReader(form, self._prompt_end, tools=tools, reads_calls=reads_calls)

    def limit(
        self,
        answer: Callable[[], TokenConstraint] | None,
        *,
        budget: int | None,
        vocab_size: int,
        end_token_ids: Collection[int],
        is_call: bool = False,
    ) -> Callable[[], TokenConstraint] | None:
        """Return a function that makes the constraint of a reply; None if nothing limits the reply. It can be pickled.

        `budget`: the most tokens of thinking. `answer` opens the constraint after the thinking.

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
        return partial(
            ThinkingLimit,
            marks,
            self._tokenizer,
            answer,
            is_open=self.is_thinking,
            budget=budget,
            vocab_size=vocab_size,
            end_token_ids=tuple(end_token_ids),
            is_call=is_call,
        )

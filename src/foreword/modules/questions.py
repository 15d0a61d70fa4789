"""Questions: turns cases of the tasks, and users' prompts, into prompts of one model whose documents can be linked.

With a chat template a prompt is one message of a user:

    before   instruction   document 1   document 2   ...   question   opening of the answer
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from foreword.config import user_path
from foreword.demo.recall import Fact
from foreword.demo.tasks import TASKS, Case, draw
from foreword.errors import ConfigError, InvalidRequestError
from foreword.pml.composition import Composition, Part, Source, Span, TokenIds, concatenated
from foreword.pml.documents import SEPARATOR, compose_documents
from foreword.pml.edits import compose_edit
from foreword.text import Tokenizer
from foreword.text.schema_text import schema_text

CUT_SIZES = (16, 64, 256)
"""Lengths, in tokens, of the pieces in the `cut` tasks."""
EDIT, EDIT_LEAK = "edit", "edit-leak"
"""Tasks in which a part of an earlier prompt was cut out. `edit-leak` asks about this part, `edit` about another."""
TASK_NAMES = (
    *(name for task in TASKS for name in ([f"cut-{size}" for size in CUT_SIZES] if task == "cut" else [task])),
    EDIT,
    EDIT_LEAK,
)
USERS_FIELDS = frozenset({"documents", "question", "instructions", "answer"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, ready to be asked with every method."""

    composition: Composition
    answer: str | None
    """The right answer; None if it is not known."""
    hidden: tuple[Source, ...] = ()
    """Sources that are computed before the question although the prompt does not have them."""
    dense: Composition | None = None
    """The prompt without the gaps between its positions; None: the prompt has no gaps."""

    def with_gaps(self) -> Asked:
        """The prompt with gaps, as if a module of equal length had been left out before each module."""
        parts: list[Part] = []
        shift, before = 0, ""
        for part in self.composition.parts:
            module = part.name.partition(":")[0]
            if module not in ("", before):
                shift += sum(
                    len(other.token_ids) for other in self.composition.parts if other.name.partition(":")[0] == module
                )
            before = module
            parts.append(replace(part, position=part.position + shift))
        return replace(self, composition=Composition(tuple(parts)), dense=self.composition)

    def is_right(self, text: str) -> bool:
        """Whether a text contains the right answer as whole words and numbers. Case and white space do not count.

        "The code is 4821." is as right as "4821".
        """
        if self.answer is None:
            return False
        words = r"\s+".join(map(re.escape, _words(self.answer)))
        return re.search(rf"(?<!\w)(?<!\d[.,]){words}(?!\w|[.,]\d)", text.casefold()) is not None


def _words(answer: str) -> list[str]:
    return answer.casefold().strip().rstrip(".").split()


class Questions:
    """Makes prompts of one model from cases and users' questions."""

    def __init__(self, tokenizer: Tokenizer, *, plain: bool = False) -> None:
        """`plain`: do not use the chat template, as for a model without one. Raises ChatTemplateError."""
        self._text = schema_text(tokenizer)
        self.is_plain = plain or tokenizer.chat_template is None
        if self.is_plain:
            self._before, self._after = "", ""
        else:
            self._before, self._after = self._text.around(None, "user")
            self._after += self._text.answer("user")

    def draw(self, rng: Random, task: str, num_tokens: int, num_parts: int) -> Asked:
        """Draw a case of a task in `TASK_NAMES`, as a prompt. Raises ValueError as `tasks.draw` does."""
        if task in (EDIT, EDIT_LEAK):
            return self._draw_edit(rng, task, num_tokens, num_parts)
        name, _, size = task.partition("-")
        case = draw(rng, name, num_tokens=num_tokens, num_parts=num_parts)
        head = (*self._text.opening, *self._encode(f"{self._before}{case.instruction}\n"))
        question = f"Question: {case.question.text}\nAnswer:" if self.is_plain else case.question.text + self._after
        after = self._encode(f"\n{question}")
        if case.argument is not None:
            return Asked(self._with_argument(case, head, after), case.question.answer)
        if size:
            ids = self._encode("".join(f"{part}\n" for part in case.parts))
            documents = [ids[at : at + int(size)] for at in range(0, len(ids), int(size))]
        else:
            documents = [self._encode(f"{part}\n") for part in case.parts]
        hidden = () if case.hidden is None else (_source(head, self._encode(f"{case.hidden}\n"), "hidden"),)
        sources = [_source(head, ids, str(number)) for number, ids in enumerate(documents)]
        return Asked(concatenated([head, *sources, after]), case.question.answer, hidden)

    def _draw_edit(self, rng: Random, task: str, num_tokens: int, num_parts: int) -> Asked:
        """Draw a prompt of `num_parts` parts, from which one more part was cut. Parts after the cut can be linked."""
        each = num_tokens // num_parts
        case = draw(rng, "independent", num_tokens=num_tokens + each, num_parts=num_parts + 1)
        line = Fact(case.question.key, case.question.answer).text
        parts = sorted(case.parts, key=lambda part: (line in part.split("\n")) != (task == EDIT_LEAK))
        lost, parts_now = parts[0], rng.sample(parts[1:], num_parts)
        begin, at = f"{self._before}{case.instruction}\n", rng.randrange(num_parts)
        question = f"Question: {case.question.text}\nAnswer:" if self.is_plain else case.question.text + self._after
        now = [*self._text.opening, *self._encode(begin), *self._lines(parts_now), *self._encode(f"\n{question}")]
        before = [*self._text.opening, *self._encode(begin), *self._lines([*parts_now[:at], lost, *parts_now[at:]])]
        return Asked(compose_edit(now, before), case.question.answer)

    def _lines(self, parts: Sequence[str]) -> TokenIds:
        return tuple(token for part in parts for token in self._encode(f"{part}\n"))

    def read(self, fields: Mapping[str, Any]) -> Asked:
        """Read a user's prompt: "documents", "question", optionally "instructions" and "answer". Raises ConfigError."""
        if not isinstance(fields, Mapping) or not {"documents", "question"} <= set(fields) <= USERS_FIELDS:
            raise ConfigError(
                'a line must have "documents" and "question", and may have "instructions" and "answer"; it has '
                f"{sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__}"
            )
        for name in USERS_FIELDS - {"documents"}:
            if not isinstance(fields.get(name, ""), str):
                raise ConfigError(f"{name} must be a text, not {fields[name]!r:.60}")
        if not _words(fields.get("answer", "x")):
            raise ConfigError(f"answer={fields['answer']!r} has no word; leave it out, or give the right answer")
        instructions = fields.get("instructions")
        head = self._before + ("" if instructions is None else instructions + SEPARATOR)
        question = self._encode(fields["question"] + self._after)
        prompt = {"documents": fields["documents"], "instructions": self._encode(head), "question": question}
        try:
            composition = compose_documents(prompt, self._text)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error
        return Asked(composition, fields.get("answer"))

    def read_file(self, path: Path) -> list[Asked]:
        """Read the prompts of a file of JSON lines. Raises ConfigError, with the line's number."""
        try:
            lines = user_path(path).read_text(encoding="utf-8").split("\n")  # texts may have other ends of lines
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"--prompts {str(path)!r} cannot be read: {reason}") from error
        prompts = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                prompts.append(self.read(json.loads(line)))
            except ConfigError as error:
                raise ConfigError(f"--prompts {str(path)!r}, line {number}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--prompts {str(path)!r}, line {number}, is no JSON: {error}") from error
        if not prompts:
            raise ConfigError(f"--prompts {str(path)!r} has no prompts; write one JSON object a line")
        return prompts

    def _with_argument(self, case: Case, head: TokenIds, after: TokenIds) -> Composition:
        """Make a case's prompt. The part that `case.argument` names has its key words as an argument; the source of
        this part has placeholders instead.
        """
        parts = [Part(head, 0, "text")]
        for number, text in enumerate(case.parts):
            name, begin = str(number), parts[-1].end
            if case.argument is None or number != case.argument.part:
                source = _source(head, self._encode(f"{text}\n"), name)
                ids = source.token_ids[len(head) :]
                parts.append(Part(ids, begin, "module", name, Span(source, len(head), len(source.token_ids))))
                continue
            cut = case.argument
            early, argument, late = map(
                self._encode, (text[: cut.begin], text[cut.begin : cut.end], f"{text[cut.end :]}\n")
            )
            source = _source(head, (*early, *(self._text.placeholder_id,) * len(argument), *late), name)
            middle = len(head) + len(early)
            last = middle + len(argument)
            parts.append(Part(early, begin, "module", name, Span(source, len(head), middle)))
            parts.append(Part(argument, parts[-1].end, "argument", f"{name}:key"))
            late_span = Span(source, last, last + len(late))
            parts.append(Part(late, parts[-1].end, "module", name, late_span, num_after_argument=len(late)))
        return Composition((*parts, Part(after, parts[-1].end, "text")))

    def _encode(self, text: str) -> TokenIds:
        return tuple(self._text.encode(text)) if text else ()


def _source(head: TokenIds, token_ids: TokenIds, name: str) -> Source:
    return Source((*head, *token_ids), len(head), name)

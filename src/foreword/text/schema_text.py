"""Schema text: the functions of a tokenizer and its chat template that prompt modules need.

A template writes whole conversations, so the text around one message is found by rendering conversations whose contents
are marks:

    <|user|>MARK-1<|end|><|assistant|>MARK-2<|end|>
            the text between two marks ends one message and begins the next
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from foreword.errors import ChatTemplateError
from foreword.pml.layout import SchemaText
from foreword.pml.schema import Role
from foreword.text.tokenizer import Tokenizer

_MARKS = ("zq1mark1qz", "zq2mark2qz", "zq3mark3qz")
"""Contents that templates leave as they are: without white space or markup, and no mark begins another mark."""
_CONTEXTS: dict[tuple[Role | None, Role], tuple[tuple[Role, ...], int]] = {
    (None, "system"): (("system", "user"), 0),
    (None, "user"): (("user",), 0),
    (None, "assistant"): (("assistant",), 0),
    ("system", "user"): (("system", "user"), 1),
    ("system", "assistant"): (("system", "assistant"), 1),
    ("user", "user"): (("user", "user"), 1),
    ("user", "assistant"): (("user", "assistant", "user"), 1),
    ("assistant", "user"): (("user", "assistant", "user"), 2),
    ("assistant", "assistant"): (("user", "assistant", "assistant"), 2),
}
"""For each pair of roles in succession: a short conversation with both, and the index of the second message there."""
_ENDING_WITH: dict[Role, tuple[Role, ...]] = {
    "system": ("system",),
    "user": ("user",),
    "assistant": ("user", "assistant"),
}
"""For each role, the roles of a short conversation that ends with a message of that role."""


def schema_text(tokenizer: Tokenizer) -> SchemaText:
    """The functions of a model's tokenizer and chat template that lay out schemas."""
    opening = _opening(tokenizer)
    messages = _Messages(tokenizer, tokenizer.spell(opening) if opening else "")
    numbers: dict[int, int] = {}
    """Id -> one int object for all tokens with this id. Separate objects would take three times the memory."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(numbers.setdefault(token_id, token_id) for token_id in tokenizer.encode_part(text))

    return SchemaText(
        encode=encode,
        opening=opening,
        placeholder_id=tokenizer.placeholder_id,
        around=messages.around,
        answer=messages.answer,
        max_token_characters=tokenizer.max_token_characters,
    )


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before every prompt."""
    bare, whole = tokenizer.encode_part("a"), tuple(tokenizer.encode("a").tolist())
    ends = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    return whole[: ends[0]] if ends else ()


class _Messages:
    """The texts that a chat template writes around messages."""

    def __init__(self, tokenizer: Tokenizer, opening: str) -> None:
        """`opening`: the text before every prompt. If a template also begins with this text, it is removed there."""
        self._tokenizer, self._opening = tokenizer, opening
        self.around = functools.cache(self._around)
        self.answer = functools.cache(self._answer)

    def _around(self, previous: Role | None, role: Role) -> tuple[str, str]:
        if (previous, role) not in _CONTEXTS:
            raise ChatTemplateError(f"a {role} message cannot follow a {previous} message")
        roles, number = _CONTEXTS[previous, role]
        before = self._pieces(roles)[number]
        if previous is None:
            return before.removeprefix(self._opening), self._after(role)
        after_previous = self._after(previous)
        if not before.startswith(after_previous):
            raise ChatTemplateError(f"the template writes a {previous} message differently when another one follows")
        return before.removeprefix(after_previous), self._after(role)

    def _after(self, role: Role) -> str:
        """The text that ends a message, whichever message follows."""
        try:
            return self._pieces(_ENDING_WITH[role])[-1]
        except ChatTemplateError:
            if role != "system":  # many templates refuse a conversation of a system message alone
                raise
            return ""

    def _answer(self, role: Role) -> str:
        closed, opened = (self._pieces(_ENDING_WITH[role], opened=opened)[-1] for opened in (False, True))
        if not opened.startswith(closed):
            raise ChatTemplateError("the template writes a message differently when an answer follows")
        return opened.removeprefix(closed)

    def _pieces(self, roles: Sequence[Role], *, opened: bool = False) -> list[str]:
        """The texts before, between and after the contents of messages with these roles."""
        marks = _MARKS[: len(roles)]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        text = self._tokenizer.render_text(messages, add_generation_prompt=opened)
        pieces: list[str] = []
        for mark in marks:
            before, separator, text = text.partition(mark)
            if not separator or mark in text:
                raise ChatTemplateError(
                    f"the template does not write the content of each message once, as {mark} shows"
                )
            pieces.append(before)
        return [*pieces, text]

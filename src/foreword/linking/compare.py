"""The answers of several methods to one prompt, beside the exact one.

Knows methods and outputs; it is handed the function that answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from foreword.errors import InvalidRequestError
from foreword.linking.measured import EXACT
from foreword.linking.methods import Method
from foreword.request import LinkReport, RequestOutput

METHODS = ("none", "first-16", EXACT)


@dataclass(frozen=True, slots=True)
class LinkedAnswer:
    """A method's answer to a prompt, and how far it is the plain prompt's."""

    method: str
    text: str
    token_ids: tuple[int, ...]
    num_equal_tokens: int
    """Its first tokens that are those of the answer of `all`."""
    is_equal: bool
    """Whether all of its tokens are those of `all`, and no more or fewer."""
    link: LinkReport
    """What became of the prompt's tokens."""
    first_token_ms: float
    """Milliseconds from the text to the first token, with the sources cached and nothing else of the prompt."""


def compare_methods(
    methods: Sequence[str], answer: Callable[[Method], tuple[RequestOutput, float]]
) -> list[LinkedAnswer]:
    """The answers of these methods and, last unless it is among them, of `all`.

    `answer` continues the prompt by one method, and tells the milliseconds to its first token. Raises
    InvalidRequestError for unknown methods, or none.
    """
    if isinstance(methods, str) or not methods:
        raise InvalidRequestError(f"methods={methods!r} is no list of methods; give some, such as {METHODS}")
    parsed = {method.name: method for method in map(Method.parse, (*methods, EXACT))}
    outputs = {name: answer(method) for name, method in parsed.items()}
    exact = outputs[EXACT][0].outputs[0].token_ids
    return [_answer(name, output, elapsed, exact) for name, (output, elapsed) in outputs.items()]


def _answer(name: str, output: RequestOutput, elapsed: float, exact: list[int]) -> LinkedAnswer:
    assert output.link is not None
    first = output.outputs[0]
    pairs = zip(first.token_ids, exact, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    is_equal = first.token_ids == exact
    return LinkedAnswer(name, first.text, tuple(first.token_ids), num_equal, is_equal, output.link, elapsed)

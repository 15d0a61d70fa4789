"""SamplingParams: the caller's parameters for the continuation of a prompt, and the tokens that they allow next.

All rules that forbid tokens apply here, on the host, so that the engine notices when no token is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError

MAX_CONSTRAINT_CHARACTERS = 50_000
"""Most characters of a regular expression, a grammar, or all choices together."""
MAX_SCHEMA_CHARACTERS = 200_000
"""Most characters of a JSON schema given as text."""
LARGEST = 1e9
"""Largest penalty or bias. Sums of such numbers stay finite in float32."""

_BESIDE_LABELS = {
    *("label_token_ids", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "embeds", "certify"),
    *("ignore_eos", "skip_reading_prefix_cache", "truncate_prompt_tokens"),
}
"""Fields that can be combined with labels. The sampling fields among them have no effect."""
_REAL_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class TokenConstraint(Protocol):
    """Decides which tokens may come next in one answer, such as those that a grammar allows."""

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return the mask over the vocabulary after all tokens of the answer so far. Must not raise.

        Each call's answer begins with the answer of the previous call. A mask that allows no token ends the answer.
        """


@runtime_checkable
class ForkingConstraint(TokenConstraint, Protocol):
    """A constraint that can look ahead, so that answers under it can be drafted."""

    def fork(self) -> TokenConstraint | None:
        """Return an independent copy at the same place in the answer; None if a copy cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have: exactly one field is set. Names and meanings are as in vLLM."""

    json: Mapping[str, Any] | str | None = None
    """A JSON schema, or its text. The answer has white space only inside JSON strings."""
    regex: str | None = None
    """A regular expression (in Rust's syntax, without look-around) of the whole answer."""
    choice: tuple[str, ...] | None = None
    """Texts; the answer is one of them."""
    grammar: str | None = None
    """A grammar in the form of Lark or of llama.cpp (GBNF)."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        kinds = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(kinds) != 1:
            raise InvalidRequestError(
                f"structured outputs name {' and '.join(kinds) or 'nothing'}; give exactly one of json, regex, choice, "
                "grammar and json_object"
            )
        schema: Any = self.json
        if isinstance(schema, str):
            _check_length("json", schema, MAX_SCHEMA_CHARACTERS)
            schema = _parsed(schema)
        if self.json is not None and not isinstance(schema, Mapping):
            raise InvalidRequestError(f"json={self.json!r:.60} is no JSON schema; give an object, or its text")
        object.__setattr__(self, "json", schema)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"{name}={text!r:.60} is not a text")
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(text, str) and text for text in self.choice):
                raise InvalidRequestError(
                    f"choice={self.choice!r:.60} is no list of texts; give texts that are not empty"
                )
            object.__setattr__(self, "choice", tuple(self.choice))
            _check(self, "choice", len(self.choice or ()) > 0, "name a text")
        for name in ("regex", "grammar"):
            _check_length(name, getattr(self, name) or "")
        _check_length("choice", "".join(self.choice or ()))


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json={schema!r:.60} is not valid JSON: {error}") from error


def _check_length(name: str, text: str, limit: int = MAX_CONSTRAINT_CHARACTERS) -> None:
    if len(text) > limit:
        raise InvalidRequestError(f"{name} has {len(text)} characters; at most {limit} are taken, write it shorter")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of a prompt's continuation. Names and meanings are those of vLLM and OpenAI."""

    n: int = 1
    """Independent continuations; they share the prompt's blocks."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as `max_model_len` allows."""
    min_tokens: int = 0
    """Before this many tokens, no end token or `stop_token_ids` is sampled, unless a constraint allows nothing else."""
    temperature: float = 1.0
    """Randomness of sampling; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative logits, of tokens in prompt or answer (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from logits of tokens in the answer."""
    seed: int | None = None
    """Equal seeds give equal answers, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    keep_markers: bool = False
    """Whether special tokens that mark tool calls or reasoning stay in the text; other special tokens never stay."""
    ignore_eos: bool = False
    """Continue after the end token."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit; -inf forbids the token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may come; None: any. An answer ends by itself only if end tokens are allowed."""
    bad_words: tuple[str, ...] = ()
    """Words that may not occur, as the tokenizer spells them alone and after a space."""
    logprobs: int | None = None
    """Report the log probabilities of the sampled token and of this many likeliest tokens."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report the log probabilities of these tokens too, without ranks, wherever a token is sampled."""
    label_token_ids: tuple[int, ...] = ()
    """The answer is the likeliest of these label tokens (`max_tokens=1`). It reports the log probabilities of all
    labels, normalised over the labels alone. If that changes no bit, only the logits of labels are computed."""
    certify: bool = False
    """Report digests of the logits that log probabilities were computed from (`RequestOutput.logits_digest`)."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for prompt tokens from `score_from` on; None reports no prompt tokens."""
    score_from: int = 0
    """Position of the first prompt token that `prompt_logprobs` reports. Earlier tokens may be read from the cache."""
    embeds: bool = False
    """Return the hidden state of the prompt's last token (`RequestOutput.hidden_state`)."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have; `LLM` turns it into an `open_constraint`."""
    open_constraint: Callable[[], TokenConstraint] | None = None
    """Makes the constraint of one continuation; None: any token may come."""
    prediction_token_ids: tuple[int, ...] = ()
    """Tokens that the answer is likely to have: a source of drafts. They change only the answer's speed."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt even if it is cached."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep at the end of the prompt; -1: as many as leave room for the answer; None: all tokens."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", words)
        for name in ("stop_token_ids", "logprob_token_ids", "label_token_ids", "prediction_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.structured_outputs is not None and self.open_constraint is not None:
            raise InvalidRequestError("structured_outputs and open_constraint cannot be combined; leave one out")
        self._check_types()
        _check(self, "n", self.n >= 1, "use 1 or more")
        _check(self, "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "use 1 or more, or None")
        _check(self, "min_tokens", self.min_tokens >= 0, "use 0 or more")
        _check(self, "score_from", self.score_from >= 0, "use 0 or more")
        if self.score_from and (self.prompt_logprobs is None or self.truncate_prompt_tokens is not None):
            other = "with prompt_logprobs alone" if self.prompt_logprobs is None else "without truncate_prompt_tokens"
            raise InvalidRequestError(f"score_from={self.score_from} is only allowed {other}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        _check(self, "temperature", 0.0 <= self.temperature < math.inf, "use 0 (greedy) or more")
        _check(self, "top_p", 0.0 < self.top_p <= 1.0, "use a number in (0, 1]")
        _check(self, "top_k", self.top_k >= -1, "use 0 for all tokens, or a count")
        _check(self, "min_p", 0.0 <= self.min_p <= 1.0, "use a number in [0, 1]")
        remedy = f"use a positive number from {1 / LARGEST:g} to {LARGEST:g}; 1 changes nothing"
        _check(self, "repetition_penalty", 1 / LARGEST <= self.repetition_penalty <= LARGEST, remedy)
        for name in ("presence_penalty", "frequency_penalty"):
            remedy = f"use a finite number, at most {LARGEST:g} either way"
            _check(self, name, abs(getattr(self, name)) <= LARGEST, remedy)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(self, name, count is None or count >= 0, "use a count of likeliest tokens, or None")
        _check(self, "stop", all(self.stop), "a stop string cannot be empty")
        for token_id, bias in self.logit_bias.items():
            if not (abs(bias) <= LARGEST or bias == -math.inf):
                raise InvalidRequestError(
                    f"logit_bias[{token_id}]={bias!r} is out of range; use at most {LARGEST:g} either way, or -inf to "
                    "forbid the token"
                )
        allowed, keep = self.allowed_token_ids, self.truncate_prompt_tokens
        _check(self, "allowed_token_ids", allowed is None or len(allowed) > 0, "name a token, or leave it out")
        _check(self, "bad_words", all(map(str.strip, self.bad_words)), "a bad word cannot be empty")
        if self.label_token_ids:
            self._check_labels()
        if self.certify and not self.reports_answer and self.prompt_logprobs is None:
            raise InvalidRequestError("certify=True is only allowed with logprobs, prompt_logprobs or label_token_ids")
        _check(self, "truncate_prompt_tokens", keep is None or keep == -1 or keep >= 1, "use 1 or more, or -1")

    @classmethod
    def for_embedding(cls) -> SamplingParams:
        """Return the parameters for embedding a prompt. Every answer has a token, so label 0 is the only choice."""
        return cls(max_tokens=1, embeds=True, label_token_ids=(0,))

    @property
    def reports_answer(self) -> bool:
        """Whether it reports log probabilities of sampled tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids or self.label_token_ids)

    @property
    def first_reported(self) -> int:
        """The position whose logits give the first reported prompt token: the position before `score_from`, or 0."""
        return max(0, self.score_from - 1)

    @property
    def reads_cache(self) -> bool:
        """Whether anything of the prompt may be read from the prefix cache."""
        return not self.skip_reading_prefix_cache and (self.prompt_logprobs is None or self.first_reported > 0)

    def _check_labels(self) -> None:
        """Raise InvalidRequestError for fields that cannot be combined with labels."""
        _check(self, "label_token_ids", len(set(self.label_token_ids)) == len(self.label_token_ids), "name each once")
        if self.max_tokens != 1:
            raise InvalidRequestError(f"max_tokens={self.max_tokens} with label_token_ids; use 1")
        plain = SamplingParams(max_tokens=1)
        for option in fields(self):
            if option.name not in _BESIDE_LABELS and getattr(self, option.name) != getattr(plain, option.name):
                raise InvalidRequestError(f"{option.name} cannot be combined with label_token_ids; leave it out")

    def _check_types(self) -> None:
        optional = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
        for name in ("n", "min_tokens", "top_k", "score_from", *optional):
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name in optional)):
                raise InvalidRequestError(f"{name}={value!r} is not an integer")
        numbers = {name: getattr(self, name) for name in _REAL_NUMBERS}
        numbers |= {f"logit_bias[{token_id}]": bias for token_id, bias in self.logit_bias.items()}
        for name, value in numbers.items():
            if not isinstance(value, Real):
                raise InvalidRequestError(f"{name}={value!r} is not a number")
        long_lists = (*_not_ints(self.allowed_token_ids or ()), *_not_ints(self.prediction_token_ids))
        long_lists += (*_not_ints(self.logprob_token_ids), *_not_ints(self.label_token_ids))
        for token_id in (*self.stop_token_ids, *self.logit_bias, *long_lists):
            if not isinstance(token_id, Integral):
                raise InvalidRequestError(
                    f"token id {token_id!r} in stop_token_ids, logit_bias, allowed_token_ids, logprob_token_ids, "
                    "label_token_ids or prediction_token_ids is not an integer"
                )
        for kind, texts in (("stop string", self.stop), ("bad word", self.bad_words)):
            for text in texts:
                if not isinstance(text, str):
                    raise InvalidRequestError(f"{kind} {text!r} is not a text")


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return parameters for each of `count` prompts. Raises InvalidRequestError for a list of another length."""
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * count
    if len(each) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(each)} sampling_params; give one, or one each")
    return each


def _not_ints(token_ids: tuple[int, ...]) -> Iterator[object]:
    """Yield the elements whose type is not `int`. It is fast even for as many ids as a vocabulary has."""
    if set(map(type, token_ids)) <= {int}:
        return iter(())
    return (token_id for token_id in token_ids if type(token_id) is not int)


def _check(params: SamplingParams | StructuredOutputsParams, name: str, ok: bool, remedy: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}={getattr(params, name)!r} is out of range; {remedy}")


BoolArray = npt.NDArray[np.bool_]


class TokenLimits:
    """Limits on the tokens of an answer. One object serves all answers to a prompt."""

    def __init__(
        self,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        end_token_ids: Collection[int] = (),
        allowed: Collection[int] | None = None,
        forbidden: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """`end_token_ids`: the tokens that end answers if `stop_token_ids` is empty; `bad_words`: the token ids of each
        word.
        """
        self._vocab_size = vocab_size
        self._stop = _ids(stop_token_ids)
        self._end = _ids(stop_token_ids or end_token_ids)
        self._allowed = None if allowed is None else _ids(allowed)
        self._forbidden = _ids([*forbidden, *(word[0] for word in bad_words if len(word) == 1)])
        self.bad_words = tuple(tuple(word) for word in bad_words if len(word) > 1)
        """Bad words of several tokens. The last token of a word may not follow its other tokens."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        end_token_ids: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> TokenLimits | None:
        """Return the limits of a request; None if only a bias and `min_tokens` apply, which need no mask.

        Raises InvalidRequestError for parameters that allow no first token.
        """
        forbidden = [token_id for token_id, bias in params.logit_bias.items() if bias == -math.inf]
        names = ("allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids")
        used = [name for name in names if getattr(params, name)]
        needs_mask = params.allowed_token_ids is not None or bad_words or (forbidden and params.open_constraint)
        stops = set(stop_token_ids) if params.min_tokens else set()
        if not needs_mask and len({*forbidden, *stops}) < vocab_size:
            return None
        limits = cls(
            vocab_size,
            stop_token_ids,
            end_token_ids=end_token_ids,
            allowed=params.allowed_token_ids,
            forbidden=forbidden,
            bad_words=bad_words,
        )
        first = limits._without_answer()
        if not first.any():
            raise InvalidRequestError(f"no token is left by {' and '.join(used)}; allow at least one")
        first[list(stops)] = False
        if not first.any() and params.open_constraint is None:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} forbids the end, and nothing else is left by {' and '.join(used)}; "
                "lower min_tokens, or allow a token that does not end the answer"
            )
        if not len(limits._end):
            first[[word[-1] for word in limits.bad_words]] = False
            if not first.any():
                raise InvalidRequestError(
                    "every token that is allowed ends one of the bad_words, and the model has no end token; allow "
                    "another token, or give stop_token_ids"
                )
        return limits

    def _without_answer(self) -> BoolArray:
        """Tokens that may come anywhere in an answer, [vocab]."""
        allowed = np.ones(self._vocab_size, np.bool_)
        if self._allowed is not None:
            allowed[:] = False
            allowed[self._allowed] = True
        allowed[self._forbidden] = False
        return allowed

    def narrow(self, mask: BoolArray | None, answer: Sequence[int], *, needs_more: bool) -> BoolArray | None:
        """Return a mask of the tokens of `mask` (None: all) that may follow an answer, [vocab]; None if no token may.

        With `needs_more`, tokens that end the answer are left out, unless only such tokens may follow.
        """
        allowed = self._without_answer()
        if mask is not None:
            allowed &= mask
        for word in self.bad_words:
            if tuple(answer[-len(word) + 1 :]) == word[:-1]:
                allowed[word[-1]] = False
        if needs_more:
            going_on = allowed.copy()
            going_on[self._stop] = False
            if going_on.any():
                return going_on
        return allowed if allowed.any() else None

    def only_end(self) -> BoolArray:
        """Return the mask for an answer that must end, [vocab]: end tokens, or all if the model has no end token."""
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[self._end if len(self._end) else slice(None)] = True
        return allowed


def _ids(token_ids: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))

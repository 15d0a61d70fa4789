"""What travels through the engine: a request, how to sample it, and what comes back.

Knows token ids, text and times; knows nothing of blocks, batches or tensors.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache import LookupExplanation, TokenSequence
from foreword.errors import InvalidRequestError

_REAL_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

FinishReason = Literal["stop", "length", "abort"]


class TokenConstraint(Protocol):
    """Which tokens may come next in one answer, such as those that a grammar allows."""

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Mask over the vocabulary, given all tokens of the answer so far. Must not raise, and must allow a token.

        Called once for each token, in order.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings are vLLM's and OpenAI's."""

    n: int = 1
    """Independent continuations; they share the prompt's blocks."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as `max_model_len` leaves."""
    min_tokens: int = 0
    """Until then, neither end tokens nor `stop_token_ids` are sampled."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) logits of tokens in prompt or answer (CTRL)."""
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
    ignore_eos: bool = False
    """Generate on after the end token."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit."""
    logprobs: int | None = None
    """Report the sampled token's log probability and those of this many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. Such a request does not read the prefix cache."""
    open_constraint: Callable[[], TokenConstraint] | None = None
    """Makes the constraint of one continuation; None: any token may come."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt even if it is cached."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_types()
        _check("n", self.n, self.n >= 1, "use 1 or more")
        _check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or self.max_tokens >= 1,
            "use 1 or more, or None",
        )
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "use 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        _check("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "use 0 (greedy) or more")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "use a number in (0, 1]")
        _check("top_k", self.top_k, self.top_k >= -1, "use 0 for all tokens, or a count")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "use a number in [0, 1]")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0.0 < self.repetition_penalty < math.inf,
            "use a positive number; 1 changes nothing",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), math.isfinite(getattr(self, name)), "use a finite number")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count, count is None or count >= 0, "use a count of likeliest tokens, or None")
        _check("stop", self.stop, all(self.stop), "a stop string cannot be empty")
        for token_id, bias in self.logit_bias.items():
            _check(f"logit_bias[{token_id}]", bias, bias < math.inf, "use a finite number, or -inf to forbid the token")

    def _check_types(self) -> None:
        optional = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
        for name in ("n", "min_tokens", "top_k", *optional):
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name in optional)):
                raise InvalidRequestError(f"{name}={value!r} is not an integer")
        numbers = {name: getattr(self, name) for name in _REAL_NUMBERS}
        numbers |= {f"logit_bias[{token_id}]": bias for token_id, bias in self.logit_bias.items()}
        for name, value in numbers.items():
            if not isinstance(value, Real):
                raise InvalidRequestError(f"{name}={value!r} is not a number")
        for token_id in (*self.stop_token_ids, *self.logit_bias):
            if not isinstance(token_id, Integral):
                raise InvalidRequestError(f"token id {token_id!r} in stop_token_ids or logit_bias is not an integer")
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequestError(f"stop string {text!r} is not a text")


FACTS = np.dtype(
    [
        ("num_prompt_tokens", np.int64),
        ("max_length", np.int64),  # of prompt and answer, all limits considered
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("changes_logits", np.bool_),
        ("samples_by_tokens", np.bool_),
        ("reports", np.bool_),  # log probabilities of sampled tokens
        ("reports_prompt", np.bool_),
    ],
    align=True,
)
"""What each step asks of every request, and never changes: a record, so that one operation asks it of all."""
FactRows = npt.NDArray[np.void]
"""FACTS"""


def _check(name: str, value: object, ok: bool, remedy: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}={value!r} is out of range; {remedy}")


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token, and its rank among all (1: the likeliest)."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob, for one position."""


@dataclass(slots=True)
class RequestMetrics:
    """Moments of one request's life, `time.monotonic()` seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Arrival to first generated token."""
        return None if self.first_token_time is None else 1e3 * (self.first_token_time - self.arrival_time)


class Request:
    """One prompt being continued once. The scheduler changes its progress, the engine reads it."""

    def __init__(
        self,
        sequence: TokenSequence,
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        priority: int = 0,
        message_ends: tuple[int, ...] = (),
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = sequence.request_id
        self.sequence = sequence
        """Prompt and generated tokens."""
        self.output_token_ids = sequence.generated
        """Generated tokens; the sequence's own list."""
        self.num_prompt_tokens = len(sequence)
        self.params = params
        self.max_tokens = max_tokens
        """Most tokens to generate, all limits considered."""
        self.stop_token_ids = stop_token_ids
        """Tokens that end this request: its own and, unless ignored, the model's end tokens."""
        self.constraint = None if params.open_constraint is None else params.open_constraint()
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.samples_by_tokens = bool(penalised) or self.constraint is not None
        """Whether the next token depends on the tokens before in other ways than through the model."""
        self.changes_logits = bool(self.samples_by_tokens or params.logit_bias or params.min_tokens)
        """Whether it may be sampled from other logits than the model's."""
        self.seed = seed
        self.facts = (
            self.num_prompt_tokens,
            self.num_prompt_tokens + max_tokens,
            params.temperature,
            min(params.top_k, 2**31),
            params.min_p,
            params.top_p,
            int(seed) & (2**64 - 1),
            self.changes_logits,
            self.samples_by_tokens,
            params.logprobs is not None,
            params.prompt_logprobs is not None,
        )
        """A record of FACTS."""
        self.priority = priority
        self.message_ends = message_ends
        """Numbers of prompt tokens behind which a message ends; later prompts may begin alike up to there."""
        self.state_positions: list[int] = []
        """Numbers of tokens behind which recurrent states are saved, besides those at intervals; ascending."""
        self.num_answer_state_tokens = 0
        """The last place in the answer whose state was saved."""
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The stop token id or stop string that ended it, if any."""
        self.num_scheduled_tokens = 0
        """How many of its tokens are computed after the step that is planned; only where layers are recurrent."""
        self.num_cached_tokens = 0
        """Prompt tokens that were hit at the first admission."""
        self.explanation: LookupExplanation | None = None
        """How the lookup of its first admission went; None where the cache keeps no ledger."""
        self.num_preemptions = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.metrics = RequestMetrics(time.monotonic() if arrival_time is None else arrival_time)

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence) - self.num_prompt_tokens

    @property
    def skips_cache(self) -> bool:
        """Prompt logprobs need every prompt position computed."""
        return self.params.skip_reading_prefix_cache or self.params.prompt_logprobs is not None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt; grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """While the request runs, its own list, by which its blocks are cached: copy it before changing it."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step. One object per request, updated in place until finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache by the first of its continuations."""
    explanation: LookupExplanation | None = None
    """How the lookup of the first continuation went: how much was found, and why the rest was not."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

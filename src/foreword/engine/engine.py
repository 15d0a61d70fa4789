"""Engine: schedule -> run -> commit -> outputs, one step at a time.

Knows requests and outputs; knows neither tensors nor tokenizers: what runs a batch (`Runner`) and what
turns tokens into text (`TextStream`) are handed in. One thread calls it.

A runner that computes while the host goes on (`LaunchingRunner`) is given the next batch before the last one is
done, if the scheduler can plan it without that one's tokens, and else before that one's outputs are made:

    step()    step()                              step()
    batch 1   batch 2 | read 1 | outputs of 1     batch 3 | read 2 | outputs of 2
    device    |......1........||.................2................||......3......
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from foreword.batch import Batch, BatchResult
from foreword.cache import (
    NO_EXTRA_KEYS,
    BlockHash,
    ExtraKeys,
    HashFunction,
    LookupExplanation,
    NumberedEvent,
    PrefixCacheStats,
    PrefixNode,
    TokenSequence,
    chain_root,
    sha256,
)
from foreword.engine.outputs import OpenTextStream, Outputs
from foreword.engine.runner import Computed, LaunchingRunner, PendingStep, Runner
from foreword.engine.scheduler import Scheduler
from foreword.engine.snapshot import Snapshot
from foreword.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    RequestTooLargeError,
)
from foreword.request import Request, RequestOutput, SamplingParams, TokenLimits

logger = logging.getLogger(__name__)

Spell = Callable[[str], Sequence[Sequence[int]]]
"""Token ids of a word, in each way that a tokenizer writes it."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must respect, whatever the model is."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """How the keys of all requests' blocks are computed."""

    hash_fn: HashFunction = sha256
    root: BlockHash = field(default_factory=chain_root)
    """Stands for the model; `chain_root` makes it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue."""

    token_ids: npt.NDArray[np.int32]
    text: str | None = None
    """The text that the tokens came from, if any; only handed back."""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    """Adapter, salt and media that keep its cached blocks apart from others."""
    priority: int = 0
    """Lower goes first under the "priority" policy."""
    message_ends: tuple[int, ...] = ()
    """Positions at which the messages of a conversation end, if known."""


class Engine:
    """Requests go in with `add_request`; each `step` moves all of them on by one batch."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: ModelLimits,
        *,
        open_text_stream: OpenTextStream | None = None,
        spell: Spell | None = None,
        keys: BlockKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.limits = limits
        self._runner = runner
        self._launcher = runner if isinstance(runner, LaunchingRunner) else None
        self._outputs = Outputs(open_text_stream, scheduler.finish)
        self._spell = spell
        self._keys = keys or BlockKeys()
        self._clock = clock
        self._seed = seed
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        """In the order of launching; between steps at most one."""
        self._num_added = 0
        self.num_computed_tokens = 0
        """Tokens that went through the model since the engine started."""
        self._counted_before = PrefixCacheStats()
        """The cache's counters up to its last reset."""

    # ------------------------------------------------------------------ intake

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Queue a prompt. Returns its output, which later steps fill in place.

        Raises InvalidRequestError (nothing is queued then) when the request can never be served.
        """
        for own_id in (request_id, *_continuation_ids(request_id, params.n)):
            if own_id in self._outputs or own_id in self.scheduler:
                raise InvalidRequestError(f"request id {own_id!r} is in use; give each request its own")
        prompt = self.truncate(prompt, params)
        max_tokens = self._validate(prompt, params)
        requests = self._continuations(request_id, prompt, params, max_tokens)
        output = self._outputs.open(request_id, prompt.text, prompt.token_ids.tolist(), requests)
        for request in requests:
            self.scheduler.add(request)
        return output

    def _continuations(self, request_id: str, prompt: Prompt, params: SamplingParams, max_tokens: int) -> list[Request]:
        """The n requests behind one prompt; they meet in the prefix cache."""
        self._num_added += 1
        seed = params.seed if params.seed is not None else self._seed + 0x9E3779B9 * self._num_added
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or params.open_constraint is not None:  # the end of a grammar is the end
            stop_ids |= self.limits.eos_token_ids
        limits = TokenLimits.of(
            params,
            self.limits.vocab_size,
            stop_ids,
            end_token_ids=self.limits.eos_token_ids,
            bad_words=self._spellings(params.bad_words),
        )
        requests = [
            Request(
                self._sequence(own_id, prompt),
                params,
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                seed=seed + index,
                priority=prompt.priority,
                message_ends=prompt.message_ends,
                limits=limits,
            )
            for index, own_id in enumerate(_continuation_ids(request_id, params.n))
        ]
        for request in requests[1:]:
            request.is_fork = True
        return requests

    def _spellings(self, words: Sequence[str]) -> list[Sequence[int]]:
        """Tokens of words, each in every way that the tokenizer spells it. Raises InvalidRequestError."""
        if words and self._spell is None:
            raise InvalidRequestError(
                f"bad_words={words!r:.60} need a tokenizer, and this model has none; leave them out"
            )
        spelt = [(word, self._spell(word)) for word in words if self._spell is not None]
        for word, spellings in spelt:
            if not all(spellings) or not spellings:
                raise InvalidRequestError(
                    f"the bad word {word!r:.60} has no tokens in this model's vocabulary; leave it out"
                )
        return [spelling for _, spellings in spelt for spelling in spellings]

    def truncate(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """The end of a prompt that `truncate_prompt_tokens` keeps."""
        most = params.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            most = max(1, self.limits.max_model_len - (params.max_tokens or 1))
        num_dropped = max(0, len(prompt.token_ids) - most)
        if not num_dropped:
            return prompt
        ends = tuple(end - num_dropped for end in prompt.message_ends if end > num_dropped)
        return replace(prompt, token_ids=prompt.token_ids[num_dropped:], text=None, message_ends=ends)

    def _sequence(self, request_id: str, prompt: Prompt) -> TokenSequence:
        return TokenSequence(
            request_id,
            prompt.token_ids,
            block_size=self.manager.block_size,
            extra_keys=prompt.extra_keys,
            hash_fn=self._keys.hash_fn,
            root=self._keys.root,
        )

    def _validate(self, prompt: Prompt, params: SamplingParams) -> int:
        """Most tokens to generate, all limits considered; raises InvalidRequestError."""
        length = len(prompt.token_ids)
        if length == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        wrong = np.flatnonzero((prompt.token_ids < 0) | (prompt.token_ids >= self.limits.vocab_size))
        if wrong.size:
            raise InvalidRequestError(
                f"prompt token {prompt.token_ids[wrong[0]]} at position {wrong[0]} is out of range; "
                f"the model's ids are 0 to {self.limits.vocab_size - 1}"
            )
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(params, name) or (0,)
            for token_id in (min(token_ids), max(token_ids)):
                if not 0 <= token_id < self.limits.vocab_size:
                    raise InvalidRequestError(
                        f"token id {token_id} in {name} is out of range; the model's ids are 0 to "
                        f"{self.limits.vocab_size - 1}"
                    )
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs are for LLM and the server; give the engine an open_constraint"
            )
        if params.stop and not self._outputs.have_text:
            raise InvalidRequestError(
                f"stop={params.stop!r} needs a tokenizer, and this model has none; use stop_token_ids"
            )
        room = self.limits.max_model_len - length
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but max_model_len={self.limits.max_model_len} must hold prompt and "
                "answer; shorten the prompt or raise max_model_len"
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that max_model_len="
                f"{self.limits.max_model_len} leaves behind a prompt of {length}; lower min_tokens"
            )
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        # The last token that is generated is never computed, so its KV needs no room.
        step = self.scheduler.config.max_num_batched_tokens
        if not self.manager.can_ever_hold(length + max_tokens - 1, step):
            raise RequestTooLargeError(
                f"the request needs {self.manager.max_num_blocks(length + max_tokens - 1, step)} blocks of "
                f"{' or '.join(sorted({str(group.block_size) for group in self.manager.groups}))} tokens for {length} "
                f"prompt tokens and {max_tokens} generated, but the pool has {self.manager.num_blocks}; lower "
                "max_tokens or give the cache more memory (kv_cache_memory_bytes)"
            )
        return max_tokens

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once, its blocks freed; returns its final output, None if it is unknown."""
        if request_id not in self._outputs:
            return None
        requests = self._outputs.requests_of(request_id)
        # A continuation that has ended may have left its id to another request.
        self.scheduler.abort([request.request_id for request in requests if request.finish_reason is None])
        [output] = self._outputs.collect(requests)
        return output

    def abort_all(self) -> None:
        """End every unfinished request."""
        for request_id in self._outputs.request_ids():
            self.abort_request(request_id)

    def explain(self, prompt: Prompt) -> LookupExplanation:
        """What a lookup of this prompt would find now, and why not more. Changes nothing, counts nothing.

        Raises InvalidRequestError for a prompt that could not be served, ConfigError without a ledger.
        """
        self._validate(prompt, SamplingParams(max_tokens=1))
        return self.manager.explain(self._sequence("", prompt))

    def num_cached_tokens(self, prompt: Prompt) -> int:
        """How many leading tokens of a prompt a request would find cached now. Changes nothing, counts nothing."""
        return self.manager.get_computed_blocks(self._sequence("", prompt)).num_tokens

    # -------------------------------------------------------------------- step

    def has_unfinished_requests(self) -> bool:
        return len(self._outputs) > 0

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns the requests that got tokens or ended, in order of arrival.

        With a `LaunchingRunner` those of the batch before may be returned, while this one is computed.
        Raises EngineError when the model fails: the requests of that batch are aborted, their blocks
        freed, and the engine can go on with others.
        """
        # Errors and interrupts go on to the caller, but leave no uncomputed blocks in the cache.
        self.manager.expire_pins(self._clock())
        batch = self._plan_behind()
        if batch is not None:
            self._launch(batch)
            return self._outputs.collect(self._settle())
        moved = self._settle()
        try:
            batch = self._plan()
            if batch is not None:
                self._launch(batch)
                # One token of a request at a time, so that a stop string ends it where it is complete.
                if not moved and self._in_flight[0][1].is_ready():
                    moved += self._settle()
        except BaseException:
            self._outputs.collect(moved)  # their outputs are up to date, though nobody is told
            raise
        return self._outputs.collect(moved)

    def _plan(self) -> Batch | None:
        """The next batch, when all tokens are known."""
        try:
            return self.scheduler.schedule()
        except BaseException:
            self._outputs.collect(self.scheduler.give_up())
            raise

    def _plan_behind(self) -> Batch | None:
        """The batch after the one in flight; None if there is none, or if its tokens must be known first."""
        if not self._in_flight:
            return None
        try:
            return self.scheduler.schedule_behind(self._in_flight[0][0].entries)
        except BaseException:
            try:
                self._outputs.collect(self._settle())
            finally:
                self._outputs.collect(self.scheduler.give_up())
                self.reset_prefix_cache()  # a request may have left with a token that nobody will compute
            raise

    def _launch(self, batch: Batch) -> None:
        try:
            pending = Computed(self._runner.execute(batch)) if self._launcher is None else self._launcher.launch(batch)
            self._in_flight.append((batch, pending))
        except BaseException as error:
            self._outputs.collect(self._settle())  # what is left to give up is this batch
            self._drop_what_rests_on(batch)
            self._give_up(batch, error)

    def _settle(self) -> list[Request]:
        """Wait for the first batch in flight, if there is one, and record it; the requests that got tokens."""
        if not self._in_flight:
            return []
        batch, pending = self._in_flight.popleft()
        interrupt: BaseException | None = None
        try:
            try:
                result = pending.result()
            except (KeyboardInterrupt, SystemExit) as error:  # ended only our wait; the batch is intact, so record it
                interrupt, result = error, pending.result()
        except BaseException as error:
            self._drop_what_rests_on(batch)
            self._give_up(batch, error)
        moved = self._record(batch, result)
        if interrupt is not None:
            self._outputs.collect(moved)
            raise interrupt
        return moved

    def _record(self, batch: Batch, result: BatchResult) -> list[Request]:
        """Commit what a batch computed; the requests that got tokens."""
        self.num_computed_tokens += batch.num_tokens
        for number, logprobs in result.prompt_logprobs.items():
            entry = batch.entries[number]  # a resumed request computes the same positions again
            entry.request.prompt_logprobs[entry.start :] = logprobs
        return self.scheduler.commit(batch.entries, result)

    def _drop_what_rests_on(self, failed: Batch) -> None:
        """If others use what a failed batch should have computed, end all requests and trust nothing that is cached."""
        if not self.scheduler.others_rely_on(failed.entries):
            return
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.popleft()[1].result()
        self._outputs.collect(self.scheduler.give_up())
        self.reset_prefix_cache()

    def _give_up(self, batch: Batch, error: BaseException) -> NoReturn:
        """End the requests of a batch that failed, and raise why."""
        self._outputs.collect(self.scheduler.fail(batch))
        if not isinstance(error, Exception):
            raise error
        names = ", ".join(request.request_id for request in batch.entries.requests[:4])
        raise EngineError(
            f"computing a batch of {len(batch.entries)} requests ({names}) failed: {type(error).__name__}: {error}"
        ) from error

    # -------------------------------------------------------------------- pins

    def pin_prefix(self, prompt: Prompt, ttl_s: float) -> int:
        """Evict this prompt's cached blocks last for `ttl_s` seconds; returns the number of protected tokens.

        Whole blocks only, and no more than the budget allows. Raises InvalidRequestError for an impossible
        prompt or time, ConfigError if pins are switched off.
        """
        self._validate(prompt, SamplingParams(max_tokens=1))
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0.0 < ttl_s < math.inf:
            raise InvalidRequestError(f"ttl_s={ttl_s!r} is not a time; use a positive, finite number of seconds")
        now = self._clock()
        return self.manager.pin_prefix(self._sequence("", prompt), now + ttl_s, now)

    def unpin_prefix(self, prompt: Prompt) -> None:
        """Let what is cached of this prompt be evicted like everything else."""
        self.manager.unpin_prefix(self._sequence("", prompt))

    def check_integrity(self) -> None:
        """Raise AssertionError if any room contradicts another."""
        self.scheduler.check_integrity()
        unfinished = {
            request.request_id
            for request_id in self._outputs.request_ids()
            for request in self._outputs.requests_of(request_id)
            if request.finish_reason is None
        }
        assert len(self.scheduler) == len(unfinished), "scheduler and engine disagree on what is unfinished"
        assert all(request_id in self.scheduler for request_id in unfinished)

    # ------------------------------------------------------------------- cache

    def snapshot(self) -> Snapshot:
        """Statistics, states of blocks and lengths of queues, as they are now."""
        return Snapshot.of(self.scheduler, self._counted_before, self.num_computed_tokens)

    @property
    def state_interval(self) -> int | None:
        """Tokens between recurrent states that are saved in any case; None without recurrent layers."""
        return None if self.scheduler.states is None else self.scheduler.states.interval

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests hold blocks."""
        counted = self.manager.stats
        self.manager.reset_prefix_cache()
        self._counted_before += counted

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """The cached prefixes that were reused most; see `KVCacheManager.top_prefixes`."""
        return self.manager.top_prefixes(limit, under_salt)

    def shrink_namespace(self, salt: str, max_blocks: int) -> None:
        """Evict free blocks under `salt` until `max_blocks` are left, in the order of eviction."""
        ledger = self.manager.ledger
        excess = 0 if ledger is None else ledger.num_under_salt(salt) - max_blocks
        if ledger is not None and excess > 0:
            self.manager.evict_blocks(ledger.blocks_under_salt(salt, self.manager.free_block_ids())[:excess])

    def take_cache_events(self) -> list[NumberedEvent]:
        """What the cache stored and removed since the last call. Raises ConfigError if no events are recorded."""
        ledger = self.manager.ledger
        if ledger is None or ledger.events is None:
            raise ConfigError("no cache events are recorded; give cache_events=True (and leave prefix caching on)")
        return ledger.events.take()


def _continuation_ids(request_id: str, n: int) -> list[str]:
    """Ids under which the scheduler knows a prompt's continuations."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]

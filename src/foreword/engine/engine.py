"""Engine: requests go in, steps are planned, computed and committed, outputs come out.

An engine has a `Runner`, which computes batches, and `TextTools`, which turn tokens into text. One thread calls it.

A `LaunchingRunner` computes while the host goes on, so it gets its next batch early. It gets batch 2 before batch 1 is
done if the scheduler can plan batch 2 without the tokens of batch 1. Otherwise it gets batch 2 before the outputs of
batch 1 are made:

    step()    step()                              step()
    batch 1   batch 2 | read 1 | outputs of 1     batch 3 | read 2 | outputs of 2
    device    |......1........||.................2................||......3......

So a step has three parts: plan, launch, and settle (wait for a batch and commit it). At most two batches are in flight,
and only inside a step. The later batch depends on the earlier batch. If the earlier batch fails, `_fail` ends the
requests of both.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from foreword.batch import Batch
from foreword.cache import (
    BlockIds,
    ExtraKeys,
    KVCacheManager,
    LookupExplanation,
    NumberedEvent,
    PrefixCacheStats,
    PrefixNode,
    TokenSequence,
)
from foreword.config import DraftTokens, SchedulerConfig
from foreword.engine.drafts.drafting import choose_drafting
from foreword.engine.drafts.gain import StepTimes
from foreword.engine.intake import Intake, continuation_ids
from foreword.engine.keeper import Keeper
from foreword.engine.outputs import Outputs
from foreword.engine.prompt import BlockKeys, ModelLimits, Prompt, TextTools
from foreword.engine.runner import Computed, LaunchingRunner, PendingStep, Runner, SeeingRunner
from foreword.engine.scheduler import Scheduler
from foreword.engine.snapshot import Snapshot
from foreword.engine.tiering.director import TierDirector, TiersReport
from foreword.errors import ConfigError, EngineError, InvalidRequestError
from foreword.request import LinkedRun, Request, RequestOutput, SamplingParams
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.identity import CacheIdentity, Facts
from foreword.tiers.prefix_file import ExportReport, ImportReport, PrefixFile, UnsoundFileError, why_foreign


class Engine:
    """Requests go in with `add_request`. Each `step` computes one batch of their tokens."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        runner: Runner,
        limits: ModelLimits,
        *,
        text: TextTools | None = None,
        keys: BlockKeys | None = None,
        tiers: TierDirector | None = None,
        seed: int = 0,
    ) -> None:
        """`text`: None if tokens do not become text. `tiers`: None if there are no tiers below the pool."""
        self.manager = manager
        self._tiers = tiers or TierDirector.of_none(manager)
        self.clock: Callable[[], float] = time.monotonic
        """Returns the time in seconds. Both the ends of pins and the times of steps are measured by this clock."""
        encoder = self._encoder = runner.encoder if isinstance(runner, SeeingRunner) else None
        self.scheduler = Scheduler(manager, config, self._tiers, encoder, clock=lambda: self.clock())
        self.limits = limits
        self._runner = runner
        self._launcher = runner if isinstance(runner, LaunchingRunner) else None
        self._outputs = Outputs(None if text is None else text.open_stream, self.scheduler.finish)
        self.scheduler.recording.read_text = self._outputs.read
        step = config.max_num_batched_tokens
        keys = keys or BlockKeys()
        self._keys_digest = keys.digest()
        self._intake = Intake(manager, limits, text, keys, max_step_tokens=step, seed=seed)
        self.entries = Keeper(manager, self._tiers, self._checked_sequence, lambda: self.clock())
        """The prefixes that owners asked to keep."""
        self._in_flight: deque[tuple[Batch, PendingStep, float]] = deque()
        """Launched batches in order, each with the time of its launch. Between steps there is at most one."""
        self.num_computed_tokens = 0
        """Tokens that went through the model since the engine started."""
        self._counted_before = PrefixCacheStats()
        """The cache's counters up to its last reset."""

    # ------------------------------------------------------------------ intake

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, answered: Sequence[Sequence[int]] = ()
    ) -> RequestOutput:
        """Queue a prompt. Returns its output, which later steps fill in place.

        `answered`: for each of the `n` continuations, the tokens that another engine has generated. The continuations
        go on after these tokens exactly as in the other engine. This needs a `seed` unless sampling is greedy, and the
        output has log probabilities of the new tokens only. A continuation that these tokens end is finished at once.
        Raises InvalidRequestError, and queues nothing, if the request can never be served.
        """
        for own_id in (request_id, *continuation_ids(request_id, params.n)):
            if own_id in self._outputs or own_id in self.scheduler:
                raise InvalidRequestError(f"request id {own_id!r} is in use; give each request its own")
        prompt = self.truncate(prompt, params).begun()
        requests = self._intake.requests(request_id, prompt, params)
        if answered:
            self._intake.resume(requests, answered)
        begins_reply = prompt.begins_reply and params.open_constraint is None  # a grammar needs the whole text
        output = self._outputs.open(
            request_id, prompt.text, prompt.token_ids.tolist(), requests, begins_reply=begins_reply
        )
        for request in requests:
            self.scheduler.add(request)
        self.entries.note_marks(requests[0], prompt)
        if any(answered):
            for request in requests:
                self.scheduler.finish_if_answered(request)
            self._outputs.collect(requests)
        return output

    def draft(self, draft_tokens: DraftTokens, inexactness: str | None = None) -> None:
        """Draft at most `draft_tokens` tokens of a request in each step from now on, if this engine can draft.

        "auto": as many tokens as save time. `inexactness`: why results are not bit-exact on this machine; None if they
        are.
        """
        self.scheduler.drafting = choose_drafting(
            draft_tokens,
            self.manager,
            self.limits.vocab_size,
            launches=self._launcher is not None,
            inexactness=inexactness,
        )

    def check(
        self, request_id: str, prompt: Prompt, params: SamplingParams
    ) -> tuple[TokenSequence, list[tuple[LinkedRun, TokenSequence]]]:
        """Return the tokens and block keys of a request, and its linked runs, each with its source. Queues nothing.

        Raises InvalidRequestError when the request can never be served.
        """
        prompt = self.truncate(prompt, params)
        self._intake.check(prompt, params)
        runs = self._intake.runs(prompt)
        return self._intake.sequence(request_id, prompt, tuple(source for _, source in runs)), runs

    def next_seeds(self, count: int) -> list[int]:
        """The seeds that the next requests get if their parameters have no seed."""
        return self._intake.next_seeds(count)

    def truncate(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """Keep only the last tokens of a prompt, as many as `truncate_prompt_tokens` says."""
        return self._intake.truncate(prompt, params)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks. Returns its final output; None if the request is unknown."""
        if request_id not in self._outputs:
            return None
        requests = self._outputs.requests_of(request_id)
        # Another request may have the id of a continuation that has ended.
        self.scheduler.abort([request.request_id for request in requests if request.finish_reason is None])
        [output] = self._outputs.collect(requests)
        return output

    def abort_all(self) -> None:
        for request_id in self._outputs.request_ids():
            self.abort_request(request_id)

    def explain(self, prompt: Prompt) -> LookupExplanation:
        """Explain how much a lookup of this prompt would find now, and why not more. Changes nothing, counts nothing.

        Raises InvalidRequestError for a prompt that could not be served, ConfigError without a ledger.
        """
        return self.manager.explain(self._checked_sequence(prompt))

    def explain_links(self, prompt: Prompt, max_tokens: int | None = 1) -> list[tuple[LinkedRun, int]]:
        """The runs that a linked prompt would copy, each with the number of its source's tokens that the cache lacks.

        Changes nothing, counts nothing. Raises InvalidRequestError for a prompt that could not be served with an answer
        of `max_tokens`.
        """
        self._intake.check(prompt, SamplingParams(max_tokens=max_tokens))
        runs, size, tables = [], self.manager.block_size, dict[TokenSequence, BlockIds]()
        for run, source in self._intake.runs(prompt):
            if source not in tables:  # hundreds of runs may have the same source
                [tables[source]] = self.manager.cached_blocks(source)
            num_missing = int((tables[source][: -(-run.source_end // size)] < 0).sum())
            runs.append((run, num_missing * size))
        return runs

    def _checked_sequence(self, prompt: Prompt) -> TokenSequence:
        self._intake.check(prompt, SamplingParams(max_tokens=1))
        return self._intake.sequence("", prompt)

    def num_cached_tokens(self, prompt: Prompt) -> int:
        """The number of leading tokens that a request would find cached now. Changes nothing, counts nothing."""
        return self.manager.get_computed_blocks(self._intake.sequence("", prompt)).num_tokens

    # -------------------------------------------------------------------- step

    def has_unfinished_requests(self) -> bool:
        return len(self._outputs) > 0

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns the outputs of the requests that got tokens or ended, in service order.

        A `LaunchingRunner` may still compute this batch. Then the outputs of the previous batch are returned. Raises
        EngineError if the model fails. The requests of the failed batch are then aborted, their blocks are freed, and
        the engine can go on with other requests.
        """
        # Errors and interrupts go on to the caller, but leave no uncomputed blocks in the cache.
        self.manager.expire_pins(self.clock())
        self.entries.save()
        batch = self._plan() if self._in_flight else None
        if batch is not None:
            self._launch(batch)
            return self._outputs.collect(self._settle())
        moved = self._settle()
        try:
            batch = self._plan()
            if batch is None and not moved and self._tiers.is_loading:
                self._tiers.wait()
            if batch is not None:
                self._launch(batch)
                # One call settles at most one batch. The caller then looks for stop strings, so a request ends at the
                # token that completes a stop string.
                if not moved and self._in_flight[0][1].is_ready():
                    moved += self._settle()
        except BaseException:
            self._outputs.collect(moved)  # brings their outputs up to date, though the caller gets an error
            raise
        return self._outputs.collect(moved)

    def _plan(self) -> Batch | None:
        """Plan the next batch; None if no request can run, or if the tokens of the batch in flight must be known."""
        ahead = bool(self._in_flight)
        try:
            return self.scheduler.schedule_after(self._in_flight[0][0]) if ahead else self.scheduler.schedule()
        except BaseException:
            try:
                self._outputs.collect(self._settle())
            finally:
                self._outputs.collect(self.scheduler.give_up())
                if ahead:  # a request that has left may have cached blocks that nobody will compute
                    self.reset_prefix_cache()
            raise

    def _launch(self, batch: Batch) -> None:
        """Launch a batch; a runner that cannot launch computes it at once."""
        started = time.monotonic()
        try:
            pending = Computed(self._runner.execute(batch)) if self._launcher is None else self._launcher.launch(batch)
            self._in_flight.append((batch, pending, started))
        except BaseException as error:
            try:
                self._outputs.collect(self._settle())  # the earlier batch is not affected
            except (KeyboardInterrupt, SystemExit) as interrupt:  # the earlier batch is recorded all the same
                self._fail(batch, interrupt)
            self._fail(batch, error)

    def _settle(self) -> list[Request]:
        """Wait for the first batch in flight, if there is one, and commit it. Returns the requests that got tokens."""
        if not self._in_flight:
            return []
        batch, pending, started = self._in_flight.popleft()
        interrupt: BaseException | None = None
        try:
            try:
                result = pending.result()
            except (KeyboardInterrupt, SystemExit) as error:  # it ended only the wait: record the batch
                interrupt, result = error, pending.result()
        except BaseException as error:
            self._fail(batch, error)
        self.num_computed_tokens += batch.num_tokens
        for number, logprobs in result.prompt_logprobs.items():
            entry = batch.entries[number]
            entry.request.note_prompt_logprobs(entry.start, logprobs)
        for number, state in result.hidden_states.items():
            batch.entries[number].request.hidden_state = state
        seconds = None if self._in_flight else time.monotonic() - started  # with another batch, the time is shared
        moved = self.scheduler.commit(batch.entries, result, seconds)
        for request, entries in self.entries.keep_marked(moved):
            self._outputs.note_kept(request, entries)
        if interrupt is not None:
            self._outputs.collect(moved)
            raise interrupt
        return moved

    def _fail(self, batch: Batch, error: BaseException) -> NoReturn:
        """End the requests of a batch that could not be computed, and raise the error.

        If other requests use the batch's blocks, this ends all requests and forgets the whole cache.
        """
        if self.scheduler.others_rely_on(batch.entries):
            while self._in_flight:
                try:
                    self._in_flight.popleft()[1].result()
                except (KeyboardInterrupt, SystemExit) as interrupt:
                    error = interrupt  # raised once nothing relies on the batch any more
                except Exception:
                    continue
            self._outputs.collect(self.scheduler.give_up())
            self.reset_prefix_cache()
        self._outputs.collect(self.scheduler.fail(batch))
        if not isinstance(error, Exception):
            raise error
        names = ", ".join(request.request_id for request in batch.entries.requests[:4])
        raise EngineError(
            f"computing a batch of {len(batch.entries)} requests ({names}) failed: {type(error).__name__}: {error}"
        ) from error

    # ------------------------------------------------------------------ tiers

    def store_on(self) -> bool:
        """Continue stores while no request runs, and prepare for loads. Returns True if more work is left.

        Call this until it returns False. It returns at once, because a tier's threads write. While requests run, steps
        continue the stores.
        """
        self.entries.save()
        is_busy = self.has_unfinished_requests()
        stores = self._tiers.go_on(is_busy=is_busy)
        return (not is_busy and self._tiers.provide_ahead()) or stores

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The names of the tiers below the pool, the nearest first."""
        return self._tiers.names

    def report_tiers(self) -> TiersReport:
        return self._tiers.report()

    def export_prefix(
        self, prompt: Prompt, path: Path, facts: Facts, *, with_text: bool = False, overwrite: bool = False
    ) -> ExportReport:
        """Write the cached blocks of a prompt to a file that another engine can import.

        `facts` come from `manifest_facts`. `with_text` adds the prompt's token ids, salt and adapter. No request is
        computed meanwhile. Raises InvalidRequestError if no block is cached, ConfigError for a path that cannot be
        written.
        """
        self._outputs.collect(self._settle())
        if with_text and (prompt.pictures or prompt.embeds is not None):
            raise InvalidRequestError(
                "with_text=True writes token ids, and a prompt with pictures or embeddings has more; export it without"
            )
        manifest: dict[str, Any] = {**facts, "keys": self._keys_digest}
        sequence = self._intake.sequence("", prompt)
        if with_text:
            keys = sequence.extra_keys
            manifest |= {"token_ids": prompt.token_ids.tolist(), "cache_salt": keys.salt}
            manifest |= {"adapter": keys.adapter, "adapter_offset": keys.adapter_offset} if keys.adapter else {}
        return self._tiers.prefix_files.export_to(path, sequence, manifest, overwrite=overwrite)

    def import_prefixes(self, path: Path, identity: CacheIdentity, model_name: str) -> ImportReport:
        """Import the blocks of a file into the first tier or, if there are no tiers, into the pool.

        Rejects a damaged file, and a file of another identity. No request is computed meanwhile. Raises ConfigError for
        a path that cannot be read, or if there is no tier and the file has no token ids.
        """
        self._outputs.collect(self._settle())
        try:
            with PrefixFile(RealFiles(), path) as file:
                reason = why_foreign(file.facts, identity, model_name)
                if reason is None and file.facts["keys"] != self._keys_digest:
                    reason = "made with another key_salt or hash_function; give those of its maker"
                if reason is not None:
                    return ImportReport(rejected=reason)
                return self._tiers.prefix_files.take(file, self._sequence_in(file.facts))
        except (UnsoundFileError, OSError) as error:
            return ImportReport(rejected=str(error))

    def _sequence_in(self, facts: Facts) -> TokenSequence | None:
        """The sequence whose token ids a file has; None if the file has no token ids."""
        token_ids = facts.get("token_ids")
        if token_ids is None:
            return None
        keys = ExtraKeys(facts.get("adapter"), facts.get("adapter_offset", 0), salt=facts.get("cache_salt"))
        return self._intake.sequence("", Prompt(np.array(token_ids, np.int32), extra_keys=keys))

    def close(self, flush_s: float = 5.0) -> None:
        """End all requests, and finish stores for at most `flush_s` seconds. The engine cannot be used afterwards."""
        self.abort_all()
        if self._in_flight:
            with suppress(Exception):
                self._settle()
        self.entries.save(at_once=True)
        self._tiers.close(flush_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if scheduler, cache, tiers and outputs contradict each other."""
        self.scheduler.check_integrity()
        unfinished = {
            request.request_id
            for request_id in self._outputs.request_ids()
            for request in self._outputs.requests_of(request_id)
            if request.finish_reason is None
        }
        num_own = len(self.scheduler) - self.scheduler.num_sources
        assert num_own == len(unfinished), "scheduler and engine disagree on what is unfinished"
        assert all(request_id in self.scheduler for request_id in unfinished)

    # ------------------------------------------------------------------- cache

    def snapshot(self) -> Snapshot:
        return Snapshot.of(
            self.scheduler,
            self._counted_before,
            self.num_computed_tokens,
            Counter() if self._encoder is None else self._encoder.counts(),
            self.report_tiers(),
            self.entries.entries(),
            self.clock(),
        )

    @property
    def num_known_tokens_computed(self) -> int:
        """`num_computed_tokens`, without drafts."""
        drafting = self.scheduler.drafting
        if drafting is None:
            return self.num_computed_tokens
        return self.num_computed_tokens - drafting.counts.num_accepted - drafting.counts.num_rejected

    @property
    def step_times(self) -> StepTimes | None:
        """The times of steps, as drafting measured them; None if this engine drafts no tokens."""
        return None if self.scheduler.drafting is None else self.scheduler.drafting.times

    @property
    def state_interval(self) -> int | None:
        """Tokens between the recurrent states that are always saved; None without recurrent layers."""
        return None if self.scheduler.states is None else self.scheduler.states.interval

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes in memory; tiers keep theirs. Raises CacheBusyError while requests hold blocks."""
        counted = self.manager.stats
        self.manager.reset_prefix_cache()  # first: if it refuses, loads and stores go on
        self._tiers.reset()
        self._counted_before += counted
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.forget()

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """The cached prefixes that were reused most; see `KVCacheManager.top_prefixes`."""
        return self.manager.top_prefixes(limit, under_salt)

    def shrink_namespace(self, salt: str, max_blocks: int) -> None:
        """Evict free blocks of the namespace `salt`, in the order of eviction, until it has `max_blocks` blocks."""
        ledger = self.manager.ledger
        excess = 0 if ledger is None else ledger.num_under_salt(salt) - max_blocks
        if ledger is not None and excess > 0:
            self.manager.evict_blocks(ledger.blocks_under_salt(salt, self.manager.free_block_ids())[:excess])

    def close_session(self, owner: str | None, session: str) -> int | None:
        """Let blocks that only this session's requests used be evicted first; see `KVCacheManager.close_session`."""
        return self.manager.close_session((owner, session))

    def take_cache_events(self) -> list[NumberedEvent]:
        """Events of blocks stored and removed since the last call. Raises ConfigError if no events are recorded."""
        ledger = self.manager.ledger
        if ledger is None or ledger.events is None or not ledger.events.capacity:
            raise ConfigError("no cache events are recorded; give cache_events=True (and leave prefix caching on)")
        return ledger.events.take()

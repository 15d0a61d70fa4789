"""Service: the work that all endpoints share, from an authorised request to a running answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache import NO_EXTRA_KEYS, ExtraKeys
from foreword.engine import Keep, Mark, Prompt, Snapshot
from foreword.errors import ChatTemplateError, ConfigError, InvalidRequestError
from foreword.llm import LLM
from foreword.model.checkpoint.generation import differences
from foreword.request import Adapter, HeldBytes, SamplingParams, StructuredOutputsParams, TokenConstraint
from foreword.server.access.adapters import ServedAdapters
from foreword.server.access.links import ServedLinks
from foreword.server.access.operators import Operators
from foreword.server.access.tenants import Quotas, Tenant, Tenants, common_beginning, num_shared, read_prefix
from foreword.server.answer_stream import AnswerStream, Job
from foreword.server.api_errors import (
    APIError,
    LongPromptError,
    adapter_unread,
    bad_request,
    too_busy,
    unknown_model,
    wrong_key,
)
from foreword.server.arrival import HttpRequests
from foreword.server.bodies.body_limits import BodyLimits
from foreword.server.bodies.fields import UnknownFields
from foreword.server.bodies.json_scan import scan_json
from foreword.server.chats.score_template import CLASSIFYING, RANKING, Judge
from foreword.server.chats.tools import LoggedPatterns
from foreword.server.crews import CALLER, Crews
from foreword.server.engine_thread import AfterStep, EngineDoor, in_a_thread
from foreword.server.hints import Hints
from foreword.server.kept_responses import KeptResponses
from foreword.server.observe.insight import Insight, MoreMemory
from foreword.server.observe.log import TrafficLog, log_request
from foreword.server.observe.metrics import Metrics, infos_of
from foreword.server.observe.recorder import Recorder
from foreword.server.observe.tracing import Tracing
from foreword.server.options import ServerConfig
from foreword.server.records import Listener, ListenerHealth, Records, RequestRecord
from foreword.server.resources.schemas import KeptSchemas
from foreword.server.resources.store import CachedContents, open_folder
from foreword.server.template_check import check_template, log_template
from foreword.server.verbs import CLOSE_SESSION
from foreword.text import Tokenizer
from foreword.text.conversation import Place, pictures_of
from foreword.text.template_probe import TemplateReport

if TYPE_CHECKING:
    from foreword.server.media import MediaDomains

logger = logging.getLogger(__name__)

_CONTINUATIONS = ("", "a", " a", "A", "1", ".", "\n", "\n\n")
"""Texts that may follow a public text. They show which last tokens of the public text depend on what follows."""

LONG_TEXT = 4_000
"""Length in characters from which texts are tokenized in a thread, not on the event loop."""

MANY_MESSAGES = 32
"""Number of messages from which a conversation is tokenized in a thread."""


TokenIds = npt.NDArray[np.int32]
Piece = TypeVar("Piece", bound=Sequence[Any])
OpenDoor = Callable[[LLM, Records, Sequence[AfterStep]], EngineDoor]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and the caller's wishes for caching."""

    tenant: Tenant
    endpoint: str
    cache_salt: str | None = None
    session_id: str | None = None
    trace_parent: str | None = None
    """W3C `traceparent` header of the call."""
    template_digests: Mapping[str, str] = field(default_factory=dict)
    """Name of a chat template's input (except the messages) -> digest of the input."""
    is_uncached: bool = False
    """Whether the call bypasses the cache: its prompts use no cached KV, and no other call finds their KV."""
    priority: int = 0
    """Priority under the scheduling policy "priority". Requests with lower numbers go first."""
    model: str | None = None
    """The name of the model or of an adapter; None: the model."""
    hints: Hints | None = None
    """An orchestrator's requests to the cache; None if the call has none. The answer reports the outcomes."""


MOST_MEDIA_BYTES = 2**30
"""Limit of the bytes of all requests' picture files together. Prompt embeddings have another limit of this size."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a conversation's prompt."""

    add_generation_prompt: bool | None = None
    """True or None: the prompt ends where the assistant's answer begins. False: it ends after the last message."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message."""

    @property
    def keywords(self) -> dict[str, Any]:
        """The fields as keyword arguments of the tokenizer's rendering functions."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ChatMark:
    """A place in a conversation, and how the cache keeps the prompt up to this place."""

    place: Place
    keep: Keep


class Service:
    """Serves one model by HTTP. Only the event loop may call a method, unless the method says otherwise."""

    def __init__(self, llm: LLM, config: ServerConfig, model_name: str, open_door: OpenDoor = in_a_thread) -> None:
        """`open_door` opens the connection to the engines.

        Raises ConfigError for files that cannot be read and prefixes that cannot be shared.
        """
        self.llm, self.config, self.model_name = llm, config, model_name
        for reader in (llm.pictures, llm.embeds):
            if reader is not None:
                reader.held.limit = MOST_MEDIA_BYTES
        self._model_names = tuple(dict.fromkeys((model_name, *config.served_model_name)))
        self.created = int(time.time())
        self.is_stopping = False
        """Whether a signal has asked the server to stop."""
        self._max_choices = llm.config.scheduler.max_num_seqs + config.max_queued
        self.crews, self.http_requests = Crews(self._max_choices), HttpRequests(logs_refusals=config.log_requests)
        self.media = self._media(config)
        """Fetches pictures; None if the operator allows no domain."""
        self._closing: set[asyncio.Task[None]] = set()
        now = llm.engine.snapshot()
        self._open_access(config, now)
        self._open_engine(open_door, now)
        self._open_listeners(config)
        self._open_texts(config)
        self.unknown_fields = UnknownFields(ignored=config.ignore_unknown_fields)
        self.body_limits = BodyLimits(
            max_body_bytes=config.max_body_bytes,
            max_model_len=llm.engine.limits.max_model_len,
            max_prompts=config.max_choices,
            vocab_size=llm.engine.limits.vocab_size,
            max_pictures=0 if llm.pictures is None else llm.config.model.max_pictures,
            picture_refusal=llm.picture_refusal,
            max_token_characters=1 if llm.tokenizer is None else llm.tokenizer.max_token_characters,
        )
        scan_json(b"{}")  # compiles the function before requests wait for it
        self.kept_responses, self.logged_patterns = KeptResponses(), LoggedPatterns()
        self.clock: Callable[[], float] = time.time
        """The wall clock by which resources expire, in seconds since 1970."""
        self.cached_contents = CachedContents(
            lambda: self.clock(), config.max_cached_contents, open_folder(llm.config.tiers, llm.cache_identity.model_id)
        )
        self.schemas = KeptSchemas(lambda: llm.pml, config.max_schema_tokens)

    def _open_access(self, config: ServerConfig, now: Snapshot) -> None:
        """Open the objects that control access: adapters, tenants with their quotas, operators, and links."""
        llm, caches = self.llm, self.llm.config.cache.enable_prefix_caching
        self.adapters = ServedAdapters(llm, config.lora_modules, self._model_names)
        self.tenants = Tenants(
            api_key=config.api_key,
            keys_file=config.keys_file,
            server_secret=config.server_secret,
            quotas_work=now.has_ledger or not caches,
        )
        self.quotas = Quotas(self.tenants)
        self.operators = Operators(
            config.operator_key, asks_for_keys=self.tenants.asks_for_keys, is_tenants=self.tenants.has_key
        )
        self.links = ServedLinks.of(
            config,
            allows_links=llm.engine.limits.allows_links,
            model_id=llm.cache_identity.model_id,
            max_source_tokens=now.num_blocks * now.block_size,
        )

    def _open_engine(self, open_door: OpenDoor, now: Snapshot) -> None:
        """Connect to the engines by `open_door`, and make the metrics that observe the engines."""
        llm, self.records = self.llm, Records()
        has_curve = llm.config.cache.enable_prefix_caching and llm.layout.is_one_full_group
        self.more_memory = MoreMemory(now.num_blocks - now.num_sink_blocks if has_curve else None, now.block_size)
        self._after_step = (Listener("quotas", self.quotas.enforce), Listener("more_memory", self.more_memory.note))
        self.thread = open_door(llm, self.records, self._after_step)
        self.quotas.shrink = self.thread.shrink
        self.insight = Insight(self.thread, self.records, self.more_memory)
        self.metrics = Metrics(self.model_name, self.insight, infos_of(llm, now), self.http_requests)
        self.records.on_finished(Listener("metrics", self.metrics.observe))

    def _open_texts(self, config: ServerConfig) -> None:
        """Examine the model's chat template, and read the operator's texts."""
        tokenizer = self.llm.tokenizer
        self.ranking = Judge.open("score_template", config.score_template, RANKING, tokenizer)
        """Makes the prompts that rank documents; None: rankings are refused."""
        self.classifying = Judge.open("classify_template", config.classify_template, CLASSIFYING, tokenizer)
        """Makes the prompts that classify texts; None: classifications are refused."""
        self.template_report = TemplateReport() if tokenizer is None else tokenizer.template_report()
        self.template_changes = [] if tokenizer is None else check_template(tokenizer)
        log_template(tokenizer, self.template_report, self.template_changes)
        self._shared_prefixes = [prefix for path in config.share_prefix for prefix in self._read_prefix(path)]

    def _media(self, config: ServerConfig) -> MediaDomains | None:
        if not config.allow_media_domain:
            return None
        from foreword.server.media import MediaDomains

        held = HeldBytes() if self.llm.pictures is None else self.llm.pictures.held
        return MediaDomains(config.allow_media_domain, config.max_body_bytes, self.crews.fetches, held)

    def _open_listeners(self, config: ServerConfig) -> None:
        """Make the consumers of finished requests that the options ask for: traces, a recording, logs."""
        self.tracing: Tracing | None = None
        if config.otlp_traces_endpoint is not None:
            self.tracing = Tracing.to_endpoint(config.otlp_traces_endpoint, self.model_name)
            self.records.on_finished(Listener("traces", self.tracing.record))
        self.recorder: Recorder | None = None
        if config.record is not None:
            self.recorder = Recorder(config.record, self.records.running)
            self.records.on_finished(Listener("record_queue", self.recorder.record))
        self.traffic_log = TrafficLog(self.insight, self.records, config.log_interval_s)
        if config.log_requests:
            self.records.on_finished(Listener("request_log", log_request))

    def _read_prefix(self, path: Path) -> list[npt.NDArray[np.int32]]:
        """Return a public text's tokens as the beginning of a prompt, and as a conversation's system message."""
        text, tokenizer = read_prefix(path), self.llm.tokenizer
        if tokenizer is None:
            raise ConfigError(
                "share_prefix needs a tokenizer, and this model has none; leave it out, or give --tokenizer"
            )
        prefixes = [common_beginning([tokenizer.encode(text + more) for more in _CONTINUATIONS])]
        chats = [[{"role": "system", "content": text}, {"role": "user", "content": more}] for more in _CONTINUATIONS]
        try:
            prefixes.append(common_beginning([tokenizer.render_chat(messages) for messages in chats]))
        except ChatTemplateError as error:
            logger.warning("shared prefix %s serves no conversations: %s", path, error)
        return prefixes

    # ------------------------------------------------------------------ intake

    def authorize(self, key: str | None) -> Tenant:
        """Return the tenant of the key that a request shows. Raises APIError 401 if no tenant has this key."""
        tenant = self.tenants.tenant_of(key)
        if tenant is None:
            raise wrong_key()
        self.quotas.note(tenant)
        return tenant

    def models_of(self, tenant: Tenant) -> list[str]:
        return [*self._model_names, *filter(tenant.may_use, self.adapters.names)]

    async def adapter(self, model: str | None, tenant: Tenant) -> Adapter | None:
        """Return the adapter that a model's name stands for; None: the model alone.

        Raises APIError: 404 for a name that is not served, or not to this tenant; 429 if requests hold too many other
        adapters; 503 for files that cannot be read. Only the log names the files.
        """
        self.check_model(model, tenant)
        if model is None or model in self._model_names:
            return None
        try:
            return await self.adapters.load_in(self.crews.adapters, self.adapters.find(model))
        except InvalidRequestError as error:
            logger.warning("the adapter %r is asked for and cannot be read: %s", model, error)
            raise adapter_unread(model) from error

    def check_model(self, name: str | None, tenant: Tenant) -> None:
        """Raise APIError 404 unless this model is served to this tenant."""
        if name is None or name in self._model_names or (name in self.adapters and tenant.may_use(name)):
            return
        raise unknown_model(name)

    def kept_bytes(self) -> dict[str, int]:
        """Estimate the bytes that stay in use after requests have ended, by kind. Every kind has a limit."""
        return {
            "records": self.records.num_finished_bytes,
            "responses": self.kept_responses.num_bytes,
            "cached_contents": self.cached_contents.num_bytes,
            "schemas": self.schemas.num_bytes,
            "grammars": self.llm.num_grammar_bytes,
            "adapters": self.adapters.num_bytes,
            "record_queue": 0 if self.recorder is None else self.recorder.num_waiting_bytes,
        }

    def listeners(self) -> list[ListenerHealth]:
        healths = [*(listener.health for listener in self._after_step), *self.records.listeners()]
        healths += [sender.health for sender in (self.recorder, self.tracing) if sender is not None]
        return healths

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling parameters that apply where a call sets none."""
        return differences(self.llm.get_default_sampling_params())

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises APIError 400 if the model has no tokenizer."""
        if self.llm.tokenizer is None:
            raise bad_request("The model has no tokenizer; use /v1/completions with token ids.")
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.limits.max_model_len

    def max_prompt_len(self, max_tokens: int | None) -> int:
        """Return the most tokens that a prompt may have beside an answer of `max_tokens` tokens (None: one token)."""
        limit = self.max_model_len - (max_tokens or 1)
        return max(1, limit if self.config.max_prompt_tokens is None else min(limit, self.config.max_prompt_tokens))

    async def encode(self, text: str) -> npt.NDArray[np.int32]:
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text)
        return await self.crews.text.run(lambda: self.tokenizer.encode(text))

    async def encode_each(
        self, pieces: Sequence[Piece], encode: Callable[[Piece], TokenIds], *, num_beside: int = 0, is_cut: bool = False
    ) -> list[TokenIds]:
        """Return the token ids of the prompt that `encode` makes from each piece. `num_beside`: the number of
        characters that `encode` adds to a piece.

        The longest piece is encoded first. If its prompt is too long, the others are not encoded. With `is_cut` no
        length is checked. Raises APIError: 400 for a prompt that is too long, 429 if the queue has no room for all.
        """
        self.check_room(len(pieces))
        is_short = sum(len(piece) + num_beside for piece in pieces) < LONG_TEXT
        token_ids: dict[int, TokenIds] = {}
        for at in sorted(range(len(pieces)), key=lambda at: -len(pieces[at])):
            work = partial(encode, pieces[at])
            token_ids[at] = work() if is_short else await self.crews.text.run(work)
            if is_cut:
                continue
            num_tokens, limit = len(token_ids[at]), self.max_model_len
            self.check_length(num_tokens)
            if num_tokens >= limit:
                message = f"the prompt has {num_tokens} tokens, but max_model_len={limit} must hold prompt and answer"
                raise LongPromptError(f"{message}; shorten the prompt", num_tokens, limit - 1)
        return [token_ids[at] for at in range(len(pieces))]

    async def encode_part(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a part of a text, without special tokens around it."""
        return await self.crews.text.run(partial(self.tokenizer.encode_part, text))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ending: Ending = Ending(),
        template_inputs: Mapping[str, Any] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Return the token ids of a conversation. Raises ChatTemplateError."""
        self._check_template()

        def render() -> npt.NDArray[np.int32]:
            return self.tokenizer.render_chat(messages, template_inputs=template_inputs, **ending.keywords)

        return render() if _is_short(messages, template_inputs) else await self.crews.text.run(render)

    async def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_inputs: Mapping[str, Any] | None = None,
        ending: Ending = Ending(),
        marks: Sequence[ChatMark] = (),
    ) -> Prompt:
        """Return the prompt of a conversation. If the model has recurrent layers, the prompt also names the token at
        which each message ends.

        Marks whose place is not in the rendered text are left out. Raises ChatTemplateError, or APIError 400 for
        pictures that the model does not take.
        """
        self._check_template()
        if self.llm.pictures is None and pictures_of(messages):
            raise bad_request(f"model {self.model_name!r} {self.llm.picture_refusal}; send text alone")
        if marks:
            places = [mark.place for mark in marks]
            token_ids, ends = await self.crews.text.run(
                lambda: self.tokenizer.render_places(
                    messages, places, template_inputs=template_inputs, **ending.keywords
                )
            )
            placed_marks = tuple(Mark(end, mark.keep) for mark, end in zip(marks, ends, strict=True) if end)
        else:
            token_ids = await self.render_chat(messages, ending=ending, template_inputs=template_inputs)
            placed_marks = ()
        begins_reply = not ending.continue_final_message
        if self.llm.engine.state_interval is None:
            prompt = Prompt(token_ids, marks=placed_marks, begins_reply=begins_reply)
            return await self._with_pictures(prompt, messages, template_inputs)
        self.check_length(len(token_ids))
        message_ends = await self.crews.text.run(
            lambda: self.tokenizer.message_ends(messages, token_ids, template_inputs=template_inputs)
        )  # in a thread, because each beginning of the conversation is rendered separately
        all_ends = {*message_ends, *(mark.end for mark in placed_marks)}
        return Prompt(token_ids, message_ends=tuple(sorted(all_ends)), marks=placed_marks, begins_reply=begins_reply)

    async def _with_pictures(
        self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any] | None
    ) -> Prompt:
        """Add the pictures of a conversation, if it has any, to its prompt. Raises InvalidRequestError."""
        pictures = self.llm.pictures
        if pictures is None or not pictures_of(messages):
            return prompt
        owner = CALLER.get()
        with ExitStack() as fetched:
            if self.media is not None:
                await self.media.fill(pictures_of(messages), fetched)
            read = await self.crews.pictures.run(
                lambda: pictures.read(self.tokenizer.pictures(messages, template_inputs=inputs), owner)
            )
        return pictures.shown(prompt, read)

    def _check_template(self) -> None:
        """Raise ChatTemplateError if the model has no template. The library's own error names no remedy for clients."""
        if self.tokenizer.chat_template is None:
            raise ChatTemplateError(
                "the model has no chat template, so this server answers no conversations; send the whole prompt as a "
                "text to /v1/completions, or have the server started with --chat-template FILE"
            )

    async def spell(self, words: Sequence[str]) -> None:
        """Tokenize these words in a thread. The tokenizer remembers the token ids for the engine's thread."""
        await self.crews.text.run(lambda: [self.tokenizer.spellings(word) for word in words])

    async def compile_grammar(self, form: StructuredOutputsParams | str) -> Callable[[], TokenConstraint]:
        """Compile structured outputs, or a Lark grammar's text, to constraints of answers. Raises InvalidRequestError.

        The work runs in a thread, because a large schema takes a second, which is too long for the event loop.
        """

        def make() -> Callable[[], TokenConstraint]:
            grammars = self.llm.grammars
            return grammars.lark(form) if isinstance(form, str) else grammars.open(form)

        return await self.crews.grammars.run(make)

    # -------------------------------------------------------------------- run

    async def start(
        self, caller: Caller, response_id: str, prompts: Sequence[Prompt], params: SamplingParams, *, stream: bool
    ) -> AnswerStream:
        """Continue prompts. Returns as soon as the engine has queued them.

        Raises APIError: 400 if a prompt is refused, 429 if the queue is full, 503 if the engine has failed.
        """
        self.llm.check_priority(caller.priority)
        caller.tenant.check_priority(caller.priority)
        num_choices = params.n * len(prompts)
        for prompt in prompts:
            self.check_length(len(prompt.token_ids))
        self.check_room(num_choices)
        salt = self.tenants.namespace(caller.tenant, caller.cache_salt)
        if caller.is_uncached:  # under a random salt, nobody else finds its blocks, which are evicted like others
            salt = self.tenants.namespace(caller.tenant, secrets.token_hex(16))
            params = replace(params, skip_reading_prefix_cache=True)
        adapter = await self.adapter(caller.model, caller.tenant)
        jobs = []
        for number, prompt in enumerate(prompts):
            placed = replace(
                self.placed(prompt, salt, adapter),
                priority=caller.priority,
                owner=self.tenants.owner(caller.tenant),
                session=caller.session_id or prompt.session,
                marks=prompt.marks if caller.hints is None else caller.hints.on(prompt, caller.is_uncached),
            ).begun()
            record = self._record(caller, response_id, number, placed, params.n)
            record.stream = stream
            jobs.append(Job(record, placed, params))
        answer = self.thread.submit(jobs, whole=not stream)
        try:
            await answer.accepted()
        except BaseException:
            answer.close()
            raise
        if caller.hints is not None and caller.session_id is not None and caller.hints.demotes(caller.session_id):
            answer.when_ended(partial(self._close_soon, caller.tenant, caller.session_id))
        return answer

    def _record(self, caller: Caller, response_id: str, number: int, prompt: Prompt, num_choices: int) -> RequestRecord:
        """Make the record of a prompt. `number`: the prompt's index in its call."""
        keys, links, size = prompt.extra_keys, prompt.links, self.llm.layout.block_size
        record = RequestRecord(
            response_id,
            f"{response_id}-{number}",
            caller.tenant.name,
            caller.endpoint,
            prompt.token_ids,
            keys.salt,
            caller.session_id,
            caller.trace_parent,
            caller.template_digests,
            num_choices,
            adapter=None if keys.adapter_offset else keys.adapter,
            adapter_begins_inside=keys.adapter_offset > 0,
            is_uncached=caller.is_uncached,
            spans=tuple((span.offset, span.digest) for span in keys.spans),
        )
        if links is not None:
            record.link_method, record.linked_from = links.method, links.linked_from_in(size)
            record.has_gaps, record.jumps = links.has_gaps, links.jumps_before_links(size)
        return record

    def _close_soon(self, tenant: Tenant, session_id: str) -> None:
        """Close a session in the background. If no engine can be reached, log a warning, and keep its totals."""

        async def close() -> None:
            try:
                await self.close_session(tenant, session_id)
            except APIError as error:
                logger.warning("the session %.64r that a hint demotes stays open: %s", session_id, error)

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close_session(self, tenant: Tenant, session_id: str) -> int | None:
        """Close a tenant's session in every engine, and forget its totals.

        Returns the number of blocks that are now evicted first, or None if no engine knows the session.
        Raises APIError 503 if no engine can be reached.
        """
        owner = self.tenants.owner(tenant)
        num_blocks = await self.thread.change(CLOSE_SESSION, owner, session_id)
        self.records.drop_session(tenant.name, session_id)
        return num_blocks

    def fit(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps."""
        return self.llm.engine.truncate(prompt, params)

    def check_room(self, num_choices: int) -> None:
        """Raise APIError 400 for more choices than a call may ask for, or 429 if the queue has no room for them now."""
        if num_choices > self.config.max_choices:
            raise bad_request(
                f"{num_choices} choices (n, times the prompts) are more than the {self.config.max_choices} that one "
                "call may ask for (--max-choices); ask for fewer",
                param="n",
            )
        if self.thread.num_choices + num_choices > self._max_choices * max(1, self.thread.num_engines):
            wait_s = self.records.expected_wait_s(self.thread.num_choices)
            raise too_busy(f"The server's queue is full; try again in {wait_s} s.", wait_s)

    def check_length(self, num_tokens: int) -> None:
        """Raise APIError 400 if a prompt is longer than the server takes."""
        limit = self.config.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            message = f"the prompt has {num_tokens} tokens, and this server takes {limit} at most"
            raise LongPromptError(message, num_tokens, limit)

    def _extra_keys(self, prompt: npt.NDArray[np.int32], salt: str | None) -> ExtraKeys:
        if salt is None:
            return NO_EXTRA_KEYS
        return ExtraKeys(salt=salt, salt_offset=num_shared(prompt, self._shared_prefixes))

    def placed(self, prompt: Prompt, salt: str | None, adapter: Adapter | None) -> Prompt:
        """Return a prompt in the namespace of a salt. The keys for an adapter and for pictures stay."""
        extra_keys, keys = self._extra_keys(prompt.token_ids, salt), prompt.extra_keys
        extra_keys = replace(extra_keys, adapter=keys.adapter, adapter_offset=keys.adapter_offset, spans=keys.spans)
        return replace(prompt, extra_keys=extra_keys, adapter=prompt.adapter or adapter)

    def prompt_of(self, token_ids: npt.NDArray[np.int32], salt: str | None, adapter: Adapter | None = None) -> Prompt:
        """Make a prompt in the namespace of a salt, for a lookup."""
        return Prompt(token_ids, None, self._extra_keys(token_ids, salt), adapter=adapter)

    def owner_of(self, salt: str | None) -> str | None:
        """Return the name of the tenant who owns a salt's prefixes; None if no tenant seen so far does."""
        if salt is None:
            return None
        namespace = salt.partition("/")[0]
        names = self.records.tenants()
        return next((name for name in names if self.tenants.namespace_of_all(Tenant(name)) == namespace), None)


def _is_short(messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any] | None) -> bool:
    """Say whether a conversation is short enough to be rendered on the event loop."""
    if len(messages) >= MANY_MESSAGES or "tools" in (inputs or {}):
        return False
    if any("tool_calls" in message or "reasoning_content" in message for message in messages):
        return False
    return sum(len(message["content"] or "") for message in messages) < LONG_TEXT


def digests(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each template input, by name. Equal inputs have equal digests."""
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in inputs.items()}


def new_id(prefix: str) -> str:
    """Make an unguessable id for a response, such as `chatcmpl-...`."""
    return f"{prefix}{secrets.token_hex(16)}"

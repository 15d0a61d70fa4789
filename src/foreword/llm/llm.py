"""LLM: the class for use from Python."""

from __future__ import annotations

import gc
import itertools
import secrets
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from foreword.assembly import Assembled, assemble, load_grammars
from foreword.cache import ExtraKeys, LookupExplanation, NumberedEvent
from foreword.config import EngineConfig, user_path
from foreword.config.engine import EngineKeywords, signature
from foreword.engine import CacheReport, Engine, Keep, ModelLimits, Prompt, run_all
from foreword.errors import ConfigError, EngineError, InvalidRequestError
from foreword.linking import (
    METHODS,
    LinkedAnswer,
    LinkExplanation,
    Method,
    check_choice,
    compare_methods,
    explain_parts,
)
from foreword.llm.prompts import PromptInput, Prompts, priority_of
from foreword.pictures import Pictures, taken_apart
from foreword.pml.composition import Composition
from foreword.pml.layout import Bounds
from foreword.pml.library import Library
from foreword.request import LoRARequest, Reply, RequestOutput, SamplingParams, one_each
from foreword.text.conversation import ChatKeywords, pictures_of, template_inputs
from foreword.text.reply import Reasoning, ReplyReader, Text
from foreword.text.reply.turn import Turn
from foreword.text.schema_text import schema_text
from foreword.tiers.disk.manifest import manifest_facts
from foreword.tiers.prefix_file import ExportReport, ImportReport, check_shareable, check_target

if TYPE_CHECKING:
    from foreword.grammar import Grammars

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}. A content is a text, or a list of {"type": "text", "text": ...} and pictures, such as
{"type": "image", "image": "photo.jpg"}."""


class LLM:
    """A model with a prefix cache, for use from Python.

    Options are the fields of `foreword.config.ModelConfig`, `CacheConfig`, `TierConfig` and `SchedulerConfig`, and
    `seed`. Options that only vLLM has are accepted with values that change nothing. Raises ModelLoadError,
    UnsupportedModelError or ConfigError. An LLM is a context manager; `close()` frees its memory.
    """

    def __init__(self, model: str, **options: Unpack[EngineKeywords]) -> None:
        config = EngineConfig.from_options(model, **options)
        self._take(config, assemble(config))

    @classmethod
    def of(cls, config: EngineConfig, parts: Assembled) -> LLM:
        """Make an LLM of parts that the caller assembled."""
        llm = cls.__new__(cls)
        llm._take(config, parts)
        return llm

    def _take(self, config: EngineConfig, parts: Assembled) -> None:
        self.config = config
        self.tokenizer = parts.tokenizer
        self.encoded_pictures, self.pictures = parts.pictures, self._read_pictures(parts)
        """The encoder and the reader of pictures; None for models that take no pictures."""
        lacks = "takes pictures, but Pillow is missing (pip install foreword[vision], and start again)"
        self.picture_refusal = lacks if parts.lacks_pillow else "takes no images"
        """Why the model takes no pictures, for errors; used if `pictures` is None."""
        self.lacks_pillow = parts.lacks_pillow
        """Whether the model would take pictures if Pillow were installed."""
        self._prompts = Prompts(
            config.model.model,
            parts.tokenizer,
            parts.deviations,
            self.pictures,
            embeds=parts.embeds,
            refusal=self.picture_refusal,
        )
        self.embeds = parts.embeds
        """The reader of prompt embeddings; None without `enable_prompt_embeds`."""
        self.inexactness = parts.inexactness
        """Why results are not bit-exact on this machine; None if they are, or if the check is off."""
        self.cache_identity = parts.identity
        """Digests of the model and of the arithmetic that compute the cached KV. They are part of all block keys."""
        self.layout = parts.layout
        """The states that the model's layers keep, and the layout of a block of the pool."""
        self.kv_block_bytes = self.layout.bytes_per_block
        """Bytes of one block of the pool."""
        self.event_addresses = {} if parts.publisher is None else parts.publisher.addresses
        """Name of an option -> the address at which cache events are published."""
        self._default_sampling, self.pooling = parts.default_sampling, parts.pooling
        self._engine: Engine | None = parts.engine
        self._close_engine = weakref.finalize(self, parts.close)
        self.adapters = parts.adapters
        """The adapters in memory; None without `enable_lora`."""
        self._explain_attention, self._deviations = parts.explain_attention, parts.deviations
        self._request_numbers = itertools.count()
        self._grammars: Grammars | None = None

    def _read_pictures(self, parts: Assembled) -> Pictures | None:
        if parts.pictures is None or parts.tokenizer is None:
            return None
        room = parts.engine.limits.max_model_len - 1
        max_pictures = self.config.model.max_pictures
        vision = parts.pictures.vision
        if vision.written_sign is not None:
            parts.tokenizer.write_signs(vision.written_sign)
        return Pictures(vision, parts.tokenizer.encode_part, max_pictures=max_pictures, max_tokens=room)

    @property
    def dtype(self) -> str:
        """The type in which layers compute, such as "bfloat16"; the type of stored KV is `layout.kv_format`."""
        return str(self.cache_identity.facts["model"]["dtype"]).removeprefix("torch.").partition(" as ")[0]

    @property
    def engine(self) -> Engine:
        """The engine, for callers that step it themselves. Raises EngineError after `close()`."""
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    # ---------------------------------------------------------------- generate

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        link: str | Method | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, and return the outputs in the order of the prompts.

        A prompt is a text, a prompt of a schema (`pml`) or `{"prompt_token_ids": [...]}` (or `{"prompt": ...}`),
        optionally with "cache_salt", "priority" and "session_id" (`close_session`). `priority` is a list with one
        priority for each prompt. One SamplingParams serves all prompts; a list has one for each prompt. Raises
        InvalidRequestError, and runs nothing, if a prompt is invalid. With `show_progress=None` a progress bar appears
        if there are several prompts and standard error is a terminal; `use_tqdm` is vLLM's name for this option. `link`
        names the method by which documents, or modules of a schema, are reused at any position. Such answers are
        approximate, and need `allow_links=True`. A prompt's "edited_from" is the text or token ids of the earlier
        prompt from which it was made. `lora_request` is the adapter of all prompts, or a list with an adapter or None
        for each prompt; it needs `enable_lora=True`.
        """
        inputs = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        progress = show_progress if use_tqdm is None else bool(use_tqdm)
        adapters = _one_each(lora_request, len(inputs))
        parsed = [self._prompt(prompt, link, adapter) for prompt, adapter in zip(inputs, adapters, strict=True)]
        if priority is not None:
            if len(priority) != len(parsed):
                raise InvalidRequestError(f"{len(parsed)} prompts, but {len(priority)} priorities; give one each")
            priorities = map(priority_of, priority)
            parsed = [replace(plain, priority=value) for plain, value in zip(parsed, priorities, strict=True)]
        for prompt in parsed:
            self.check_priority(prompt.priority)
        return self._run(parsed, sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        link: str | Method | None = None,
        edited_from: RequestOutput | Sequence[int] | None = None,
        **rendering: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several, and return the outputs in the same order.

        `tools` are functions in OpenAI's form that the prompt describes. `outputs[0].reply` has content, reasoning and
        tool calls; `outputs[0].text` also has the markers around them. After `thinking_budget` tokens of thinking the
        model must answer. `chat_template_kwargs` are further inputs of the chat template, such as {"enable_thinking":
        False}; `chat_template` replaces the tokenizer's template. With `add_generation_prompt=False` the prompt ends
        after the last message. With `continue_final_message=True` it ends inside the last message, and the answer
        continues it. `lora_request` is as in `generate`. With `link`, a conversation that was cut or changed in the
        middle reuses the part after the change. `edited_from` is then the output for the earlier conversation, or all
        its tokens.
        """
        if isinstance(messages, str | Mapping):
            raise InvalidRequestError(
                f"messages must be a list of {{'role': ..., 'content': ...}}, not {messages!r:.60}"
            )
        if not len(messages):
            raise InvalidRequestError("there are no messages; give at least one {'role': ..., 'content': ...}")
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        plain = [self._chat_prompt(conversation, rendering) for conversation in conversations]
        if link is not None:
            if edited_from is None or len(plain) > 1:
                raise InvalidRequestError(f"link={link!r:.40} needs edited_from, and one conversation; give both")
            plain = [self.link(plain[0], self._prompts.edited(plain[0], edited_from), Method.parse(link))]
        prompts = list(map(self._under, plain, _one_each(lora_request, len(plain))))
        chats = [self._chat(prompt, rendering) for prompt in prompts]
        wishes = map(self._constrained, one_each(sampling_params or self._default_sampling, len(prompts)))
        each = [chat.limited(params) for chat, params in zip(chats, wishes, strict=True)]
        outputs = self._run(prompts, each, show_progress if use_tqdm is None else bool(use_tqdm))
        for chat, output in zip(chats, outputs, strict=True):
            chat.read(output)
        return outputs

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        dimensions: int | None = None,
        show_progress: bool | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Return the embeddings of texts, each [dimensions]: hidden states of texts' last tokens.

        `dimensions`: the number of leading dimensions to keep, for models that were trained for shorter embeddings.
        Raises InvalidRequestError for models whose embeddings are made otherwise, for example from the hidden states of
        other tokens.
        """
        self.pooling.check(dimensions, self.engine.limits.hidden_size)
        inputs = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        parsed = [self._prompt(prompt) for prompt in inputs]
        outputs = self._run(parsed, SamplingParams.for_embedding(), show_progress)
        return [self.pooling.embedding(output.hidden_state, dimensions) for output in outputs]

    def certificate(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return digests of the weights, model, arithmetic and logits from which answers with `certify` were computed.

        `logits` has a digest for each continuation of each output, in order; `adapter` is the digest of the outputs'
        LoRA adapter, or None. Raises InvalidRequestError for outputs of several adapters.
        """
        identity, adapters = self.cache_identity, {output.adapter_digest for output in outputs} - {None}
        if len(adapters) > 1:
            raise InvalidRequestError("these outputs are of several adapters; ask for one certificate for each adapter")
        return {
            "arithmetic_id": identity.arithmetic_id,
            "model_id": identity.model_id,
            "weights": identity.facts["model"]["weights"],
            "exact": identity.exact,
            "adapter": next(iter(adapters), None),
            "logits": [output.logits_digest(choice.index) for output in outputs for choice in output.outputs],
        }

    def add_request(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        link: str | Method | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Queue one prompt; `engine.step()` runs it together with other requests, and fills the returned output."""
        params = self._constrained(sampling_params or self._default_sampling)
        return self.engine.add_request(self._next_id(), self._prompt(prompt, link, lora_request), params)

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        link: str | Method | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and yield its output after every step that brings tokens.

        The output is always the same object, which grows. A step brings one token, or several if the engine drafted.
        Leaving the loop early aborts the request.
        """
        return self._stream(self._prompt(prompt, link, lora_request), sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **rendering: Unpack[ChatKeywords],
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding its output as `stream` does, with a `reply` that grows."""
        prompt = self._under(self._chat_prompt(messages, rendering), lora_request)
        chat = self._chat(prompt, rendering)
        return map(
            chat.read, self._stream(prompt, chat.limited(self._constrained(sampling_params or self._default_sampling)))
        )

    def compare_links(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        methods: Sequence[str] = METHODS,
    ) -> list[LinkedAnswer]:
        """Answer one prompt of documents or modules by several methods, and by the method `all`.

        The answer of `all` is exact if positions have no gaps. Each method finds the sources cached and nothing else of
        the prompt, so that times can be compared. A time starts when the text is read. It includes the choice of the
        linked tokens, but not the computation of the sources. Without `sampling_params` answers are greedy and have at
        most 64 tokens. Raises InvalidRequestError for unknown methods, a prompt without parts, or a model without
        `allow_links`.
        """
        params = self._constrained(sampling_params or SamplingParams(max_tokens=64, temperature=0.0))
        params = replace(params, seed=0) if params.seed is None else params

        def answer(method: Method) -> tuple[RequestOutput, float]:
            keys = ExtraKeys(salt=secrets.token_hex(16))  # so no method finds what another has cached
            linked, composition = self._prompts.read_parts(prompt, method)
            self.engine.check("compare", linked, params)  # before its sources are computed
            for source in composition.sources:
                self._compute(Prompt(np.array(source.token_ids, np.int32), extra_keys=keys))
            started = time.monotonic()
            linked, _ = self._prompts.read_parts(prompt, method)  # read again: the choice of tokens may take long
            [output] = self._run([replace(linked, extra_keys=keys)], params, show_progress=False)
            first = output.metrics.first_token_time
            return output, 1e3 * ((first or time.monotonic()) - started)

        return compare_methods(methods, answer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters for calls without `sampling_params`, from the checkpoint's generation_config.json.

        The option `generation_config` names another file, or none. SamplingParams that a caller gives do not take these
        defaults.
        """
        return self._default_sampling

    def get_tokenizer(self) -> Any:
        """Return the model's `transformers.PreTrainedTokenizerBase`. Raises InvalidRequestError if it has none."""
        return self._prompts.tokenizer_for("get_tokenizer()").hf_tokenizer

    def _stream(self, prompt: Prompt, params: SamplingParams | None) -> Iterator[RequestOutput]:
        engine = self.engine
        output = engine.add_request(self._next_id(), prompt, self._constrained(params or self._default_sampling))
        last = (0, False)
        try:
            # Other code may step the engine while this generator is suspended, so compare with what was yielded last.
            while not last[1]:
                progress = (sum(len(completion.token_ids) for completion in output.outputs), output.finished)
                if progress != last:
                    last = progress
                    yield output
                else:
                    engine.step()
        finally:
            engine.abort_request(output.request_id)

    @property
    def num_grammar_bytes(self) -> int:
        """The estimated bytes of kept compiled grammars."""
        return 0 if self._grammars is None else self._grammars.kept.num_bytes

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequestError for a priority that the scheduling policy ignores."""
        policy = self.config.scheduler.scheduling_policy
        if priority and policy == "fcfs":
            raise InvalidRequestError(
                f"priority={priority} has no effect under scheduling_policy={policy!r}; leave it out, or choose the "
                "policy 'priority' or 'prefix'"
            )

    @property
    def grammars(self) -> Grammars:
        """Makes constraints on answers. Raises InvalidRequestError if the model cannot have constraints."""
        if self._grammars is None:
            self._grammars = load_grammars(self.tokenizer, self.engine.limits)
        return self._grammars

    def _constrained(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a constraint in place of `structured_outputs`."""
        wish = params.structured_outputs
        if wish is None:
            return params
        return replace(params, structured_outputs=None, open_constraint=self.grammars.open(wish))

    def _next_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool | None,
    ) -> list[RequestOutput]:
        each = one_each(params, len(prompts))
        if show_progress is None:
            show_progress = len(prompts) > 1 and sys.stderr.isatty()
        wishes = [self._constrained(params) for params in each]
        return run_all(self.engine, prompts, wishes, self.layout.block_size, self._next_id, show_progress=show_progress)

    def _chat(self, prompt: Prompt, rendering: ChatKeywords) -> Chat:
        turn = Turn(self._prompts.tokenizer_for("chat()"), prompt.token_ids)
        return Chat(turn, self.engine.limits, rendering.get("tools") or (), rendering.get("thinking_budget"))

    def _chat_prompt(self, messages: Sequence[Message], rendering: ChatKeywords) -> Prompt:
        tokenizer = self._prompts.tokenizer_for("chat()")
        template, inputs = rendering.get("chat_template"), template_inputs(rendering)
        if self.pictures is not None or self.lacks_pillow:
            messages = taken_apart(messages)
        if self.pictures is None and pictures_of(messages):
            raise InvalidRequestError(f"model {self.config.model.model!r} {self.picture_refusal}; send text alone")
        continues = rendering.get("continue_final_message", False)
        token_ids = tokenizer.render_chat(
            messages,
            add_generation_prompt=rendering.get("add_generation_prompt"),
            continue_final_message=continues,
            template_inputs=inputs,
            chat_template=template,
        )
        if self.engine.state_interval is None:
            prompt = Prompt(token_ids, begins_reply=not continues)
            if self.pictures is None:
                return prompt
            files = tokenizer.pictures(messages, template_inputs=inputs, chat_template=template)
            return self.pictures.shown(prompt, self.pictures.read(files))
        ends = tokenizer.message_ends(messages, token_ids, template_inputs=inputs, chat_template=template)
        return Prompt(token_ids, message_ends=ends, begins_reply=not continues)

    def read_prompt(self, prompt: PromptInput) -> Prompt:
        """Turn a user's prompt into a prompt for the engine. Any thread may call it. Raises InvalidRequestError."""
        return self._prompts.read(prompt)

    def _prompt(
        self, prompt: PromptInput, link: str | Method | None = None, lora_request: LoRARequest | None = None
    ) -> Prompt:
        return self._under(self._prompts.read(prompt, link), lora_request)

    def _under(self, prompt: Prompt, lora_request: LoRARequest | None) -> Prompt:
        """Return the prompt with its adapter loaded. Raises InvalidRequestError if the adapter cannot be loaded."""
        if lora_request is None:
            return prompt
        if self.adapters is None:
            raise InvalidRequestError(
                f"lora_request={lora_request.lora_name!r:.80} needs an LLM with enable_lora=True; open it with that"
            )
        return replace(prompt, adapter=self.adapters.get(lora_request.lora_path))

    def link(self, prompt: Prompt, composition: Composition, method: Method) -> Prompt:
        """Return `prompt` with the KV of its parts linked, as `method` chooses. Any thread may call this. Raises
        InvalidRequestError.
        """
        return self._prompts.link(prompt, composition, method)

    def check_choice(self, method: Method) -> None:
        """Raise InvalidRequestError for a method that chooses tokens by layers that this process does not have."""
        check_choice(method, self._deviations)

    @property
    def pml(self) -> Library:
        """Schemas of prompt modules for this model: `llm.pml.load("trip.pml").prompt({"plan": {}}, text="Where?")`.

        Raises InvalidRequestError if the model has no tokenizer.
        """
        bounds = Bounds(self.engine.limits.max_model_len - 1)
        text = schema_text(self._prompts.tokenizer_for("a schema"))
        return Library(text, self._keep, bounds, self.layout.block_size)

    def _keep(self, token_ids: Sequence[int], ttl_s: float, salt: str | None) -> int:
        return self.pin_prefix({"prompt_token_ids": token_ids, "cache_salt": salt}, ttl_s=ttl_s)

    # ------------------------------------------------------------------- cache

    def get_prefix_cache_stats(self) -> CacheReport:
        """Counters since the start or the last `reset_prefix_cache()`."""
        engine = self.engine
        to_the_token = self.config.cache.prefix_index == "radix" and self.layout.is_one_full_group
        granularity = 1 if to_the_token else self.layout.hit_granularity
        return CacheReport.of(engine.snapshot(), hit_granularity=granularity, state_interval=engine.state_interval)

    def close_session(self, session_id: str) -> int | None:
        """End a session: its blocks that no prompt outside the session used are evicted before all others.

        Until their eviction, prompts find these blocks. Returns the number of such blocks in memory; None if the
        session is unknown.
        """
        return self.engine.close_session(None, session_id)

    def explain_attention(self) -> str:
        """Return a text for people: how much less KV was read because attention read shared KV once for several
        requests, and the estimated saving of time.
        """
        return self._explain_attention()

    def explain(self, prompt: PromptInput, *, lora_request: LoRARequest | None = None) -> LookupExplanation:
        """Look a prompt up without running it: which part the cache holds now, and why not more.

        Raises InvalidRequestError for an impossible prompt, ConfigError without `explain_misses` or caching.
        """
        if not self.engine.snapshot().has_ledger:
            raise ConfigError("the cache has no ledger; leave explain_misses and prefix caching on")
        return self.engine.explain(self._prompt(prompt, lora_request=lora_request))

    def explain_links(self, prompt: PromptInput, link: str | Method) -> LinkExplanation:
        """Say how much of each part a method would link now, and which sources are not cached. Runs nothing.

        Raises InvalidRequestError for an impossible prompt, or a prompt without parts.
        """
        linked, composition = self._prompts.read_parts(prompt, method := Method.parse(link))
        return explain_parts(composition, method, self.engine.explain_links(linked), self.layout.block_size)

    def take_cache_events(self) -> list[NumberedEvent]:
        """Return the cache's events since the last call. Raises ConfigError without `cache_events`."""
        return self.engine.take_cache_events()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests run."""
        self.engine.reset_prefix_cache()

    def pin_prefix(self, prompt: PromptInput, *, ttl_s: float = 300.0, lora_request: LoRARequest | None = None) -> int:
        """Keep a prompt cached for `ttl_s` seconds; compute it first if necessary. Returns the number of kept tokens.

        A pin keeps only whole blocks; all pins together keep at most `max_pinned_share` of the memory. Pins are soft:
        when running requests need all blocks, pinned ones are evicted last. A longer pin replaces a shorter one.
        Raises InvalidRequestError for an impossible prompt or time, ConfigError if caching or pins are off.
        """
        if not self.config.cache.enable_prefix_caching or not self.config.cache.max_pinned_share:
            raise ConfigError(
                f"nothing can be pinned with enable_prefix_caching={self.config.cache.enable_prefix_caching} and "
                f"max_pinned_share={self.config.cache.max_pinned_share}; open the LLM with other options"
            )
        checked, keep = self._prompt(prompt, lora_request=lora_request), Keep(ttl_s)
        self._compute(checked)
        return self.engine.entries.pin(checked, keep).num_kept_tokens

    def unpin_prefix(self, prompt: PromptInput, *, lora_request: LoRARequest | None = None) -> None:
        """End this prompt's pin. Its blocks are then evicted like all others, unless another pin keeps them too."""
        self.engine.entries.unpin(self._prompt(prompt, lora_request=lora_request))

    def export_prefix(
        self,
        prompt: PromptInput,
        path: str | Path,
        *,
        with_text: bool = False,
        overwrite: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> ExportReport:
        """Write a prompt's cached blocks to a file for another cache of this model. Missing blocks are computed first.

        The file has whole blocks only, and neither text nor token ids. `with_text` adds the token ids and the salt, so
        that an LLM without `cache_dir` can import the file. Even without token ids, somebody who has the model may
        learn the text from the KV. Raises InvalidRequestError for an impossible prompt, ConfigError for a path that
        cannot be written.
        """
        check_shareable(self.config.cache)
        target, checked = user_path(path), self._prompt(prompt, lora_request=lora_request)
        check_target(target, overwrite=overwrite)
        least, length = self.layout.hit_granularity, len(checked.token_ids)
        if length < least:
            raise InvalidRequestError(
                f"the prompt has {length} tokens, and a file holds whole blocks of {least}; give a longer prompt"
            )
        self._compute(checked)
        facts = manifest_facts(self.cache_identity, self.config.model.model, self.layout.block_size)
        return self.engine.export_prefix(checked, target, facts, with_text=with_text, overwrite=overwrite)

    def import_prefixes(self, path: str | Path) -> ImportReport:
        """Take the blocks of a file that `export_prefix` wrote. The file must be undamaged, and have this model and
        arithmetic.

        With `cache_dir` or `cache_store` the blocks go there, and the next request loads them. Otherwise they go into
        memory, and then the file must have token ids (`with_text`). A refused file changes nothing, and
        `rejected` says why. Raises ConfigError for a path that cannot be read, or if there is no place for the blocks.
        """
        check_shareable(self.config.cache)
        return self.engine.import_prefixes(Path(path), self.cache_identity, self.config.model.model)

    def _compute(self, prompt: Prompt) -> None:
        """Compute a prompt unless its whole blocks are cached."""
        length = len(prompt.token_ids)
        if self.engine.num_cached_tokens(prompt) < min(length - 1, length - length % self.layout.block_size):
            self._run([prompt], SamplingParams(max_tokens=1, temperature=0.0), show_progress=False)

    # ------------------------------------------------------------------- close

    def close(self) -> None:
        """Abort the running requests and free the memory; may be called twice. Afterwards nothing else works.

        With tiers, `close` first stores blocks that are not stored yet, for at most 5 seconds. The program's exit does
        the same.
        """
        self._close_engine()
        self._engine = self._deviations = self.adapters = None
        self._prompts = Prompts(self.config.model.model, self.tokenizer)
        gc.collect()  # engine and runner refer to each other: without this call, a GPU's memory stays taken

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_each(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of `count` prompts. Raises InvalidRequestError for a list of another length."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if len(lora_request) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(lora_request)} lora_requests; give one each, or None")
    return lora_request


class Chat:
    """Reads the n answers to one conversation."""

    def __init__(
        self, turn: Turn, limits: ModelLimits, tools: Sequence[Mapping[str, Any]], thinking_budget: int | None
    ) -> None:
        self._turn, self._limits, self._tools, self._budget = turn, limits, tools, thinking_budget
        self._readers: dict[int, ReplyReader | None] = {}
        self._num_read: dict[int, int] = {}
        """Index of an answer -> the number of its characters that were given to its reader."""

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a limit on thinking. Raises InvalidRequestError for an impossible budget."""
        limit = self._turn.limit(
            params.open_constraint,
            budget=self._budget,
            vocab_size=self._limits.vocab_size,
            end_token_ids=self._limits.eos_token_ids,
        )
        return replace(params, open_constraint=limit, keep_markers=True)

    def read(self, output: RequestOutput) -> RequestOutput:
        """Bring the replies of an output up to date; returns the output."""
        for completion in output.outputs:
            index, text = completion.index, completion.text
            if index not in self._readers:
                self._readers[index] = self._turn.reader(tools=self._tools, reads_calls=bool(self._tools))
                completion.reply = Reply()
            reader, reply = self._readers[index], completion.reply
            assert reply is not None
            new, self._num_read[index] = text[self._num_read.get(index, 0) :], len(text)
            if reader is None:
                reply.content += new
                continue
            for part in (*reader.push(new), *(reader.finish() if completion.finished else ())):
                if isinstance(part, Text):
                    reply.content += part.text
                elif isinstance(part, Reasoning):
                    reply.reasoning += part.text
                else:
                    reply.tool_calls.append(part)
        return output


LLM.__signature__ = signature()  # type: ignore[attr-defined]

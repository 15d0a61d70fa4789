"""Intake: checks prompts and turns them into requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foreword.cache import KeyedSpan, KVCacheManager, TokenSequence, jump_span, linked_span
from foreword.engine.prompt import BlockKeys, ModelLimits, Prompt, TextTools
from foreword.errors import InvalidRequestError, PromptTooLongError, RequestTooLargeError
from foreword.request import Alone, LinkedRun, Links, Request, SamplingParams, TokenLimits

logger = logging.getLogger(__name__)


class Intake:
    """Makes the requests of a prompt, or raises an error that says why the prompt can never be served."""

    def __init__(
        self,
        manager: KVCacheManager,
        limits: ModelLimits,
        text: TextTools | None,
        keys: BlockKeys,
        *,
        max_step_tokens: int,
        seed: int,
    ) -> None:
        """`max_step_tokens`: the most tokens that a step computes."""
        self._manager, self._limits, self._text, self._keys = manager, limits, text, keys
        self._max_step_tokens, self._seed, self._num_added = max_step_tokens, seed, 0
        self._has_warned = False

    def requests(self, request_id: str, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Make a request for each continuation of a prompt; they share its blocks. Raises InvalidRequestError."""
        max_tokens = self.check(prompt, params)
        self._note_cut(prompt, params, max_tokens)
        links = self._links(prompt)
        sources = () if links is None else self._sources(links, prompt)
        [drawn] = self.next_seeds(1)
        self._num_added += 1
        seed = params.seed if params.seed is not None else drawn
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or params.open_constraint is not None:  # a grammar's end always ends the answer
            stop_ids |= self._limits.eos_token_ids
        limits = TokenLimits.of(
            params,
            self._limits.vocab_size,
            stop_ids,
            end_token_ids=self._limits.eos_token_ids,
            bad_words=self._spellings(params.bad_words),
        )
        requests = [
            Request(
                self.sequence(own_id, prompt, sources),
                params,
                max_tokens=max_tokens,
                stop_token_ids=stop_ids,
                seed=seed + index,
                priority=prompt.priority,
                message_ends=prompt.message_ends,
                limits=limits,
            )
            for index, own_id in enumerate(continuation_ids(request_id, params.n))
        ]
        alone = Alone()
        for index, request in enumerate(requests):
            request.tenant, request.is_fork = prompt.owner, index > 0
            request.sequence.session = None if prompt.session is None else (prompt.owner, prompt.session)
            if params.prompt_logprobs is not None:
                request.sequence.most_hit_tokens = params.first_reported
            request.take(links, sources, prompt.adapter, prompt.pictures, prompt.embeds, alone)
        return requests

    def _note_cut(self, prompt: Prompt, params: SamplingParams, room: int) -> None:
        """Log that answers get fewer tokens than asked for. Only the first time, this is a warning."""
        if params.max_tokens is None or params.max_tokens <= room:
            return
        level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
        logger.log(
            level,
            "max_tokens=%d is more than the %d that max_model_len=%d leaves after a prompt of %d tokens: the answer "
            "ends there with finish_reason 'length' (said once; ask for fewer, or shorten the prompt)",
            params.max_tokens,
            room,
            self._limits.max_model_len,
            len(prompt.token_ids),
        )

    def next_seeds(self, count: int) -> list[int]:
        return [self._seed + 0x9E3779B9 * (self._num_added + number + 1) for number in range(count)]

    def resume(self, requests: Sequence[Request], answered: Sequence[Sequence[int]]) -> None:
        """Let requests go on from tokens that were generated elsewhere. Raises InvalidRequestError."""
        if len(answered) != len(requests):
            raise InvalidRequestError(f"there are {len(answered)} answers to resume, for n={len(requests)}")
        params = requests[0].params
        if params.seed is None and params.temperature > 0:
            raise InvalidRequestError("only an answer with a seed can be resumed; give a seed, or temperature=0")
        for request, token_ids in zip(requests, answered, strict=True):
            wrong = [token_id for token_id in token_ids if not 0 <= token_id < self._limits.vocab_size]
            if wrong or len(token_ids) > request.max_tokens:
                what = f"token id {wrong[0]}" if wrong else f"{len(token_ids)} tokens"
                raise InvalidRequestError(
                    f"an answer of {what} cannot be resumed; ids are 0 to {self._limits.vocab_size - 1}, and at most "
                    f"{request.max_tokens} tokens may come"
                )
            request.sequence.extend(token_ids)
            request.num_answered_tokens = len(token_ids)

    def _spellings(self, words: Sequence[str]) -> list[Sequence[int]]:
        """The token ids of words: a list for each way in which the tokenizer spells a word.

        Raises InvalidRequestError.
        """
        if not words:
            return []
        if self._text is None or self._text.spell is None:
            raise InvalidRequestError(
                f"bad_words={words!r:.60} need a tokenizer, and this model has none; leave them out"
            )
        token_lists: list[Sequence[int]] = []
        for word in words:
            spellings = self._text.spell(word)
            if not all(spellings) or not spellings:
                raise InvalidRequestError(
                    f"the bad word {word!r:.60} has no tokens in this model's vocabulary; leave it out"
                )
            token_lists += spellings
        return token_lists

    def truncate(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        num_kept = params.truncate_prompt_tokens
        if num_kept is None or prompt.links is not None:  # `check` refuses it with links
            return prompt
        if num_kept == -1:
            num_kept = max(1, self._limits.max_model_len - (params.max_tokens or 1))
        num_dropped = max(0, len(prompt.token_ids) - num_kept)
        if not num_dropped:
            return prompt
        if prompt.pictures or prompt.embeds is not None:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens} would cut a prompt with pictures or "
                "embeddings; leave it out"
            )
        ends = tuple(end - num_dropped for end in prompt.message_ends if end > num_dropped)
        marks = tuple(replace(mark, end=mark.end - num_dropped) for mark in prompt.marks if mark.end > num_dropped)
        return replace(prompt, token_ids=prompt.token_ids[num_dropped:], text=None, message_ends=ends, marks=marks)

    def sequence(
        self, request_id: str, prompt: Prompt, sources: tuple[TokenSequence, ...] | None = None
    ) -> TokenSequence:
        """Make the sequence of a prompt: tokens and block keys. `sources`: its links' sources; None: make them."""
        links, keys = self._links(prompt), prompt.begun().extra_keys
        if links is not None:
            sources = self._sources(links, prompt) if sources is None else sources
            keys = replace(keys, spans=self._spans(links, sources, prompt))
        return TokenSequence(
            request_id,
            prompt.token_ids,
            block_size=self._manager.block_size,
            extra_keys=keys,
            hash_fn=self._keys.hash_fn,
            root=self._keys.root,
            linked_from=None if links is None else links.linked_from,
        )

    def runs(self, prompt: Prompt) -> list[tuple[LinkedRun, TokenSequence]]:
        """The runs of a linked prompt that are copied, each with its source."""
        links = self._links(prompt)
        return [] if links is None else list(zip(links.runs, self._sources(links, prompt), strict=True))

    def _links(self, prompt: Prompt) -> Links | None:
        """The parts of a prompt's links that can be copied, which are whole blocks of sources; None without links."""
        return None if prompt.links is None else prompt.links.in_whole_blocks(self._manager.block_size)

    def _sources(self, links: Links, prompt: Prompt) -> tuple[TokenSequence, ...]:
        """For each run, the sequence from which it is copied; equal sequences are one object."""
        by_tokens: dict[bytes, TokenSequence] = {}
        by_array: dict[int, TokenSequence] = {}
        for tokens in links.sources:
            key = tokens.tobytes()
            if key not in by_tokens:
                # A source's keys have the salt from its first token, so no part of a source is shared by all tenants.
                source = Prompt(tokens, extra_keys=replace(prompt.extra_keys, salt_offset=0, spans=()))
                by_tokens[key] = self.sequence("", source)
            by_array[id(tokens)] = by_tokens[key]
        return tuple(by_array[id(run.source)] for run in links.runs)

    def _spans(self, links: Links, sources: Sequence[TokenSequence], prompt: Prompt) -> tuple[KeyedSpan, ...]:
        """The spans that go into block keys: the prompt's own spans, its linked tokens, and its jumps of position."""
        size, spans = self._manager.block_size, [*prompt.extra_keys.spans]
        for run, source in zip(links.runs, sources, strict=True):
            key = source.block_hashes()[(run.source_end - 1) // size]
            position = int(links.positions[run.begin])
            spans.append(linked_span(key, run.first, run.end - run.begin, index=run.begin, position=position))
        for at in links.jumps():
            spans.append(jump_span(int(prompt.token_ids[at]), index=at, position=int(links.positions[at])))
        return tuple(sorted(spans, key=lambda span: span.offset))

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Return the most tokens to generate within all limits. Raises InvalidRequestError."""
        length = len(prompt.token_ids)
        if length == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        self._check_vocabulary(prompt.token_ids, "prompt")
        self._check_pictures(prompt)
        self._check_reports(params, length)
        if prompt.embeds is not None and (params.prompt_logprobs is not None or prompt.adapter is not None):
            what = "adapter" if params.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequestError(f"a prompt with embeddings takes no {what}, which needs all tokens; leave it out")
        for name in (
            *("logit_bias", "stop_token_ids", "logprob_token_ids", "label_token_ids", "allowed_token_ids"),
            "prediction_token_ids",
        ):
            token_ids = getattr(params, name) or (0,)
            for token_id in (min(token_ids), max(token_ids)):
                if not 0 <= token_id < self._limits.vocab_size:
                    raise InvalidRequestError(
                        f"token id {token_id} in {name} is out of range; the model's ids are 0 to "
                        f"{self._limits.vocab_size - 1}"
                    )
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs are for LLM and the server; give the engine an open_constraint"
            )
        if params.stop and self._text is None:
            raise InvalidRequestError(
                f"stop={params.stop!r} needs a tokenizer, and this model has none; use stop_token_ids"
            )
        self._check_links(prompt, params)
        reached = length if prompt.links is None else max(length, int(prompt.links.positions[-1]) + 1)
        room = self._limits.max_model_len - reached
        if room < 1:
            longer = self._limits.longer_by
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but max_model_len={self._limits.max_model_len} must hold prompt and "
                f"answer; shorten the prompt{'' if longer is None else f' or {longer}'}",
                length,
                self._limits.max_model_len - 1,
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that max_model_len="
                f"{self._limits.max_model_len} leaves after a prompt of {length}; lower min_tokens"
            )
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        # The last token that is generated is never computed, so its KV needs no room.
        num_tokens = length + max_tokens - 1
        self._check_room_for_sources(prompt, num_tokens)
        if not self._manager.can_ever_hold(num_tokens, self._max_step_tokens):
            raise RequestTooLargeError(
                f"the request needs {self._manager.max_num_blocks(num_tokens, self._max_step_tokens)} blocks of "
                f"{' or '.join(sorted({str(group.block_size) for group in self._manager.groups}))} tokens for {length} "
                f"prompt tokens and {max_tokens} generated, but the pool has {self._manager.num_blocks}; lower "
                "max_tokens or give the cache more memory (kv_cache_memory_bytes)"
            )
        return max_tokens

    def _check_vocabulary(self, token_ids: npt.NDArray[np.int32], where: str) -> None:
        wrong = np.flatnonzero((token_ids < 0) | (token_ids >= self._limits.vocab_size))
        if wrong.size:
            raise InvalidRequestError(
                f"{where} token {token_ids[wrong[0]]} at position {wrong[0]} is out of range; "
                f"the model's ids are 0 to {self._limits.vocab_size - 1}"
            )

    def _check_pictures(self, prompt: Prompt) -> None:
        """Raise InvalidRequestError for picture tokens without their pictures, such as tokens of an earlier prompt."""
        sign = self._limits.picture_token_id
        if sign is None:
            return
        num_signs = int((prompt.token_ids == sign).sum())
        num_rows = sum(len(picture.places) for picture in prompt.pictures)
        if num_signs != num_rows:
            raise InvalidRequestError(
                f"the prompt has {num_signs} tokens that stand for pictures, but its pictures fill {num_rows}; send "
                "the pictures of these tokens"
            )

    def _check_reports(self, params: SamplingParams, length: int) -> None:
        if params.embeds and self._limits.hidden_size is None:
            raise InvalidRequestError(
                "embeds=True needs a decoder of a written family on a CPU, and this model is none: it gives no hidden "
                "states; leave it out, or choose another model"
            )
        if params.score_from >= length and params.prompt_logprobs is not None:
            raise InvalidRequestError(
                f"score_from={params.score_from} is beyond the prompt, whose {length} tokens have positions 0 to "
                f"{length - 1}; use one of them"
            )

    def _check_links(self, prompt: Prompt, params: SamplingParams) -> None:
        links = prompt.links
        if links is None:
            return
        if not self._limits.allows_links:
            raise InvalidRequestError("this engine links nothing; load the model with allow_links=True")
        assert len(links.positions) == len(prompt.token_ids)
        unable = {
            "prompt_logprobs": params.prompt_logprobs is not None,
            "certificate": params.certify,
            "truncate_prompt_tokens": params.truncate_prompt_tokens is not None,
            "marks of what to keep": bool(prompt.marks),
            "embeddings": bool(prompt.extra_keys.embeddings_hash) or prompt.embeds is not None,
            "adapter": prompt.adapter is not None,
            "pictures that turn by row and column": any(picture.grid is not None for picture in prompt.pictures),
            "pictures whose tokens see each other": any(picture.sees_ahead for picture in prompt.pictures),
            "adapter that begins inside it": bool(prompt.extra_keys.adapter and prompt.extra_keys.adapter_offset),
        }
        for what, is_given in unable.items():
            if is_given:
                raise InvalidRequestError(f"a linked prompt takes no {what}; leave them out, or link nothing")
        for span in prompt.extra_keys.spans:
            run = next((run for run in links.runs if run.begin < span.end and span.offset < run.end), None)
            if run is not None or any(span.offset <= at < span.end for at in links.jumps()):
                raise InvalidRequestError(
                    f"the {span.kind} span at positions {span.offset} to {span.end} (exclusive) touches tokens that a "
                    "link copies or moves; link the documents before and after it"
                )
        for tokens in links.sources:
            self._check_vocabulary(tokens, "source")
        lengths = [len(tokens) for tokens in links.sources]
        last, limit = int(links.positions[-1]), self._limits.max_model_len - 1
        if max([last + 1, *lengths]) > limit:
            raise PromptTooLongError(
                f"a linked prompt reaches position {last}, its longest source has {max(lengths, default=0)} tokens, "
                f"but max_model_len={limit + 1} must hold each, and an answer; shorten its parts",
                max([last + 1, *lengths]),
                limit,
            )

    def _check_room_for_sources(self, prompt: Prompt, num_tokens: int) -> None:
        """Raise RequestTooLargeError if the pool cannot hold a request and all its sources at the same time."""
        links, size = self._links(prompt), self._manager.block_size
        sources = {} if links is None else {tokens.tobytes(): len(tokens) for tokens in links.sources}
        if not sources:
            return
        needed = -(-num_tokens // size) + sum(-(-length // size) for length in sources.values())
        usable = self._manager.num_blocks - len(self._manager.sink_block_ids())
        if needed > usable:
            raise RequestTooLargeError(
                f"the request and its {len(sources)} sources need {needed} blocks of {size} tokens, but the pool has "
                f"{usable}; link fewer parts, or give the cache more memory (kv_cache_memory_bytes)"
            )


def continuation_ids(request_id: str, n: int) -> list[str]:
    """The scheduler's ids for a prompt's continuations."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]

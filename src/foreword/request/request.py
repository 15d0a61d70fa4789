"""The objects that travel through the engine: a request, its sampling, and its output."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache import CacheEntry, LoadFailure, LookupExplanation, TokenSequence
from foreword.errors import InvalidRequestError
from foreword.request.links import LinkReport, Links
from foreword.request.sampling_params import BoolArray, ForkingConstraint, TokenLimits
from foreword.request.sampling_params import SamplingParams as SamplingParams
from foreword.request.sampling_params import TokenConstraint as TokenConstraint

FinishReason = Literal["stop", "length", "abort", "content_filter"]
"""`content_filter`: the answer ended because its request allowed no token at all."""
NOTHING_ALLOWED = (
    "no token was allowed here: the grammar asks for what bad_words, allowed_token_ids or logit_bias forbid, or it "
    "gave up"
)
"""Why an answer ended with `content_filter`."""
NO_ROW = -1
NO_REPORT = np.iinfo(np.int64).max
"""Stands in place of a position if the request reports no log probabilities of prompt tokens."""
FACTS = np.dtype(
    [
        ("num_prompt_tokens", np.int64),
        ("max_length", np.int64),  # tokens of prompt and answer together, after all limits
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("changes_logits", np.bool_),  # whether tokens may be sampled from changed logits
        ("samples_by_tokens", np.bool_),  # whether sampling itself depends on earlier tokens
        ("may_run_dry", np.bool_),
        ("is_adapted", np.bool_),  # whether an adapter computes some of its tokens
        ("has_pictures", np.bool_),  # whether rows of pictures replace some of its tokens
        ("has_embeds", np.bool_),  # whether it begins with embeddings in place of tokens
        ("sees_ahead", np.bool_),  # whether some of its tokens see later tokens
        ("has_gaps", np.bool_),  # whether the rotary positions of its tokens differ from their indices
        ("reports", np.bool_),  # whether it reports log probabilities of sampled tokens
        ("has_labels", np.bool_),  # whether its answer is one token, chosen among given labels
        ("embeds", np.bool_),  # whether it gives the hidden state of the prompt's last token
        ("reports_prompt_from", np.int64),  # first position whose logits give a reported prompt token, or NO_REPORT
    ],
    align=True,
)
"""Constant facts of a request as a record, so that a step reads the facts of all requests in one operation."""
FactRows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request asks for, with vLLM's fields. The keys of cached KV depend on the adapter's content,
    not on its name.
    """

    lora_name: str
    """The adapter's name on a server; only people read it."""
    lora_int_id: int = 0
    """Not used here; vLLM distinguishes adapters by this number."""
    lora_path: str = ""
    """Folder that PEFT's `save_pretrained` wrote."""
    load_inplace: bool = False
    """Not used here: a folder whose files have changed is read again in any case."""


class Adapter(Protocol):
    """A loaded adapter. A request keeps the adapter alive until the request ends."""

    @property
    def digest(self) -> str:
        """A digest of the adapter's content. It is part of block keys."""

    def begin_in(self, token_ids: npt.NDArray[np.int32]) -> int | None:
        """Return the index of the first prompt token that the adapter computes; None if it computes no token."""


class Alone:
    """Replaces the salt of a prompt that skips the cache, so that only its own answers share its encoded pictures."""


class Picture(Protocol):
    """A picture that was read and checked. A request keeps the picture alive until the request ends."""

    @property
    def digest(self) -> str:
        """A digest of the picture's pixels, its size and how it is prepared. The digest is part of block keys."""

    @property
    def shape(self) -> Any:
        """How the picture is cut for the encoder. The type depends on the model's architecture."""

    def pixels(self) -> npt.NDArray[np.uint8]:
        """Decode the pixels, [height, width, 3], anew at each call, so that waiting pictures take no memory."""


class Embeds(Protocol):
    """Rows that replace the embeddings of a prompt's first tokens. A request keeps the rows alive until the request
    ends.
    """

    def __len__(self) -> int:
        """The number of rows."""


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a prompt."""

    picture: Picture
    places: npt.NDArray[np.int32]
    """[rows]: the index of the token that each row of its encoding replaces, ascending."""
    grid: tuple[int, int] | None = None
    """The picture's rows and columns, which decide its tokens' positions (`turned_positions`); None: positions as in
    text."""
    sees_ahead: bool = False
    """Whether the picture's tokens all see each other. If so, no step ends inside the picture (`whole_end`)."""

    @property
    def offset(self) -> int:
        """The index of the picture's first token."""
        return int(self.places[0])

    @property
    def num_tokens(self) -> int:
        """The number of tokens from the picture's first token to its last."""
        return int(self.places[-1]) + 1 - self.offset


def whole_end(pictures: Sequence[PlacedPicture], start: int, end: int, limit: int) -> int:
    """Return where a step from `start` ends: `end`, unless that is within a picture whose tokens see each other.

    Inside such a picture, the step ends before the picture instead. A step that starts in the picture ends after it, or
    at `start` if the picture ends beyond `limit`.
    """
    for placed in pictures:
        after = placed.offset + placed.num_tokens
        if placed.sees_ahead and placed.offset < end < after:
            if placed.offset > start:
                return placed.offset
            return after if after <= limit else start
    return end


def turned_positions(pictures: Sequence[PlacedPicture], start: int, end: int) -> npt.NDArray[np.int32]:
    """Return the rotary positions of tokens `start` to `end` (exclusive): time, row and column, [3, tokens].

    All tokens of a picture have the same time coordinate. The picture takes as many positions as its longer side has
    rows or columns (mrope, arXiv 2409.12191).
    """
    places = np.arange(start, end, dtype=np.int32)
    turned, shift = np.tile(places, (3, 1)), 0
    for placed in pictures:
        if placed.grid is None:
            continue
        first, after = placed.offset + shift, placed.offset + placed.num_tokens
        inside = slice(*np.searchsorted(places, (placed.offset, after)))
        rows, columns = np.divmod(places[inside] - placed.offset, placed.grid[1])
        turned[:, inside] = first
        turned[1:, inside] += rows, columns
        shift += max(placed.grid) - placed.num_tokens
        turned[:, inside.stop :] = places[inside.stop :] + shift
    return turned


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model wrote."""

    name: str
    arguments: str
    """JSON text; only its beginning if the call is not complete."""
    is_complete: bool = True
    """Whether the model wrote the call to its end."""
    id: str | None = None
    """The id that the model gave the call; None for models whose calls have no id."""


@dataclass(slots=True)
class Reply:
    """The parts of one continuation of a conversation; they grow with its text."""

    content: str = ""
    """Text for the reader of the answer."""
    reasoning: str = ""
    """The model's thinking before its answer."""
    tool_calls: list[ToolCall] = field(default_factory=list)


class DistinctTokens:
    """The distinct tokens of one sequence, to which tokens are appended."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._num_read = 0

    def of(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the distinct tokens, ascending. `token_ids` must begin with the tokens of the previous call."""
        if len(token_ids) > self._num_read:
            new = np.unique(token_ids[self._num_read :]).astype(np.int64)
            places = self._ids.searchsorted(new)
            is_new = np.append(self._ids, -1)[places] != new  # -1 stands beyond the end, and is no token
            self._ids = np.insert(self._ids, places[is_new], new[is_new])
            self._num_read = len(token_ids)
        return self._ids


def named_record(dtype: np.dtype[np.void], **values: Any) -> tuple[Any, ...]:
    """Return a record of `dtype` from named values for all its fields, as a tuple that an array of records takes."""
    names = dtype.names or ()
    assert len(values) == len(names), f"the fields are {names}, not {[*values]}"
    return tuple(map(values.__getitem__, names))


class RequestStatus(enum.Enum):
    """The stage of a request's life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token, and its rank among all tokens (1: the most likely; 0: not ranked)."""

    logprob: float
    rank: int


class TokenLogprobs(dict[int, Logprob]):
    """Token id -> Logprob, for one position."""

    logits_digest: bytes | None = None
    """SHA-256 of the logits that the log probabilities were computed from; None unless `SamplingParams.certify`."""


@dataclass(slots=True)
class RequestMetrics:
    """When a request reached each stage, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Milliseconds from arrival to the first generated token."""
        return None if self.first_token_time is None else 1e3 * (self.first_token_time - self.arrival_time)


@dataclass(slots=True)
class Loaded:
    """The tokens that tiers gave to a waiting request, and the tokens that were offered to tiers."""

    may_ask: bool = True
    """Whether tiers are asked for the part of the request's prefix that the pool lacks."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """For each load: the tier's name, and the begin and end of the tokens by which the hit grew."""
    no_room_at: int = -1
    """The number of loads that had ended when this request's load last found no room; -1: it always found room."""
    failure: LoadFailure | None = None
    """Why the last wait for a tier failed; None if it did not."""
    num_offered_tokens: int = 0
    """The number of leading tokens that the request found cached or that were offered to tiers."""

    def tokens_by_tier(self, num_cached_tokens: int) -> dict[str, int]:
        """Count a hit's tokens by the tier that gave them; `memory` gave the rest. Zeros are left out."""
        counts, at = {"memory": num_cached_tokens}, num_cached_tokens
        for name, start, end in reversed(self.spans):  # tokens that were evicted and loaded again count once
            num_tokens = max(0, min(end, at) - start)
            counts["memory"] -= num_tokens
            counts[name] = counts.get(name, 0) + num_tokens
            at = min(at, start)
        return {name: num_tokens for name, num_tokens in counts.items() if num_tokens}


@dataclass(slots=True)
class DraftCounts:
    """How many drafted tokens became part of the answer, and how many did not."""

    accepted: dict[str, int] = field(default_factory=dict)
    """The number of drafted tokens in the answer, by the source of the draft; without zeros."""
    rejected: dict[str, int] = field(default_factory=dict)
    """The number of drafted tokens that are not in the answer, by the source of the draft; without zeros."""

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted.values())

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    def by_source(self) -> dict[str, int]:
        """Return the number of all drafted tokens, by the source of the draft."""
        sources = {**self.accepted, **self.rejected}
        return {source: self.accepted.get(source, 0) + self.rejected.get(source, 0) for source in sources}

    def count(self, source: str, num_accepted: int, num_rejected: int) -> None:
        for counts, number in ((self.accepted, num_accepted), (self.rejected, num_rejected)):
            if number:
                counts[source] = counts.get(source, 0) + number


@dataclass(slots=True)
class _LookAhead:
    """What may follow each draft of an answer: masks of allowed tokens, and the lengths after which the answer must
    end.
    """

    dry_at: set[int] = field(default_factory=set)
    """The lengths of the answer, drafts included, after which no token was allowed. The drafts may be wrong."""
    masks: dict[int, BoolArray] = field(default_factory=dict)
    """Length of the answer, drafts included -> mask of the next token, for drafts that `cut_drafts` let pass."""
    num_known: int = 0
    """The length of the answer, without drafts, when `masks` were made."""


class Request:
    """One continuation of one prompt. The scheduler updates the request's progress, and the engine reads it."""

    links: Links | None = None
    """Tokens that are copied from other sequences, and rotary positions; None for a plain prompt."""
    sources: tuple[TokenSequence, ...] = ()
    """For each run of the links, the sequence that the run is copied from."""
    num_copied_tokens = 0
    """The number of linked tokens copied since the last admission."""
    adapter: Adapter | None = None
    """The adapter that computes the request's tokens from the keys' `adapter_offset` on; None: the model alone computes
    them."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures whose rows replace tokens of the prompt, in their order."""
    rows_salt: str | Alone | None = None
    """The salt under which the encoded rows of the request's pictures are kept; None: no salt."""
    embeds: Embeds | None = None
    """Embeddings in place of the request's first tokens, whose ids are 0; None: all tokens have the model's
    embeddings."""
    num_answered_tokens = 0
    """The number of generated tokens that another engine generated; they are computed like a prompt here."""
    tenant: str | None = None
    """The tenant who sent the request; None if unknown."""
    hidden_state: npt.NDArray[np.float32] | None = None
    """The hidden state of the prompt's last token, [width]; None unless the parameters have `embeds`."""
    _distinct: DistinctTokens | None = None

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
        limits: TokenLimits | None = None,
    ) -> None:
        self.request_id = sequence.request_id
        self.sequence = sequence
        """Prompt and generated tokens."""
        self._answer: list[int] = []
        self.num_prompt_tokens = len(sequence)
        self.params = params
        self.max_tokens = max_tokens
        """Most tokens to generate, after all limits."""
        self.stop_token_ids = stop_token_ids
        """Tokens that end this request: its own stop tokens and, unless ignored, the model's end tokens."""
        self.constraint = None if params.open_constraint is None else params.open_constraint()
        self.limits = limits
        """Limits on the allowed tokens, in addition to the constraint; None: no limits."""
        self.may_run_dry = self.constraint is not None or (limits is not None and bool(limits.bad_words))
        """Whether a step may come in which no token is allowed, or only tokens that end the answer."""
        self._ahead = _LookAhead()
        self.drafts = DraftCounts()
        self.seed = seed
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        samples_by_tokens = bool(penalised) or self.may_run_dry
        self.facts = named_record(
            FACTS,
            num_prompt_tokens=self.num_prompt_tokens,
            max_length=self.num_prompt_tokens + max_tokens,
            temperature=params.temperature,
            top_k=min(params.top_k, 2**31),
            min_p=params.min_p,
            top_p=params.top_p,
            seed=int(seed) & (2**64 - 1),
            changes_logits=bool(samples_by_tokens or params.logit_bias or params.min_tokens or limits is not None),
            samples_by_tokens=samples_by_tokens,
            may_run_dry=self.may_run_dry,
            is_adapted=False,
            has_pictures=False,
            has_embeds=False,
            sees_ahead=False,
            has_gaps=False,
            reports=params.reports_answer,
            has_labels=bool(params.label_token_ids),
            embeds=params.embeds,
            reports_prompt_from=NO_REPORT if params.prompt_logprobs is None else params.first_reported,
        )
        """A record of FACTS, as a tuple."""
        self.priority = priority
        self.is_fork = False
        """Whether the request is for the second or a later answer to its prompt."""
        self.message_ends = message_ends
        """Prompt positions at which messages end. Later prompts may be equal up to such a position."""
        self.state_positions: list[int] = []
        """Positions, ascending, at which recurrent states are saved in addition to regular intervals."""
        self.service_key = (0, 0)
        """The request's sort key in the queues: rank, then arrival number. The request with the lowest key is served
        first."""
        self.row = NO_ROW
        """The row of the arrays that the request uses while it runs; the cache's manager gives it. NO_ROW: the request
        does not run."""
        self.loads = Loaded()
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The stop token id or stop string that ended the request; None if it ended for another reason."""
        self.num_scheduled_tokens = 0
        """The number of the request's tokens that are computed once the planned step ends; set only if layers are
        recurrent."""
        self.num_cached_tokens = 0
        """The number of prompt tokens that were hit at the first admission."""
        self.cached_tokens_by_tier: dict[str, int] = {}
        """The number of cached prompt tokens by the place that they came from; see `RequestOutput`."""
        self.explanation: LookupExplanation | None = None
        """Result of the lookup at its first admission; None if the cache keeps no ledger."""
        self.num_preemptions = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the tokens after position `params.first_reported`
        self.metrics = RequestMetrics(time.monotonic())

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def running_key(self) -> tuple[int, int]:
        """The request's sort key among running requests. A tenant's priority does not count against other tenants."""
        rank, number = self.service_key
        return (rank if self.tenant is None else 0), number

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the sequence's generated tokens, updated at each access. Changes to it change no block key."""
        self._answer += self.sequence.generated_from(len(self._answer))
        return self._answer

    def distinct_tokens(self) -> npt.NDArray[np.int64]:
        """Return the distinct tokens of prompt and answer, ascending."""
        if self._distinct is None:
            self._distinct = DistinctTokens()
        return self._distinct.of(self.sequence.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence) - self.num_prompt_tokens

    @property
    def has_run_dry(self) -> bool:
        """Whether the request's last token was sampled although no token was allowed. The answer then ends with this
        token.
        """
        return self.num_output_tokens - 1 in self._ahead.dry_at

    def cut_drafts(self, drafts: Sequence[int], vocab_size: int) -> int:
        """Count the leading drafts that may come next, and keep the masks for these drafts until the next call.

        The count ends before a token that ends the answer, because no token could follow.
        """
        self._ahead.masks.clear()
        end = next((at for at, token_id in enumerate(drafts) if token_id in self.stop_token_ids), len(drafts))
        if (self.constraint is None and self.limits is None) or not end:
            return end
        constraint = self.constraint.fork() if isinstance(self.constraint, ForkingConstraint) else None
        if constraint is None and self.constraint is not None:
            return 0  # it cannot look ahead
        answer, masks = self.sequence.generated_from(0), {}
        num_known = len(answer)
        for at, token_id in enumerate(drafts[:end]):
            mask = self._mask(constraint, answer, num_known + at, vocab_size)
            if mask is None or not mask[token_id]:
                end = at
                break
            masks[num_known + at] = mask
            answer.append(token_id)
        if end:  # the mask after the last draft is needed too
            last = self._mask(constraint, answer[: num_known + end], num_known + end, vocab_size)
            masks[num_known + end] = self._dry_mask(num_known + end, vocab_size) if last is None else last
            self._ahead.masks, self._ahead.num_known = masks, num_known
        return end

    def allowed_tokens(self, num_generated: int, vocab_size: int) -> BoolArray | None:
        """Return the mask over the vocabulary for the token after `num_generated` tokens; None: any token may come.

        The mask respects `min_tokens`, except if only end tokens are allowed. If no token is allowed, the request has
        run dry, and the returned mask allows only the tokens that end answers.
        """
        if self.constraint is None and self.limits is None:
            return None
        if self._ahead.num_known != self.num_output_tokens:
            self._ahead.masks.clear()  # these drafts were never checked
        ahead = self._ahead.masks.pop(num_generated, None)
        if ahead is not None:
            return ahead
        mask = self._mask(self.constraint, self.output_token_ids, num_generated, vocab_size)
        return self._dry_mask(num_generated, vocab_size) if mask is None else mask

    def _limits(self, vocab_size: int) -> TokenLimits:
        return self.limits if self.limits is not None else TokenLimits(vocab_size, self.stop_token_ids)

    def _mask(
        self, constraint: TokenConstraint | None, answer: Sequence[int], num_generated: int, vocab_size: int
    ) -> BoolArray | None:
        """Return the mask after an answer, [vocab]; None if no token is allowed. `constraint` reads the new tokens."""
        self._ahead.dry_at.discard(num_generated)
        allowed = None if constraint is None else constraint.allowed(answer)
        needs_more = num_generated < self.params.min_tokens
        return self._limits(vocab_size).narrow(allowed, answer, needs_more=needs_more)

    def _dry_mask(self, num_generated: int, vocab_size: int) -> BoolArray:
        """Record that no token is allowed, and return a mask that allows only the tokens that end answers."""
        self._ahead.dry_at.add(num_generated)
        return self._limits(vocab_size).only_end()

    def note_admission(self, num_hit_tokens: int, num_shared_tokens: int, lookup: LookupExplanation | None) -> None:
        """Record the first admission: hit tokens, tokens in shared blocks, and the lookup's result."""
        self.metrics.first_scheduled_time = time.monotonic()
        self.loads.num_offered_tokens = num_shared_tokens
        linked_from = self.sequence.linked_from  # tokens from here on are approximate, and no hit
        self.num_cached_tokens = min(num_hit_tokens, self.num_prompt_tokens if linked_from is None else linked_from)
        self.cached_tokens_by_tier = self.loads.tokens_by_tier(self.num_cached_tokens)
        if lookup is not None and linked_from is not None:
            lookup = replace(lookup, num_hit_tokens=self.num_cached_tokens)
        self.explanation = lookup
        if lookup is not None and (self.loads.spans or self.loads.failure):
            loaded = {name: count for name, count in self.cached_tokens_by_tier.items() if name != "memory"}
            failure = None if lookup.reason is None else self.loads.failure
            self.explanation = replace(lookup, loaded_tokens=loaded, load_failure=failure)

    def take(
        self,
        links: Links | None,
        sources: tuple[TokenSequence, ...],
        adapter: Adapter | None,
        pictures: tuple[PlacedPicture, ...],
        embeds: Embeds | None,
        alone: Alone,
    ) -> None:
        """Take the prompt's inputs other than tokens. Call this before the request is queued.

        `alone` replaces the salt of pictures if the request skips the cache; all answers to one prompt share it.
        """
        self.links, self.sources, self.adapter, self.pictures, self.embeds = links, sources, adapter, pictures, embeds
        self.rows_salt = alone if self.skips_cache else self.sequence.extra_keys.salt
        facts = {
            "is_adapted": adapter is not None,
            "has_pictures": bool(pictures),
            "has_embeds": embeds is not None,
            "sees_ahead": any(placed.sees_ahead for placed in pictures),
            "has_gaps": (links is not None and links.has_gaps) or any(placed.grid is not None for placed in pictures),
        }
        self.facts = named_record(FACTS, **dict(zip(FACTS.names or (), self.facts, strict=True)) | facts)

    def link_report(self) -> LinkReport | None:
        """Count the tokens of the prompt that were linked, computed or cached; None for a plain prompt."""
        links = self.links
        if links is None:
            return None
        recomputed = links.num_recomputed(self.num_cached_tokens)
        computed = self.num_prompt_tokens - links.num_linked_tokens - recomputed - self.num_cached_tokens
        return LinkReport(
            links.method,
            len(links.spans),
            linked_tokens=links.num_linked_tokens,
            recomputed_tokens=recomputed,
            computed_tokens=computed,
            cached_tokens=self.num_cached_tokens,
            copied_tokens=self.num_copied_tokens,
            has_gaps=links.has_gaps,
        )

    def note_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log probabilities of a step from position `start` on; a resumed request may repeat positions."""
        first = self.params.first_reported
        self.prompt_logprobs[max(start, first) - first :] = logprobs
        end = first + len(self.prompt_logprobs)  # a resumed request need not repeat the positions before `end`
        self.sequence.most_hit_tokens = None if end == self.num_prompt_tokens - 1 else end

    @property
    def skips_cache(self) -> bool:
        return not self.params.reads_cache


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt; grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The tokens so far. New tokens are appended to this list. A caller's changes to the list affect nothing else. When
    the request ends, the list is set to the whole answer again."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Counts the drafted tokens that became part of the answer, and those that did not."""
    reply: Reply | None = None
    """Content, reasoning and tool calls; None unless it is an answer of `LLM.chat`."""

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
    """The number of prompt tokens that the first continuation found in the cache."""
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Maps `memory` or a tier's name to the number of cached prompt tokens that came from there; without zeros."""
    explanation: LookupExplanation | None = None
    """Result of the first continuation's lookup: how much was found, and why the rest was not."""
    kept: tuple[CacheEntry, ...] = ()
    """The cache entries for the prompt's marks, in the order of the marks, as they were when the prompt was
    computed."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    hidden_state: npt.NDArray[np.float32] | None = None
    """The state of the prompt's last token, [width], after the last norm; None unless `SamplingParams.embeds`."""
    link: LinkReport | None = None
    """Counts of linked and computed tokens; None for a plain prompt."""
    num_picture_tokens: int = 0
    """The number of prompt tokens that rows of pictures replace."""
    adapter_digest: str | None = None
    """The digest of the LoRA adapter that computes some of the tokens; None: the model alone computes them."""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def logits_digest(self, index: int = 0) -> str:
        """Return one SHA-256, in hexadecimal digits, over the digests of all logits that a continuation reports.

        The digests for reported prompt tokens come first, then the answer's digests. Raises InvalidRequestError unless
        the parameters have `certify`.
        """
        reports = [entry for entry in (*(self.prompt_logprobs or ()), *(self.outputs[index].logprobs or ())) if entry]
        digests = [entry.logits_digest for entry in reports if entry.logits_digest is not None]
        if not digests or len(digests) < len(reports):
            raise InvalidRequestError("this output has no digests of logits; ask for them with certify=True")
        return hashlib.sha256(b"".join(digests)).hexdigest()

"""The inputs of an engine: prompts and, for all prompts together, the model's limits, the block keys and the text
tools.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foreword.cache import NO_EXTRA_KEYS, PIN, BlockHash, ExtraKeys, HashFunction, chain_root, sha256
from foreword.engine.outputs import OpenTextStream
from foreword.errors import InvalidRequestError
from foreword.request import Adapter, Embeds, Links, PlacedPicture


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits that a model sets for requests."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    longer_by: str | None = "raise max_model_len"
    """Advice in error messages: how to raise `max_model_len`. None: the model has no more positions."""
    allows_links: bool = False
    """Whether KV can be moved to other positions, so that prompts may have links."""
    hidden_size: int | None = None
    """Width of the hidden states that prompts may ask for; None: the model gives none."""
    picture_token_id: int | None = None
    """The token id that stands for a picture's row in a prompt; None: the model takes no pictures."""

    def without_pictures(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Replace the token that stands for pictures by a neighbouring id, in tokens that were drawn at random."""
        sign = -1 if self.picture_token_id is None else self.picture_token_id
        return np.where(token_ids == sign, np.int32(sign - 1 if sign else 1), token_ids)


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The hash function of block keys, and the root of the chain that the keys form."""

    hash_fn: HashFunction = sha256
    root: BlockHash = field(default_factory=chain_root)
    """Stands for the model; `chain_root` makes it."""

    def digest(self) -> str:
        """A digest that is equal for all caches with the same keys, in hexadecimal digits."""
        return hashlib.sha256(self.hash_fn.name.encode() + b"\n" + self.root).hexdigest()


@dataclass(frozen=True, slots=True)
class TextTools:
    """The functions of a tokenizer that an engine uses."""

    open_stream: OpenTextStream
    """Opens the stream that turns an answer's tokens into text."""
    spell: Callable[[str], Sequence[Sequence[int]]] | None = None
    """Returns the token ids of a word: a list for each way in which the tokenizer spells the word."""


BREAKPOINT, RESOURCE = "breakpoint", "resource"
"""Sources of cache entries, like PIN. BREAKPOINT: marks in requests. RESOURCE: prefixes that a client names through an
API."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a prefix is to be kept, and under which source and name."""

    ttl_s: float
    """The number of seconds to keep the prefix, counted from when it is computed or used again."""
    source: str = PIN
    """Who asked to keep the prefix. Each source has its own entries, which end independently."""
    name: str | None = None
    """The entry's name; None: a name that is made from the prefix, the owner and the source."""
    until: float | None = None
    """A fixed end, by the engine's clock, instead of `ttl_s`. Use does not move it. None: `ttl_s` counts."""
    is_refreshed: bool = True
    """Whether `ttl_s` begins again with each request that hits all whole blocks of the prefix."""

    def __post_init__(self) -> None:
        ttl_s = self.ttl_s
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0.0 < ttl_s < math.inf:
            raise InvalidRequestError(f"ttl_s={ttl_s!r} is not a time; use a positive, finite number of seconds")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a prompt: the prefix before it is to be kept."""

    end: int
    """The number of tokens before the mark; only whole blocks before it are kept."""
    keep: Keep


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: the tokens to continue, and what decides their block keys and their place in the queue."""

    token_ids: npt.NDArray[np.int32]
    text: str | None = None
    """The text that the tokens came from, if any; outputs repeat it."""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    """Adapter, salt and media. They separate the cached blocks of this prompt from those of other prompts."""
    priority: int = 0
    """The prompt with the lowest number goes first under the policies "priority" and "prefix"."""
    message_ends: tuple[int, ...] = ()
    """Positions at which the messages of a conversation end, if known."""
    marks: tuple[Mark, ...] = ()
    """Marks, each of which becomes an entry of the cache once the prompt is computed."""
    begins_reply: bool = False
    """Whether the answer is a text of its own, as in a chat, so that decoders may drop the space before its first word.
    Otherwise the answer continues the prompt's text."""
    links: Links | None = None
    """The tokens whose KV is copied from other sequences, and all positions; None: all tokens are computed in order."""
    adapter: Adapter | None = None
    """The adapter that changes the model from a position that the adapter finds in the prompt; None: no adapter."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures whose rows replace tokens, in order. Each picture is also a span of `extra_keys`."""
    embeds: Embeds | None = None
    """Embeddings in place of the first tokens; None: the prompt has none. These tokens have the id 0 and lie in spans
    of `extra_keys`, which hold the digests of the embeddings."""
    owner: str | None = None
    """The tenant. The prompt's cache entries use the tenant's budget, and its request is served when the tenant has its
    turn. None: the shared budget."""
    session: str | None = None
    """The owner's session to which the request belongs; None: it belongs to no session."""

    def prefix(self, num_tokens: int) -> Prompt:
        """A prompt of the first `num_tokens` tokens and, if they end inside a picture, of the rest of the picture's
        tokens. No link may replace any of these tokens.
        """
        spans = tuple(span for span in self.extra_keys.spans if span.offset < num_tokens)
        end = max([num_tokens, *(span.end for span in spans)])
        pictures = tuple(placed for placed in self.pictures if placed.offset < end)
        keys = replace(self.extra_keys, spans=spans)
        return replace(self, token_ids=self.token_ids[:end], extra_keys=keys, pictures=pictures, links=None)

    def begun(self) -> Prompt:
        """The prompt with keys that say where its adapter begins, so that a later cut does not change the position."""
        if self.adapter is None or self.extra_keys.adapter is not None:
            return self
        begin = self.adapter.begin_in(self.token_ids)
        if begin is None:
            return replace(self, adapter=None)
        return replace(self, extra_keys=replace(self.extra_keys, adapter=self.adapter.digest, adapter_offset=begin))

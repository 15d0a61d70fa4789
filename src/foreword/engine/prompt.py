"""An engine's inputs: prompts and, once for all prompts, its model's limits, its keys and its text tools."""

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
    """The advice that makes `max_model_len` longer; None: the model has no more positions."""
    allows_links: bool = False
    """Whether KV can be moved to other positions, so that prompts may have links."""
    hidden_size: int | None = None
    """Width of the hidden states that prompts may ask for; None: the model gives none."""
    picture_token_id: int | None = None
    """The token that rows of pictures replace; None: the model takes no pictures."""

    def without_pictures(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return drawn tokens, with a neighbouring id in place of the token that stands for pictures."""
        sign = -1 if self.picture_token_id is None else self.picture_token_id
        return np.where(token_ids == sign, np.int32(sign - 1 if sign else 1), token_ids)


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The hash function of blocks' keys, and the chain's root."""

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
    """Token ids of a word, in each way that the tokenizer writes it."""


BREAKPOINT, RESOURCE = "breakpoint", "resource"
"""Sources of entries besides PIN: marks in requests, and prefixes that are resources of an API."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a prefix is to be kept, and under which source and name."""

    ttl_s: float
    """Seconds from the moment at which it is computed, or is used again."""
    source: str = PIN
    """Who asked; entries of different sources live and end apart."""
    name: str | None = None
    """The entry's name; None: the same prefix of the same owner and source is the same entry."""
    until: float | None = None
    """The end on the engine's clock, in place of `ttl_s`, which use does not move; None: `ttl_s` counts."""
    is_refreshed: bool = True
    """Whether a request that begins with the whole prefix keeps it for `ttl_s` from then on."""

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
    """A prompt: tokens to continue, and their place in cache and queue."""

    token_ids: npt.NDArray[np.int32]
    text: str | None = None
    """The text that the tokens came from, if any; outputs repeat it."""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    """Adapter, salt and media that keep its cached blocks apart from others."""
    priority: int = 0
    """Lower goes first under the policies "priority" and "prefix"."""
    message_ends: tuple[int, ...] = ()
    """Positions at which the messages of a conversation end, if known."""
    marks: tuple[Mark, ...] = ()
    """Marks, each of which becomes an entry of the cache once the prompt is computed."""
    begins_reply: bool = False
    """Whether the answer's text begins here, as in a chat, so that decoders may drop the space before its first word.
    Otherwise it continues the prompt's text."""
    links: Links | None = None
    """Tokens that are copied from other sequences, and positions; None: all tokens are computed, in their places."""
    adapter: Adapter | None = None
    """The adapter that computes its tokens, from a place that it finds in the prompt; None: only the model computes."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures whose rows replace tokens, in their order; each is a span of `extra_keys` too."""
    embeds: Embeds | None = None
    """Rows in place of its first tokens, which are 0 and lie in spans of `extra_keys`; None: it has no such rows."""
    owner: str | None = None
    """The owner whose budget the entries use, and whose turn the request takes; None: only the shared budget."""
    session: str | None = None
    """The owner's session to which the request belongs; None: it belongs to no session."""

    def prefix(self, num_tokens: int) -> Prompt:
        """The first `num_tokens` tokens, which no link replaces, and the rest of a picture in which they end."""
        spans = tuple(span for span in self.extra_keys.spans if span.offset < num_tokens)
        end = max([num_tokens, *(span.end for span in spans)])
        pictures = tuple(placed for placed in self.pictures if placed.offset < end)
        keys = replace(self.extra_keys, spans=spans)
        return replace(self, token_ids=self.token_ids[:end], extra_keys=keys, pictures=pictures, links=None)

    def begun(self) -> Prompt:
        """This prompt with keys that say where its adapter begins, however it is cut afterwards."""
        if self.adapter is None or self.extra_keys.adapter is not None:
            return self
        begin = self.adapter.begin_in(self.token_ids)
        if begin is None:
            return replace(self, adapter=None)
        return replace(self, extra_keys=replace(self.extra_keys, adapter=self.adapter.digest, adapter_offset=begin))

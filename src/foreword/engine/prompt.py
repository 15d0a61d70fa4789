"""What callers hand to an engine: prompts, and once, its model's limits, its keys and its text.

Knows token ids and names of settings; knows nothing of how requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreword.cache import NO_EXTRA_KEYS, BlockHash, ExtraKeys, HashFunction, chain_root, sha256
from foreword.engine.outputs import OpenTextStream


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
class TextTools:
    """What an engine asks of a tokenizer."""

    open_stream: OpenTextStream
    """Opens the stream that turns an answer's tokens into text."""
    spell: Callable[[str], Sequence[Sequence[int]]] | None = None
    """Token ids of a word, in each way that the tokenizer writes it."""


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

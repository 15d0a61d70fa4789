"""A model without its weights. A server uses it to check requests, and to make their keys, for engines elsewhere.

Has all parts of an engine that need no weights, and cannot compute a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from foreword.assembly import Assembled, block_keys, load_tokenizer, make_manager, text_tools
from foreword.batch import Batch
from foreword.config import EngineConfig
from foreword.engine import Engine, ModelLimits
from foreword.errors import EngineError
from foreword.llm import LLM
from foreword.model.checkpoint.generation import recommended_sampling
from foreword.model.checkpoint.gguf.unfold import unfolded
from foreword.model.checkpoint.pooling import Pooling
from foreword.model.layout import CacheLayout
from foreword.model.spec import DecoderSpec
from foreword.tiers.identity import CacheIdentity

if TYPE_CHECKING:
    from foreword.model.adapters.loaded import AdapterNames


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts that a front must know about its engines. They are the same for all engines."""

    layout: CacheLayout
    identity: CacheIdentity
    limits: ModelLimits
    num_blocks: int
    """Blocks of one engine's pool."""
    inexactness: str | None
    """Why this machine cannot promise equal bits; None: it can."""
    pictures: Any = None
    """The object that cuts and names pictures, without weights; None: the model takes no pictures."""
    lacks_pillow: bool = False
    """Whether the model would take pictures if Pillow were installed."""
    embeds: Any = None
    """The object that reads prompt embeddings; None: prompts have no embeddings."""
    decoder: DecoderSpec | None = None
    """The model's shape, which adapters must fit; None: requests may not name adapters."""

    @classmethod
    def of(cls, llm: LLM) -> EngineFacts:
        engine, encoded = llm.engine, llm.encoded_pictures
        pictures = None if encoded is None else encoded.without_weights()
        decoder = None if llm.adapters is None else llm.adapters.spec
        about = llm.layout, llm.cache_identity, engine.limits, engine.snapshot().num_blocks, llm.inexactness
        return cls(*about, pictures, llm.lacks_pillow, llm.embeds, decoder)


def open_front(config: EngineConfig, facts: EngineFacts) -> LLM:
    """Make an LLM that checks requests as the engines do, but computes nothing. Raises ModelLoadError."""
    files = unfolded(config.model)
    tokenizer = load_tokenizer(files)
    keys = block_keys(config, facts.identity)
    engine = Engine(
        make_manager(config, facts.layout, facts.num_blocks, None),
        config.scheduler,
        _NoRunner(),
        facts.limits,
        text=None if tokenizer is None else text_tools(tokenizer, facts.limits.eos_token_ids),
        keys=keys,
        seed=config.seed,
    )
    parts = Assembled(
        engine,
        tokenizer,
        facts.layout,
        facts.identity,
        None,
        facts.inexactness,
        lambda: "the replicas attend",
        recommended_sampling(files),
        pooling=Pooling.of(files),
        pictures=facts.pictures,
        lacks_pillow=facts.lacks_pillow,
        embeds=facts.embeds,
        adapters=_adapters(config, facts),
    )
    return LLM.of(config, parts)


def _adapters(config: EngineConfig, facts: EngineFacts) -> AdapterNames | None:
    if facts.decoder is None:
        return None
    from foreword.model.adapters.loaded import AdapterNames  # compiles kernels, which most fronts do not need

    return AdapterNames(facts.decoder, config.model.max_lora_rank)


class _NoRunner:
    def execute(self, batch: Batch) -> NoReturn:
        raise EngineError("this process computes nothing; its replicas do")

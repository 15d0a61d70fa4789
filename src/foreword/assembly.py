"""Assembly: builds an engine from a configuration. It has no other logic than checks that sizes fit."""

from __future__ import annotations

import bisect
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.cache import (
    CacheLedger,
    EventLog,
    KVCacheManager,
    MissReason,
    PinnedPolicy,
    chain_root,
    make_hash_function,
    make_index,
    make_policy,
)
from foreword.config import (
    EngineConfig,
    Environment,
    EventsConfig,
    ModelConfig,
    SchedulerConfig,
    TierConfig,
    UserFile,
    let_threads_rest,
    user_cache_folder,
    user_path,
)
from foreword.engine import BlockKeys, Engine, ModelLimits, OtherIdentity, TextTools, TierDirector
from foreword.engine.keeper import EntryFile
from foreword.errors import ConfigError, InvalidRequestError, ModelLoadError
from foreword.model.checkpoint.generation import recommended_sampling
from foreword.model.checkpoint.gguf.unfold import unfolded
from foreword.model.checkpoint.hub import refuse_wrong_path
from foreword.model.checkpoint.pooling import Pooling
from foreword.model.checkpoint.weights_digest import WeightsDigest
from foreword.model.cpu.head_start import head_start
from foreword.model.loading_log import LoadingLog
from foreword.request import SamplingParams
from foreword.text import TextStream, Tokenizer
from foreword.tiers.admission import Admission
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.manifest import identity_in, manifest_facts
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.host.host_tier import HostTier
from foreword.tiers.identity import CacheIdentity
from foreword.tiers.store.state import StoreOptions
from foreword.tiers.store.valkey_tier import ValkeyTier
from foreword.tiers.tier import Tier

if TYPE_CHECKING:
    from foreword.events.publisher import Publisher
    from foreword.grammar import Grammars
    from foreword.model.adapters.loaded import AdapterNames, LoadedAdapters
    from foreword.model.deviation import LinkDeviations
    from foreword.model.embeds import EmbedsReader
    from foreword.model.gpu.runner import RunnerLimits
    from foreword.model.layout import CacheLayout
    from foreword.model.loader import LoadedModel
    from foreword.model.runner import ModelRunner
    from foreword.model.storage import BlockBytes, KVStorage
    from foreword.model.vision.encoded import EncodedPictures

logger = logging.getLogger(__name__)

let_threads_rest()

MOST_OTHERS = 4
"""The most other identities whose blocks an explanation looks for. Each identity adds 0.2 ms to a miss."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model that is ready to serve."""

    engine: Engine
    tokenizer: Tokenizer | None
    layout: CacheLayout
    identity: CacheIdentity
    """The model and the arithmetic whose KV the cache holds."""
    publisher: Publisher | None
    """Publishes the cache's events; None if the options ask for no events."""
    inexactness: str | None
    """Why results are not bit-exact on this machine; None if they are, or if the check is off."""
    explain_attention: Callable[[], str]
    default_sampling: SamplingParams
    """Default sampling parameters of requests."""
    pooling: Pooling
    """Turns the hidden state of a text's last token into an embedding."""
    deviations: LinkDeviations | None = None
    """Finds the linked tokens that deviate; None if nothing may be linked."""
    keep_times: Callable[[], None] = lambda: None
    """Writes the durations of steps that this engine measured to a file, for the next process that runs this model."""
    adapters: LoadedAdapters | AdapterNames | None = None
    """Reads and keeps adapters; None if requests may not name adapters."""
    pictures: EncodedPictures | None = None
    """Encodes pictures; None: the model takes no pictures."""
    lacks_pillow: bool = False
    """Whether the model would take pictures if Pillow were installed."""
    embeds: EmbedsReader | None = None
    """Reads prompt embeddings; None: prompts may not have embeddings."""

    def close(self) -> None:
        """Close the engine, then publish its last events."""
        self.engine.close()
        self.keep_times()
        if self.publisher is not None:
            self.publisher.close()


def _begin_with_kept_times(engine: Engine, identity: CacheIdentity) -> Callable[[], None]:
    """Give the engine the step durations that the last process kept for this model.

    Returns a function that keeps the new durations, in a file in the user's cache folder. An engine that times no steps
    keeps no durations.
    """
    from foreword.model.identity import name_of_speed

    times = engine.step_times
    if times is None:
        return lambda: None
    name, file = name_of_speed(identity.fingerprint), UserFile(user_cache_folder() / "foreword" / "step_times.json")
    times.begin_with(file.read().get(name))

    def keep() -> None:
        if learnt := times.learnt():
            file.keep({name: learnt})

    return keep


def assemble(config: EngineConfig) -> Assembled:
    """Load a model and its tokenizer, check the model, and build an engine around it.

    Raises ModelLoadError, UnsupportedModelError, or ConfigError for options that do not fit together.
    """
    files = unfolded(config.model)
    refuse_wrong_path(files.model)
    with ExitStack() as undo, LoadingLog(config.model.model) as log, WeightsDigest(files) as weights:
        sampling = recommended_sampling(files)
        tiers = open_tiers(config)  # first: a folder that cannot be used is reported before minutes of loading
        for tier in tiers:
            undo.callback(tier.close, 0.0)
        publisher = _open_publisher(config.events)
        if publisher is not None:
            undo.callback(publisher.close)
        with head_start(files):
            log.enter("reading the tokenizer")
            tokenizer = load_tokenizer(files)
            log.enter("reading the weights; the first start on a machine also compiles kernels")
            model = load(files)
        adapters = model.adapters(config.model)
        from foreword.model.self_check import ShortPrompt, find_inexactness  # imports torch, slowly

        if config.model.self_check:
            log.enter("checking that answers have the same bits with and without the cache")
        prompt = ShortPrompt(model)
        inexactness = find_inexactness(model, prompt) if config.model.self_check else None
        if inexactness:
            logger.warning("results are not bit-exact with this model on this machine: %s", inexactness)
        log.enter("making room for the KV cache")
        identity = identify(config, model, weights.hex(), prompt.digest())
        del prompt
        engine = build_engine(config, model, tokenizer, identity, tiers, publisher)
        engine.draft(config.scheduler.draft_tokens, inexactness)
        for tier in tiers:
            if isinstance(tier, DiskTier):
                facts = manifest_facts(identity, config.model.model, engine.manager.block_size)
                tier.describe(identity.namespace, facts)
                engine.entries.open(EntryFile(tier.path_beside(f"{identity.namespace.hex()}.entries")))
        undo.pop_all()
    return Assembled(
        engine,
        tokenizer,
        plan_layout(config, model),
        identity,
        publisher,
        inexactness,
        model.kernel.explain,
        sampling,
        Pooling.of(files),
        model.deviations(engine.limits.max_model_len, config.cache.sink_token_ids),
        _begin_with_kept_times(engine, identity),
        adapters,
        model.pictures,
        model.lacks_pillow,
        model.embeds_reader(config.model, engine.limits.max_model_len - 1, engine.manager.block_size),
    )


def load(options: ModelConfig) -> LoadedModel:
    """Load a model. Raises ModelLoadError or UnsupportedModelError."""
    from foreword.kernels.runtime.threads import prepare_threads
    from foreword.model.loader import load_model

    prepare_threads(Environment.read().num_threads)
    return load_model(options)


def load_tokenizer(options: ModelConfig) -> Tokenizer | None:
    """Load the tokenizer of the model, or of the option `tokenizer`; None if the model has no tokenizer.

    Raises ModelLoadError, or ConfigError for a chat template or response template that cannot be read.
    """
    revision = options.tokenizer_revision or (options.revision if options.tokenizer is None else None)
    tokenizer = Tokenizer.load(
        options.tokenizer or options.model, revision=revision, trust_remote_code=options.trust_remote_code
    )
    if tokenizer is None:
        if options.tokenizer is not None:
            raise ModelLoadError(
                f"tokenizer={options.tokenizer!r} has no tokenizer files; name a folder or hub id with them"
            )
        for name in ("chat_template", "response_template"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} needs a tokenizer, and this model has none; name one with tokenizer")
        return None
    beside = Path(options.model) / "chat_template.json"  # the template's file in older models with pictures
    if tokenizer.chat_template is None and beside.is_file():
        tokenizer.set_chat_template(_template_in(beside))
    if options.chat_template is not None:
        tokenizer.set_chat_template(options.chat_template)
    tokenizer.set_response_template(options.response_template)
    if options.chat_control_tokens:
        tokenizer.take_control_tokens()
    return tokenizer


def _template_in(path: Path) -> str:
    """Read the chat template from a processor's file. Raises ModelLoadError."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["chat_template"]) + "\n"
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ModelLoadError(f"{path.name} of the model cannot be read: {error}; download it again") from error


def plan_layout(config: EngineConfig, model: LoadedModel) -> CacheLayout:
    """Return the layout by which the model's layers share the blocks of the pool."""
    from foreword.model.layout import LayoutOptions

    return model.plan_layout(
        LayoutOptions(
            block_size=config.cache.block_size,
            state_block_size=config.cache.state_block_size,
            state_interval=config.cache.state_interval,
            max_tokens=min(model.max_positions, config.model.max_model_len or model.max_positions),
            num_sink_tokens=len(config.cache.sink_token_ids),
            keep_all=config.cache.keep_all_kv,
        )
    )


def identify(config: EngineConfig, model: LoadedModel, weights: str | None, probe: str) -> CacheIdentity:
    """Return the identity of the model and the arithmetic whose KV the cache holds.

    `weights` is the digest of the weights' files, and `probe` a digest of the model's results for a short prompt. If
    `weights` is None, no other process has this identity.
    """
    from foreword.model.identity import arithmetic_facts, layout_facts, model_facts

    if weights is None:
        logger.info("the files of the weights are not known, so nothing cached now will be found after a restart")
        weights = f"of one process: {os.urandom(16).hex()}"
    return CacheIdentity.of(
        model_facts(model, weights, config.cache.sink_token_ids),
        arithmetic_facts(model, probe),
        layout_facts(plan_layout(config, model)),
        exact=config.cache.cache_exact,
    )


def open_tiers(config: EngineConfig) -> list[Tier]:
    """Open the tiers below the pool, the nearest first. Raises ConfigError for a tier that cannot be used."""
    options, cache = config.tiers, config.cache
    if options.cache_host_bytes is not None and config.model.device == "cpu":
        raise ConfigError(
            f"cache_host_bytes={options.cache_host_bytes} is memory below a GPU's; on a CPU the pool is this machine's "
            "memory already: raise kv_cache_memory_bytes"
        )
    names = (name for name in ("cache_host_bytes", "cache_dir", "cache_store") if getattr(options, name) is not None)
    name = next(names, None)  # errors leave out the value, which may hold a password
    if name is None:
        return []
    if not cache.enable_prefix_caching:
        raise ConfigError(
            f"{name} keeps cached prefixes, and prefix caching is off; leave it out, or leave enable_prefix_caching on"
        )
    if not cache.hash_function.startswith("sha256"):
        raise ConfigError(
            f"hash_function={cache.hash_function!r} makes keys that others can forge, and such keys must not name "
            f"blocks that outlive the process; use sha256, or leave {name} out"
        )
    tiers: list[Tier] = []
    with ExitStack() as undo:
        if options.cache_dir is not None:
            disk = DiskOptions(budget_bytes=options.cache_disk_bytes, key_file=_path(options.cache_key_file))
            tiers.append(DiskTier(user_path(options.cache_dir), disk))
            undo.callback(tiers[0].close, 0.0)
        if options.cache_store is not None:
            store = StoreOptions(ttl_s=options.cache_store_ttl_s, mac_key_file=_path(options.cache_store_key_file))
            tiers.append(ValkeyTier(options.cache_store, store))
        undo.pop_all()
    return tiers


def _open_publisher(options: EventsConfig) -> Publisher | None:
    """Open the publisher of cache events, if the options ask for it. Raises ConfigError for unusable addresses."""
    if options.kv_events is None:
        return None
    try:
        from foreword.events.publisher import Publisher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events={options.kv_events!r} needs pyzmq and msgpack; run `pip install foreword[ops]`"
        ) from error
    return Publisher(options)


def _other_identities(config: EngineConfig, ours: CacheIdentity, tiers: Sequence[Tier]) -> list[OtherIdentity]:
    """Return other identities whose blocks were in the cache's folder at the start, those of the same model first."""
    others = []
    for tier in tiers:
        for facts in tier.described().values() if isinstance(tier, DiskTier) else ():
            identity, block_size = identity_in(facts), facts.get("block_size")
            if identity is None or identity.namespace == ours.namespace or not isinstance(block_size, int):
                continue
            same = identity.model_id == ours.model_id
            reason = MissReason.TIER_OTHER_ARITHMETIC if same else MissReason.TIER_OTHER_MODEL
            root = block_keys(config, identity).root
            others.append(OtherIdentity(tier, identity.namespace, root, max(1, block_size), reason))
    others.sort(key=lambda other: other.reason is MissReason.TIER_OTHER_MODEL)
    return others[:MOST_OTHERS]


def _host_tier(options: TierConfig, model: LoadedModel, memory: BlockBytes, num_groups: int) -> list[Tier]:
    """Open the tier of pinned memory below a GPU's pool; an empty list if `cache_host_bytes` is not given."""
    if options.cache_host_bytes is None:
        return []
    from foreword.model.gpu.device import CudaDevice

    buffer = CudaDevice(model.device).host_buffer(options.cache_host_bytes).numpy()
    return [HostTier(buffer, max(memory.payload_bytes(group_id) for group_id in range(num_groups)))]


def _path(name: str | None) -> Path | None:
    return None if name is None else user_path(name)


def _check_whole(options: SchedulerConfig, most_whole: int) -> None:
    """Raise ConfigError unless a step has room for `most_whole` tokens of one request and one token of each other.

    `most_whole` is the largest number of tokens of one picture that see each other, so one step must compute them all;
    0: no picture has such tokens.
    """
    needed = most_whole + options.max_num_seqs - 1
    if most_whole and needed > options.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens={options.max_num_batched_tokens} is less than the {most_whole} tokens of a "
            f"picture, which this model sees at once, and one for each other of max_num_seqs={options.max_num_seqs} "
            f"requests; give at least {needed}, or a smaller max_num_seqs"
        )


def _num_blocks(config: EngineConfig, model: LoadedModel, layout: CacheLayout) -> int:
    """Return the number of blocks of the pool. Raises ConfigError if the memory for KV does not hold one block."""
    from foreword.model.gpu.device import CudaDevice
    from foreword.model.gpu.runner import RunnerLimits
    from foreword.model.memory import kv_cache_bytes, measure_memory_use

    num_blocks = config.cache.num_gpu_blocks_override
    if num_blocks is None:
        longest = min(model.max_positions, config.model.max_model_len or model.max_positions)
        steps = RunnerLimits.of(config, longest)
        most_tokens = config.scheduler.max_num_batched_tokens
        measure = partial(measure_memory_use, model, layout, CudaDevice(model.device), steps, most_tokens)
        most_running = config.scheduler.max_num_seqs * layout.blocks_of(longest) * layout.bytes_per_block
        budget = kv_cache_bytes(config.model, measure if model.device.type == "cuda" else None, most_running)
    else:
        budget = num_blocks * layout.bytes_per_block
    if budget < layout.bytes_per_block:
        raise ConfigError(
            f"{budget} bytes of KV memory do not hold one block of {layout.block_size} tokens "
            f"({layout.bytes_per_block} bytes); raise kv_cache_memory_bytes"
        )
    return budget // layout.bytes_per_block


def _limits(
    config: EngineConfig, model: LoadedModel, tokenizer: Tokenizer | None, layout: CacheLayout, manager: KVCacheManager
) -> ModelLimits:
    """Return the limits of the model and the pool for requests. Raises ConfigError if `max_model_len` does not fit."""
    max_positions = model.max_positions - len(config.cache.sink_token_ids)
    max_model_len = _max_model_len(config, max_positions, manager)
    longer_by = "raise max_model_len" if config.model.max_model_len else "give the cache more memory"
    ends = model.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        longer_by=None if max_model_len == max_positions else longer_by,
        eos_token_ids=frozenset(token for token in ends if 0 <= token < model.vocab_size),  # -1: no end token
        allows_links=model.can_link(layout),
        hidden_size=model.hidden_size,
        picture_token_id=None if model.pictures is None else model.pictures.vision.token_id,
    )


def build_engine(
    config: EngineConfig,
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    identity: CacheIdentity,
    tiers: Sequence[Tier] = (),
    publisher: Publisher | None = None,
) -> Engine:
    """Size the pool and join cache, tiers, scheduler and runner. Raises ConfigError for options that do not fit."""
    from foreword.model.gpu.runner import RunnerLimits
    from foreword.model.storage import BlockBytes, KVStorage

    layout = plan_layout(config, model)
    _check_whole(config.scheduler, 0 if model.pictures is None else model.pictures.vision.most_whole)
    num_blocks = _num_blocks(config, model, layout)
    try:
        storage = KVStorage(layout, num_blocks, model.device)
        manager = make_manager(config, layout, num_blocks, publisher)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{num_blocks * layout.bytes_per_block} bytes of KV memory ({num_blocks} blocks) cannot be allocated on "
            f"{model.device}; lower "
            f"{'kv_cache_memory_bytes' if config.cache.num_gpu_blocks_override is None else 'num_gpu_blocks_override'}"
        ) from error
    limits = _limits(config, model, tokenizer, layout, manager)
    size = layout.bytes_per_block / 2**20
    facts = num_blocks, size, num_blocks * size / 1024, limits.max_model_len, layout.describe()
    logger.debug("%d blocks of %.2f MiB (%.2f GiB), max_model_len %d; %s", *facts)

    num_sinks = len(config.cache.sink_token_ids)
    runner = make_runner(model, storage, RunnerLimits.of(config, limits.max_model_len + num_sinks))
    if config.cache.sink_token_ids:
        runner.fill_sinks(_sink_tokens(config, model.vocab_size), manager.sink_block_ids())
    memory = BlockBytes(storage)
    host, keys = _host_tier(config.tiers, model, memory, len(layout.groups)), block_keys(config, identity)
    director = TierDirector(
        [*host, *tiers],
        memory,
        manager,
        identity.namespace,
        admission=Admission(config.tiers.cache_admission, layout.block_size),
        max_bytes_per_day=config.tiers.cache_daily_write_bytes,
        others=_other_identities(config, identity, tiers),
    )
    if model.pictures is not None:
        model.pictures.below = director.apart(keys.root)
    return Engine(
        manager,
        config.scheduler,
        runner,
        limits,
        text=None if tokenizer is None else text_tools(tokenizer, limits.eos_token_ids),
        keys=keys,
        tiers=director,
        seed=config.seed,
    )


def text_tools(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> TextTools:
    """Return a tokenizer's functions for the engine. Texts never contain end tokens, even if one marks a call."""

    def open_text_stream(params: SamplingParams, after: Sequence[int]) -> TextStream:
        return tokenizer.stream(
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            kept_ids=tokenizer.marker_ids - eos_token_ids if params.keep_markers else frozenset(),
            after=after,
        )

    return TextTools(open_text_stream, tokenizer.spellings)


def make_runner(model: LoadedModel, storage: KVStorage, limits: RunnerLimits) -> ModelRunner:
    """Make the runner for the model's device."""
    from foreword.model.gpu.device import CudaDevice
    from foreword.model.gpu.runner import DeviceRunner
    from foreword.model.runner import ModelRunner

    if model.device.type == "cuda":
        return DeviceRunner(model, storage, CudaDevice(model.device), limits)
    return ModelRunner(model, storage)


def load_grammars(tokenizer: Tokenizer | None, limits: ModelLimits) -> Grammars:
    """Return the object that makes constraints on answers.

    Raises InvalidRequestError without llguidance, or if the model has no fast tokenizer with an end token.
    """
    try:
        from foreword.grammar import Grammars
    except ImportError as error:
        raise InvalidRequestError("structured outputs need llguidance; pip install foreword[serve]") from error
    definition = None if tokenizer is None else tokenizer.definition()
    if definition is None or not limits.eos_token_ids:
        raise InvalidRequestError(
            "response_format, structured outputs and forced tool calls need a fast tokenizer with an end token, which "
            "this model does not have"
        )
    return Grammars(definition, vocab_size=limits.vocab_size, eos_token_ids=sorted(limits.eos_token_ids))


def block_keys(config: EngineConfig, identity: CacheIdentity) -> BlockKeys:
    """Return the functions of block keys, which depend on the cache's identity and on the deployment's salt."""
    fingerprint = json.dumps({"identity": identity.fingerprint, "salt": config.cache.key_salt}, sort_keys=True)
    return BlockKeys(make_hash_function(config.cache.hash_function), chain_root(fingerprint))


def _sink_tokens(config: EngineConfig, vocab_size: int) -> npt.NDArray[np.int32]:
    token_ids = np.array(config.cache.sink_token_ids, np.int64)
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if wrong.size:
        raise ConfigError(
            f"token {token_ids[wrong[0]]} in sink_token_ids is out of range; the model's ids are 0 to {vocab_size - 1}"
        )
    return token_ids.astype(np.int32)


def make_manager(
    config: EngineConfig, layout: CacheLayout, num_blocks: int, publisher: Publisher | None
) -> KVCacheManager:
    """Make the cache's manager. A layout of one full-attention group may have any index; others use hash keys."""
    cache = config.cache
    events = EventLog() if cache.cache_events else None
    if publisher is not None:
        publisher.describe(layout.specs)
        events = EventLog(0 if events is None else events.capacity, listener=publisher.note)
    policy = make_policy(cache.eviction_policy, num_blocks)
    if cache.max_pinned_share:
        shares = {"max_share": cache.max_pinned_share, "max_owner_share": cache.max_pinned_share_per_tenant}
        policy = PinnedPolicy(policy, num_blocks, **shares)
    full = layout.is_one_full_group
    return KVCacheManager(
        num_blocks,
        block_size=layout.block_size,
        groups=layout.specs,
        enable_prefix_caching=cache.enable_prefix_caching,
        index=make_index(cache.prefix_index, num_blocks, layout.block_size) if full else None,
        eviction_policy=policy,
        ledger=CacheLedger(num_blocks, events=events) if cache.explain_misses else None,
        deduplicate=cache.deduplicate,
    )


def _max_model_len(config: EngineConfig, max_positions: int, manager: KVCacheManager) -> int:
    option = config.model.max_model_len
    step = config.scheduler.max_num_batched_tokens
    max_model_len = max_positions if option is None else option
    if max_model_len > max_positions:
        raise ConfigError(f"max_model_len={option} is more than the model's {max_positions} positions; lower it")
    if manager.can_ever_hold(max_model_len, step):
        return max_model_len
    held = bisect.bisect_left(range(1, max_model_len), True, key=lambda length: not manager.can_ever_hold(length, step))
    if option is not None or held < 1:
        raise ConfigError(
            f"max_model_len={max_model_len} does not fit into the KV memory, which holds {held} tokens; lower it or "
            "raise kv_cache_memory_bytes"
        )
    return held

"""Doors: the private names of src that tests use, each in one place.

A test asks what users can ask: outputs, metrics, snapshots, properties. Where it must look deeper, or make a rare event
happen, it takes a door. So a change inside a room breaks a door here at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foreword.cache import BlockPool, KVCacheManager
from foreword.cache.groups.hybrid import HybridKVCacheCoordinator

if TYPE_CHECKING:
    import argparse

    import pytest

    from foreword.batch import Batch
    from foreword.cache import BlockHash, EventLog, KVCacheEvent
    from foreword.cluster.decision import Reservation
    from foreword.cluster.routing import RoutingCore
    from foreword.engine import Engine, Prompt
    from foreword.events.publisher import Publisher
    from foreword.fleet.routed import RoutedEngines
    from foreword.llm import LLM
    from foreword.model.adapters.loaded import LoadedAdapters
    from foreword.model.deviation import LinkDeviations
    from foreword.model.vision.encoded import EncodedPictures
    from foreword.pictures import Pictures
    from foreword.request import Request, SamplingParams
    from foreword.text import Tokenizer
    from foreword.tiers.disk.disk_tier import DiskTier
    from foreword.tiers.ticket import Ticket

# ------------------------------------------------------------------------------------------------ cache


def pool_of(manager: KVCacheManager) -> BlockPool:
    """The BlockPool of a manager."""
    return manager._pool


def free_queue_of(pool: BlockPool) -> Any:
    """The order in which a pool's free blocks go."""
    return pool._free


def ref_counts_of(pool: BlockPool) -> Any:
    """Number of holders of each block, [num_blocks]; not a copy."""
    return pool._ref_counts


def given_up_in(manager: KVCacheManager) -> Any:
    """Free blocks that closed sessions gave up, in the order in which they go."""
    return pool_of(manager)._given_up.free.in_order()


def num_given_up(manager: KVCacheManager) -> int:
    """The number of free blocks that closed sessions gave up."""
    return len(pool_of(manager)._given_up.free)


def pending_copies(manager: KVCacheManager) -> list[tuple[int, int]]:
    """What `take_copies` will return."""
    return manager._copies.copy()


def coordinator_of(manager: KVCacheManager) -> Any:
    """What joins the tables of a manager's groups."""
    return manager._coordinator


def index_of(manager: KVCacheManager) -> Any:
    """What finds blocks by their prefixes."""
    return coordinator_of(manager).index


def recorded_keys(account: Any) -> Any:
    """The keys that a group's account has of the blocks that a lookup finds."""
    return account._keys[account.findable_block_ids()].tolist()


def let_all_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a cache with recurrent layers find blocks of cells that were not computed whole: a fault."""
    monkeypatch.setattr(HybridKVCacheCoordinator, "_num_findable", lambda _, sequence: len(sequence))


# ----------------------------------------------------------------------------------------------- engine


def runner_of(engine: Engine) -> Any:
    """What runs an engine's batches."""
    return engine._runner


def waiting_in(engine: Engine) -> Any:
    """The queue of an engine's requests that wait."""
    return engine.scheduler._waiting


def num_remembered(queue: Any) -> int:
    """The number of things that a queue by prefixes keeps for the requests that wait."""
    prefixes = queue._prefixes
    kept = (queue._lanes, prefixes._by_missing, prefixes._by_last, prefixes._families)
    return sum(map(len, kept))


def running_in(engine: Engine) -> Any:
    """The rows of an engine's requests that run, in their order."""
    return engine.scheduler._running


def preempt(engine: Engine, request: Request) -> None:
    """Preempt a running request, as when blocks run short."""
    engine.scheduler._preempt(request)


def tiers_of(engine: Engine) -> Any:
    """What decides what an engine loads and stores."""
    return engine._tiers


def cost_of_steps(engine: Engine) -> Any:
    """What an engine knows of the time that its steps take."""
    return tiers_of(engine)._cost


def rest_stores(engine: Engine, until: float) -> None:
    """Let an engine's stores rest until `time.monotonic()` is this."""
    tiers_of(engine)._stores._rest_until = until


def loading_in(engine: Engine) -> list[Request]:
    """The requests that wait for a load from a tier."""
    return list(tiers_of(engine)._loads._load_of)


def in_flight(engine: Engine) -> list[Batch]:
    """The batches that were launched and are not settled."""
    return [batch for batch, *_ in engine._in_flight]


def outputs_of(engine: Engine) -> Any:
    """What makes the outputs of an engine's requests."""
    return engine._outputs


def settle(engine: Engine, batch: Batch) -> None:
    """Run a batch that the test scheduled itself, and bring the outputs up to date."""
    engine.scheduler.commit(batch.entries, runner_of(engine).execute(batch))
    outputs_of(engine).collect(batch.entries.requests)


# -------------------------------------------------------------------------------------------------- llm


def chat_prompt(llm: LLM, messages: Sequence[Any], **rendering: Any) -> Prompt:
    """The engine's prompt of a conversation."""
    return llm._chat_prompt(messages, rendering)  # type: ignore[arg-type]


def linked_prompt(llm: LLM, prompt: Any, link: str) -> Prompt:
    """The engine's prompt of a composition, linked by a method."""
    return llm._prompt(prompt, link)


def constrained(llm: LLM, params: SamplingParams) -> SamplingParams:
    """Parameters as the engine takes them: structured outputs are a constraint."""
    return llm._constrained(params)


def deviations_of(llm: LLM) -> LinkDeviations:
    """What measures the deviation of a model's linked tokens."""
    assert llm._deviations is not None
    return llm._deviations


@contextmanager
def room_for_pictures(pictures: Pictures, num_tokens: int) -> Iterator[None]:
    """Let the pictures of a prompt take fewer tokens for a time."""
    most, pictures._max_tokens = pictures._max_tokens, num_tokens
    try:
        yield
    finally:
        pictures._max_tokens = most


def command_line() -> argparse.ArgumentParser:
    """The parser of the command line."""
    from foreword import cli

    return cli._parser()


def arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a parser, for which argparse has no public name."""
    return parser._actions


# ------------------------------------------------------------------------------------------------ model


def storage_of(engine: Engine) -> Any:
    """The KVStorage of the runner of an engine."""
    return runner_of(engine)._storage


def has_run(chain: Any) -> bool:
    """Whether a decoder's layers ran as one program, the last time."""
    return bool(chain._is_for_storage)


def network_of(layer: Any) -> Any:
    """What a decoder's layer computes after attention."""
    return layer._network


def shared_gate_of(layer: Any) -> Any:
    """The gate of a layer's shared expert."""
    return network_of(layer)._shared_gate


def correction_of(layer: Any) -> Any:
    """What a layer adds to the scores of its experts, when it chooses them."""
    return network_of(layer)._correction


def keeping(deviations: LinkDeviations, kept_bytes: int) -> LinkDeviations:
    """The same that keeps other sources."""
    beginning, rotation, vocab_size = deviations._beginning, deviations._rotation, deviations._vocab_size
    return type(deviations)(beginning, rotation, vocab_size, deviations._max_model_len, (), kept_bytes)


def kept_sources(deviations: LinkDeviations) -> Any:
    """The sources whose keys and values are kept: their number is its length."""
    return deviations._sources


def kept_digests(encoded: EncodedPictures) -> list[str]:
    """The digests of the pictures whose rows are kept."""
    return [digest for _, digest in encoded._pictures]


def take_no_adapter(monkeypatch: pytest.MonkeyPatch, adapters: LoadedAdapters) -> None:
    """Leave no room for adapters, as if requests held too many others."""
    monkeypatch.setattr(adapters, "_max_bytes", 0)


# ----------------------------------------------------------------------------------- events and fleets


def listen(log: EventLog, listener: Callable[[KVCacheEvent], None]) -> None:
    """Have a log call this with each event."""
    log._listener = listener


def counted_keys(account: Any) -> set[BlockHash]:
    """The keys of the blocks that a group's account counts."""
    return set(account._num_copies)


def feed_of(publisher: Publisher) -> Any:
    """The events between an engine's thread and its publisher's."""
    return publisher._feed


def num_events(publisher: Publisher) -> int:
    """The number of events that an engine told its publisher, dropped ones too."""
    return int(feed_of(publisher)._next_number)


def leave_asleep(publisher: Publisher) -> None:
    """Wake the publisher's thread no more before its next heartbeat."""
    feed_of(publisher)._has_rung = True


def num_peers(core: RoutingCore) -> int:
    """The number of routers that a router has heard of."""
    return len(core._peers)


def open_reservations(core: RoutingCore) -> list[Reservation]:
    """The reservations that a router knows, of all routers."""
    return list(core._loads.open)


def num_usable(core: RoutingCore) -> int:
    """The number of replicas to which requests may be sent."""
    return core._usable.bit_count()


def expected_in(core: RoutingCore) -> list[Reservation]:
    """The reservations whose blocks a router expects."""
    return list(core._expected)


def make_ready(door: RoutedEngines, name: str) -> None:
    """Send requests to a replica again that the test has retired."""
    door._ready(name)


def begin_stillness(door: RoutedEngines, name: str) -> None:
    """Say that a replica stands still."""
    door.pulse.still[name] = "it is held"
    door.pulse._on_still(name)


def end_stillness(door: RoutedEngines, name: str) -> None:
    """Say that a replica goes on that stood still."""
    door.pulse.still.clear()
    door.pulse._on_again(name)


def missed_by(door: RoutedEngines) -> set[str]:
    """The replicas that have missed a change."""
    return set(door._calls._missed)


def warmth_of(door: RoutedEngines) -> Any:
    """What warms up new replicas."""
    return door._warmth


def thread_of(replica: Any) -> Any:
    """The thread of a replica's engine."""
    return replica._thread


def fail_engine(thread: Any, reason: str) -> None:
    """Let the thread of an engine find that the engine has failed."""
    thread._commands.put(lambda: thread._give_up(reason))


# ------------------------------------------------------------------------------------------------- text


def backend_of(tokenizer: Tokenizer) -> Any:
    """What tokenizes: a JsonTokenizer, or the tokenizer of transformers."""
    return tokenizer._hf


def skipped_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that texts leave out."""
    return tokenizer._skipped_ids


# ------------------------------------------------------------------------------------------------ tiers


def state_of(tier: DiskTier) -> Any:
    """What the threads of a disk tier share: its directory, its index, whether it closes."""
    return tier._state


def scan(tier: DiskTier, segment: Any) -> None:
    """Read the end of a segment that another process may have written."""
    tier._scanner._scan(segment)


def is_ending(ticket: Ticket) -> bool:
    """Whether somebody waits for the work of the moment, to end a job."""
    return ticket._is_ending


def allowed_s(ticket: Ticket) -> float:
    """The time that a job may take."""
    assert ticket._deadline is not None
    return ticket._deadline - ticket._started

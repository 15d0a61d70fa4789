"""The store tier: blocks in a Valkey or Redis server, shared by all machines that have the same model.

Knows what its three threads do for questions, loads and stores; they share one `StoreState`. Each has a connection.

    probe, lookup -> asking thread ── answers ──> view <── what was loaded or stored ── load and store ── storing thread
                        └ EXISTS; a try when the breaker is half open                       └ loading thread

The server expires (`PX`) and evicts blocks, and others write them, so what the view knows ages. Whatever goes wrong,
the answer is a miss: a bad value is deleted, and a server that does not answer is left alone for 1 to 30 seconds.

A URL is `valkey://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`; `redis://` means the same, `unix:///PATH?db=N` a socket.
TLS: `valkeys://` (or `rediss://`); certificate and host name are checked, against `?ssl_ca_certs=FILE` if it is given;
`&ssl_certfile=FILE&ssl_keyfile=FILE` is the client's own. A cluster's nodes cannot be used.

What a user needs on the server (ACL): `+exists +getrange +set +del +ping +info ~fw1:*`; without `+set` it only reads,
without `+info` the server's memory is not shown. KV is prompt text in another form: whoever may read it can learn from
it. Who may write can only make misses, if all use a `mac_key_file`. Advice for the server: `maxmemory-policy
allkeys-lfu`, `save ""`, `appendonly no`.
"""

from __future__ import annotations

import logging
from typing import Self

import numpy as np
import numpy.typing as npt

from foreword.tiers.cipher import read_secret
from foreword.tiers.store.ask import StoreAsker
from foreword.tiers.store.circuit_breaker import CircuitBreaker
from foreword.tiers.store.client import StoreServer
from foreword.tiers.store.load import StoreLoader
from foreword.tiers.store.state import StoreOptions, StoreState
from foreword.tiers.store.value import ValueFormat, names_of
from foreword.tiers.store.view import StoreView
from foreword.tiers.store.write import StoreWriter
from foreword.tiers.ticket import Ticket
from foreword.tiers.tier import BlockKeys, BlockRun, BlockSink, BoolArray, DoneCallback, TierStats

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long `close` waits for a thread that is in the middle of a call."""


class ValkeyTier:
    """Blocks in a Valkey or Redis server; a `Tier`.

    Raises ConfigError for URLs, options and key files that cannot be used, and if the server refuses the user. A server
    that does not answer is no error: the tier finds nothing until it does. Close it, or use it as a context manager.
    """

    name = "store"

    def __init__(self, url: str, options: StoreOptions = StoreOptions()) -> None:  # noqa: B008 - frozen
        options.check()
        server = StoreServer(url, options.io_timeout_s)
        secret = None if options.mac_key_file is None else read_secret(options.mac_key_file)
        pauses = options.first_pause_s, options.longest_pause_s
        breaker, room = CircuitBreaker(options.max_failures, *pauses), CircuitBreaker(1, *pauses)
        state = StoreState(options, server, ValueFormat(secret), StoreView(options.max_known), breaker, room)
        self._state = state
        self._asker, self._loader, self._writer = StoreAsker(state), StoreLoader(state), StoreWriter(state)
        if secret is None and not server.is_local:
            logger.warning(
                "values in the store %s are not signed: whoever else can write there can change answers; give all "
                "machines that use it the same --cache-store-key-file",
                server.shown_url,
            )
        self._asker.greet()
        state.on_trip = self._asker.thread.wake
        self._asker.thread.start()
        self._loader.thread.start()
        self._writer.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close(PATIENCE_S)

    def lookup(self, keys: BlockKeys) -> BoolArray:
        """Which blocks are known to be here, [blocks]; what is not known is asked in the background.

        See `Tier.lookup`. Nothing is found while the breaker is open.
        """
        names = names_of(keys)
        present, unknown = self._state.view.look(names)
        if self._state.closing.is_set() or not self._state.breaker.is_closed:
            present[:] = False
        else:
            self._asker.ask([names[at] for at in np.flatnonzero(unknown)])
        self._state.count(num_looked_up=len(keys), num_found=int(np.count_nonzero(present)))
        return present

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        """Ask the server which blocks are here; see `Tier.probe`."""
        return self._asker.probe(names_of(keys), deadline_s, on_done)

    def load(
        self,
        keys: BlockKeys,
        payload_bytes: npt.NDArray[np.int64],
        sink: BlockSink,
        *,
        deadline_s: float,
        on_done: DoneCallback | None = None,
    ) -> Ticket:
        """Begin to load blocks into `sink`; see `Tier.load`. While the breaker is open all are IO_ERROR at once."""
        return self._loader.add(names_of(keys), payload_bytes.tolist(), sink, deadline_s, on_done)

    def estimate_load_s(self, num_bytes: int) -> float:
        """Seconds until a load of that size would end; see `Tier.estimate_load_s`."""
        return self._loader.rate.estimate_s(self._loader.thread.amount + num_bytes)

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        """Begin to store a run; see `Tier.store`. NO_ROOM while the breaker is open or the server refuses to write."""
        return self._writer.add(names_of(run.keys), run, on_done)

    def forget(self, keys: BlockKeys) -> None:
        """Blocks that `lookup` must not find again until this process stores them. Others still find them."""
        self._state.view.refuse(names_of(keys))

    def close(self, flush_s: float) -> None:
        """Store what is queued for at most `flush_s` seconds and cancel the rest; see `Tier.close`."""
        if self._state.closing.is_set():
            return
        self._state.closing.set()
        parts: dict[StoreAsker | StoreLoader | StoreWriter, float]
        parts = {self._asker: 0.0, self._loader: 0.0, self._writer: flush_s}
        for part, seconds in parts.items():
            part.thread.stop_after(seconds)
        for part, seconds in parts.items():
            part.thread.join(seconds + self._state.options.io_timeout_s)
            part.link.close()  # a thread that still waits for the server goes on at once
            part.thread.join(PATIENCE_S)

    def stats(self) -> TierStats:
        """What happened so far; see `Tier.stats`.

        `shared_bytes` and `budget_bytes` are the server's memory and its limit as of the last question, and
        `stored_bytes` is what was written, at most `shared_bytes`: the server does not say what is left.
        """
        stats = self._state.copy_of_stats()
        stats.num_blocks = 0 if self._state.closing.is_set() else len(self._state.view)
        stats.shared_bytes = stats.shared_bytes or stats.written_bytes
        stats.budget_bytes = max(stats.budget_bytes, stats.shared_bytes)
        stats.stored_bytes = min(stats.written_bytes, stats.shared_bytes)
        stats.load_bytes_per_s = self._loader.rate.bytes_per_s
        stats.queued_load_bytes, stats.queued_store_bytes = self._loader.thread.amount, self._writer.thread.amount
        stats.breaker, stats.num_breaker_trips = self._state.breaker.state, self._state.breaker.num_trips
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError if something is counted wrongly; see `Tier.check_integrity`."""
        assert min(self._asker.thread.amount, self._loader.thread.amount, self._writer.thread.amount) >= 0
        assert len(self._state.view) <= self._state.options.max_known

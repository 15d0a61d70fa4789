"""The disk tier: blocks in segment files that outlive the process, shared by the processes of one user.

Its parts are a loader, which reads, a storer, which writes and keeps to the budget, and a scanner, which finds blocks:

    loads  -> loader  ── places ──> segment index <── rows ── storer <- stores
                └ pread, verify, hand over            └ gather, append, seal, evict, snapshot
                                    ^ rows ── scanner: snapshot and headers at start, later what others sealed

It has four threads: one loads, one reads ahead for the loader, one writes and one scans. No call waits for them except
`close` and `wait_scanned`.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from foreword.tiers.cipher import AesGcm, Cipher, read_secret
from foreword.tiers.clock import Clock
from foreword.tiers.disk.directory import CacheDirectory, unusable
from foreword.tiers.disk.files import RealFiles, can_leave_cache
from foreword.tiers.disk.loader import Loader
from foreword.tiers.disk.manifest import read_manifests, write_manifest
from foreword.tiers.disk.scanner import Scanner
from foreword.tiers.disk.segment_index import SegmentIndex
from foreword.tiers.disk.state import DiskOptions, DiskState
from foreword.tiers.disk.storer import Storer
from foreword.tiers.identity import Facts
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BoolArray, DoneCallback, TierStats

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds that `close` waits for a thread that is in the middle of a call."""


class DiskTier(AbstractContextManager["DiskTier"]):
    """Blocks on disk; a `Tier`. Raises ConfigError for options, directories and key files that cannot be used.

    The directory is made if it is not there. Blocks of earlier processes are found as soon as they are scanned, which
    takes well under a second with a snapshot; `wait_scanned` waits until then. Close the tier, or use it as a context
    manager: queued stores are then written and the index is saved. Without that, the next start scans more headers.
    """

    name = "disk"

    def __init__(
        self,
        path: Path | str,
        options: DiskOptions = DiskOptions(),  # noqa: B008 - frozen
        *,
        files: RealFiles | None = None,
        clock: Clock | None = None,
    ) -> None:
        options.check()
        files = files or RealFiles()
        cipher: Cipher = Cipher() if options.key_file is None else AesGcm(read_secret(options.key_file))
        directory = CacheDirectory(files, Path(path))
        try:
            used = directory.physical_bytes([directory.home, *directory.other_homes()])
            space = files.space(directory.home)
            self._state = DiskState(
                options.completed(space.total_bytes, space.free_bytes, used),
                files,
                clock or Clock(),
                directory,
                SegmentIndex(),
                cipher,
                leaves_cache=can_leave_cache(files, directory.lock_fd),
            )
            self._loader = Loader(self._state)
            self._storer = Storer(self._state)
            self._scanner = Scanner(self._state)
            self._scanner.start()
        except OSError as error:
            directory.close()
            raise unusable(directory.path, error) from error
        except BaseException:
            directory.close()
            raise
        self._loader.start()
        self._storer.thread.start()
        self.load, self.estimate_load_s = self._loader.loads.load, self._loader.loads.estimate_s
        self.store = self._storer.store
        """See `Tier`."""
        self._is_closed = False
        logger.info(
            "cache on disk: %s, at most %.1f GB, %.1f GB there",
            directory.path,
            (self._state.options.budget_bytes or 0) / 1e9,
            used / 1e9,
        )

    def __exit__(self, *exc_info: object) -> None:
        self.close(PATIENCE_S)

    def lookup(self, keys: BlockKeys) -> BoolArray:
        if self._is_closed:
            return np.zeros(len(keys), bool)
        is_present = self._state.index.contains(keys, self._state.clock.now_s())
        self._state.count(num_looked_up=len(keys), num_found=int(np.count_nonzero(is_present)))
        return is_present

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        ticket = Ticket(len(keys), deadline_s=deadline_s, on_done=on_done)
        if not self._is_closed:
            here = self._state.index.contains(keys, self._state.clock.now_s())
            ticket.settle(np.flatnonzero(here), Outcome.PRESENT)
            ticket.settle(np.flatnonzero(~here), Outcome.MISSING)
        ticket.finish(Outcome.CANCELLED)
        return ticket

    def forget(self, keys: BlockKeys) -> None:
        """Stop `lookup` from finding these blocks. Their bytes stay until their segment is evicted.

        This does not erase content: a restart that scans headers finds the blocks again.
        """
        self._state.index.forget(keys)

    def describe(self, namespace: bytes, facts: Facts) -> None:
        """Write down whose blocks a namespace holds, for `foreword cache list`; `manifest_facts` gives the facts.

        This writes a small file, so call it only when a tier has just been opened. A failure is logged.
        """
        directory = self._state.directory
        try:
            write_manifest(self._state.files, directory.root, directory.home, namespace, facts)
        except OSError as error:
            logger.warning("the manifest of namespace %s cannot be written: %s", namespace.hex(), error)

    def path_beside(self, name: str) -> Path:
        """The path of a file with this name in the cache directory, which only its user can read."""
        return self._state.directory.root / name

    def described(self) -> dict[bytes, Facts]:
        """The facts that `describe` has written down in this directory so far, by namespace. Reads small files."""
        state = self._state
        with contextlib.suppress(OSError):
            return read_manifests(state.files, state.directory.root).facts
        return {}

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks that were here when the tier was opened can be looked up; True if they can."""
        return self._scanner.finished.wait(timeout_s)

    def close(self, flush_s: float) -> None:
        """Work on queued stores for at most `flush_s` seconds, cancel the rest, save the index; see `Tier.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._storer.thread.stop_after(flush_s)
        self._state.closing.set()
        self._storer.thread.join(flush_s + PATIENCE_S)
        self._loader.close(PATIENCE_S)
        self._scanner.close(PATIENCE_S)
        with contextlib.suppress(OSError):
            self._state.directory.close()

    def stats(self) -> TierStats:
        state, space = self._state, self._storer.space
        stats = state.copy_of_stats()
        stats.num_blocks = len(state.index)
        stats.stored_bytes, stats.shared_bytes = space.own_bytes, space.used_bytes
        stats.budget_bytes = space.budget_bytes
        stats.load_bytes_per_s = self._loader.loads.rate.bytes_per_s
        stats.queued_load_bytes, stats.queued_store_bytes = self._loader.thread.amount, self._storer.thread.amount
        stats.is_scanned = self._scanner.finished.is_set()
        return stats

    def check_integrity(self) -> None:
        self._state.index.check_integrity()
        assert min(self._loader.thread.amount, self._storer.thread.amount) >= 0

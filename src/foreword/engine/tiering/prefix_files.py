"""Exports and imports of prefixes: the pool's blocks to a file, and a file's blocks to a tier or to the pool.

The engine's thread exports and imports while no step is in flight. So every block that a lookup finds is filled, and no
step writes to the blocks that are taken here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foreword.cache import NO_BLOCKS, NULL_BLOCK, BlockIds, FullAttentionSpec, KVCacheManager, TokenSequence
from foreword.engine.tiering.block_memory import BlockMemory, BlocksOfParts, Part, take_blocks
from foreword.engine.tiering.stores import cached_parts, run_of
from foreword.errors import ConfigError, InvalidRequestError
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.segments import RunHeader
from foreword.tiers.identity import Facts
from foreword.tiers.prefix_file import (
    ExportReport,
    ImportReport,
    PrefixFile,
    UnsoundFileError,
    store_prefix_file,
    write_prefix_file,
)
from foreword.tiers.tier import Tier

Place = tuple[RunHeader, int]
"""A block in a file."""


class PrefixFiles:
    """Exports and imports of one engine."""

    def __init__(self, tiers: Sequence[Tier], memory: BlockMemory, manager: KVCacheManager, namespace: bytes) -> None:
        self._tiers, self._memory, self._manager, self._namespace = tiers, memory, manager, namespace

    def export_to(self, path: Path, sequence: TokenSequence, facts: Facts, *, overwrite: bool) -> ExportReport:
        """Write the cached blocks of a sequence to a file.

        Raises InvalidRequestError if no block is cached, ConfigError for a path that cannot be written.
        """
        manager = self._manager
        manager.begin_step()  # so that blocks of earlier steps count as filled
        num_tokens = manager.get_computed_blocks(sequence).num_shared_tokens
        num_tokens -= num_tokens % manager.block_size  # a hit may end inside a block, but only full blocks have keys
        parts = cached_parts(manager, sequence, sequence.num_prompt_tokens)
        if not parts or not num_tokens:
            raise InvalidRequestError(
                f"no block of the prompt's {sequence.num_prompt_tokens} tokens is cached; give the cache more memory "
                "(kv_cache_memory_bytes), or a prompt that fills a block of every group of layers"
            )
        run = run_of(manager, self._memory, self._namespace, sequence, parts)
        with_size = {**facts, "num_tokens": num_tokens}
        # Nobody takes blocks meanwhile, so no block has to be held.
        num_bytes = write_prefix_file(RealFiles(), path, with_size, run, overwrite=overwrite)
        return ExportReport(num_tokens, len(run.keys), num_bytes)

    def take(self, file: PrefixFile, sequence: TokenSequence | None) -> ImportReport:
        """Take the blocks of a file into the first tier; without a tier, into the pool.

        `sequence`: the sequence of the file's token ids; None if the file has no token ids. Raises ConfigError if there
        is neither a tier nor a sequence, UnsoundFileError if the blocks cannot hold the number of tokens that the file
        claims, OSError if the file changes meanwhile. After an error, nothing has changed.
        """
        self._check_num_tokens(file, sequence)
        if self._tiers:
            return store_prefix_file(file, self._tiers[0])
        if sequence is None:
            raise ConfigError(
                f"path={str(file.path)!r} holds no token ids, so its blocks can only go to a tier, and there is none; "
                "open the LLM with cache_dir, or export with with_text=True (--with-text)"
            )
        places = self._places(file, sequence)
        if places is None:
            return ImportReport(rejected="its token ids do not give the keys and sizes of its blocks")
        return self._adopt(file, sequence, places)

    def _check_num_tokens(self, file: PrefixFile, sequence: TokenSequence | None) -> None:
        """Raise UnsoundFileError if the file claims more tokens than its text or its full-attention blocks have."""
        counts = Counter(group_id for run in file.runs for group_id in run.entries["group"].tolist())
        limits = [
            counts[group_id] * spec.block_size
            for group_id, spec in enumerate(self._manager.groups)
            if isinstance(spec, FullAttentionSpec)
        ]
        if sequence is not None:
            limits.append(sequence.num_prompt_tokens)
        if limits and file.facts["num_tokens"] > min(limits):
            num_tokens = file.facts["num_tokens"]
            raise UnsoundFileError(
                f"it says num_tokens={num_tokens}, but its blocks and text are of at most {min(limits)}"
            )

    def _places(self, file: PrefixFile, sequence: TokenSequence) -> list[dict[int, Place]] | None:
        """For each group, the blocks of the file by their number in the sequence; None if a block does not fit."""
        numbers = [{key: number for number, key in enumerate(keys)} for keys in self._manager.keys_by_group(sequence)]
        places: list[dict[int, Place]] = [{} for _ in numbers]
        for header in file.runs:
            for index, entry in enumerate(header.entries):
                group_id = int(entry["group"])
                number = numbers[group_id].get(entry["key"].tobytes()) if group_id < len(numbers) else None
                if number is None or entry["stored_bytes"] != self._memory.payload_bytes(group_id):
                    return None
                places[group_id][number] = header, index
        return places

    def _adopt(self, file: PrefixFile, sequence: TokenSequence, places: list[dict[int, Place]]) -> ImportReport:
        manager = self._manager
        manager.begin_step()
        cached = manager.cached_blocks(sequence)
        missing = [
            Part(
                group_id,
                np.array([number for number in sorted(places[group_id]) if table[number] == NULL_BLOCK], np.int32),
                NO_BLOCKS,
            )
            for group_id, table in enumerate(cached)
        ]
        entries = np.concatenate(cached)
        held: BlockIds = np.unique(entries[entries != NULL_BLOCK])
        parts = take_blocks(manager, missing, held)
        if parts is None:
            num_blocks = sum(len(part.numbers) for part in missing)
            return ImportReport(
                rejected=f"its {num_blocks} blocks do not fit into the {manager.get_num_free_blocks()} free blocks of "
                "the pool; raise kv_cache_memory_bytes, or open the LLM with cache_dir"
            )
        try:
            self._fill(file, parts, places)
            for part in parts:
                part.adopt(manager, sequence, np.arange(len(part.numbers)))
        finally:
            for part in reversed(parts):
                manager.release_blocks(part.block_ids)
            manager.release_blocks(held)
        manager.begin_step()
        tables = manager.cached_blocks(sequence)
        num_here = sum(table[number] != NULL_BLOCK for own, table in zip(places, tables, strict=True) for number in own)
        return ImportReport(int(num_here), file.facts["num_tokens"] if num_here == file.num_blocks else 0)

    def _fill(self, file: PrefixFile, parts: list[Part], places: list[dict[int, Place]]) -> None:
        blocks = BlocksOfParts(self._memory, parts)
        sources = [places[part.group_id][number] for part in parts for number in part.numbers.tolist()]
        for at, (header, index) in enumerate(sources):
            payload = memoryview(bytearray(int(blocks.payload_bytes[at])))
            file.read(header, index, payload)
            blocks.put(at, payload)

"""What the disk tier costs: rates beside `preadv` alone on the same bytes, a restart, look-ups, and faults caught.

    PYTHONPATH=src python benchmarks/tiers.py [--path DIR] [--mb 400] [--flips N] [--kills N] [--model DIR] [--json]

Each figure has a limit from the same run. Blocks have the bench model's size: 196,608 bytes for 16 tokens. Cold means
that the page cache has dropped the file (POSIX_FADV_DONTNEED after a sync). `preadv` alone reads the same segments in
pieces of 4 MiB, with the same flag, into one buffer, and checks nothing. Rounds alternate between the tier and
`preadv`, and medians are reported, because a disk's rate may change by a third from minute to minute.

The index's figures are for 10^6 blocks: the time to read and insert a snapshot, and to scan the headers of these blocks
in runs of 40. For the scan the files are sparse: headers are in their real places, payloads are holes.

`tiers_engine.py` measures an engine: times to the first token with hits from memory, disk and a Valkey server, and
steps beside loads and stores. Each `--model` names a real model, whose first request is measured after each of 12
restarts.

`--vllm` measures vLLM's file tier beside ours on the same bytes (`tiers_vllm.py`). With `auto`, pip downloads a wheel
into the temporary folder; otherwise give a wheel, or a folder that holds `vllm/`.

`--kills N` kills N processes while they store. `--flips N` flips N random bits of segments, headers and snapshots, and
loads the damaged parts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.clock import Clock
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.files import RWF_DONTCACHE
from foreword.tiers.disk.segment_index import SegmentIndex, read_snapshot, write_snapshot
from foreword.tiers.disk.segments import ENTRY, PAGE, RunHeader, encode_header, header_bytes_of
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers
from tiers_blocks import (
    BLOCK_BYTES,
    FILES,
    NAMESPACE,
    PREFIX_BLOCKS,
    drop_from_page_cache,
    options_for,
    payloads,
    random_keys,
)
from tiers_engine import engine_figures, restart_figures
from tiers_faults import flips, kills
from tiers_vllm import vllm_figures

PIECE_BYTES = 4 << 20
NUM_INDEXED = 10**6
LOOKUP_BLOCKS = 50_000 // 16


# ---------------------------------------------------------------------------------------------- rates


def read_alone(paths: list[Path], flags: int) -> float:
    """Megabytes per second of `preadv` in pieces of 4 MiB."""
    buffer = np.ones(PIECE_BYTES, np.uint8)
    num_bytes, began = 0, time.perf_counter()
    for path in paths:
        fd, offset = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(fd, [buffer], offset, flags):
            offset += count
        num_bytes += offset
        os.close(fd)
    return num_bytes / 1e6 / (time.perf_counter() - began)


class Memory:
    """Blocks in memory, in the place of the engine's pool."""

    def __init__(self, rows: np.ndarray) -> None:
        self.buffers = Buffers([row.data for row in rows])
        self.rows = rows


def load_rate(tier: DiskTier, keys: BlockKeys, memory: Memory) -> float:
    lengths = np.full(len(keys), BLOCK_BYTES)
    ticket = tier.load(keys, lengths, memory.buffers, deadline_s=600)
    assert ticket.wait()
    assert ticket.report.num_done == len(keys), ticket.report.by_reason()
    return len(keys) * BLOCK_BYTES / 1e6 / ticket.report.seconds


def write_alone(path: Path, rows: np.ndarray) -> float:
    """Megabytes per second of plain writes of 6 MiB with one sync at the end."""
    fd, began, offset = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), time.perf_counter(), 0
    flat = rows.reshape(-1)
    for begin in range(0, len(flat), 6 << 20):
        offset += os.pwrite(fd, flat[begin : begin + (6 << 20)].data, offset)
    os.fdatasync(fd)
    seconds = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return len(flat) / 1e6 / seconds


def rates(folder: Path, num_mb: int, rounds: int) -> dict[str, float]:
    keys, rows = payloads(num_mb)
    count, options = len(keys), options_for(rows.nbytes)
    stores, writes = [], []
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        tier = DiskTier(folder, options)
        tier.wait_scanned()
        began = time.perf_counter()
        for begin in range(0, count, PREFIX_BLOCKS):
            part = keys.select(slice(begin, begin + PREFIX_BLOCKS))
            buffers = Buffers([row.data for row in rows[begin : begin + PREFIX_BLOCKS]])
            ticket = tier.store(BlockRun.chain(part, BLOCK_BYTES, buffers))
            assert ticket.wait()
            assert ticket.report.num_done == PREFIX_BLOCKS
        tier.close(60)  # seals, so it syncs
        stores.append(rows.nbytes / 1e6 / (time.perf_counter() - began))
        writes.append(write_alone(folder / "alone", rows))
    out = np.ones_like(rows)
    memory = Memory(out)
    samples: dict[str, list[float]] = {name: [] for name in ("preadv", "cold", "prefix", "preadv_warm", "warm")}
    with DiskTier(folder, options) as tier:
        assert tier.wait_scanned()
        flags = RWF_DONTCACHE if tier._state.leaves_cache else 0
        paths = sorted(folder.glob("v1/*/*.fwseg"))
        prefix, head = keys.select(slice(0, PREFIX_BLOCKS)), Memory(out[:PREFIX_BLOCKS])
        for number in range(rounds):
            runs: list[tuple[str, Callable[[], float]]] = [
                ("preadv", lambda: read_alone(paths, flags)),
                ("cold", lambda: load_rate(tier, keys, memory)),
                ("prefix", lambda: load_rate(tier, prefix, head)),
            ]
            for name, run in runs[number % 3 :] + runs[: number % 3]:
                drop_from_page_cache(paths)
                samples[name].append(run())
            read_alone(paths, 0)
            samples["preadv_warm"].append(read_alone(paths, 0))
            samples["warm"].append(load_rate(tier, keys, memory))
        assert np.array_equal(out, rows)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    shutil.rmtree(folder)
    return {
        "mb": rows.nbytes / 1e6,
        "preadv_mb_s": medians["preadv"],
        "load_cold_mb_s": medians["cold"],
        "load_cold_4096_tokens_mb_s": medians["prefix"],
        "load_cold_4096_tokens_ms": PREFIX_BLOCKS * BLOCK_BYTES / 1e3 / medians["prefix"],
        "load_cold_of_preadv": medians["cold"] / medians["preadv"],
        "preadv_warm_mb_s": medians["preadv_warm"],
        "load_warm_mb_s": medians["warm"],
        "store_mb_s": statistics.median(stores),
        "write_alone_mb_s": statistics.median(writes),
        "store_of_write": statistics.median(stores) / statistics.median(writes),
    }


# ---------------------------------------------------------------------------------------------- index


def sparse_segments(folder: Path, keys: np.ndarray, blocks_per_run: int) -> None:
    """Segments whose headers are real and whose payloads are holes."""
    folder.mkdir(mode=0o700, parents=True)
    header_bytes = header_bytes_of(blocks_per_run)
    run_bytes = header_bytes + blocks_per_run * BLOCK_BYTES
    runs_per_segment = (256 << 20) // run_bytes
    entries = np.zeros(blocks_per_run, ENTRY)
    entries["parent"] = np.arange(-1, blocks_per_run - 1)
    entries["stored_bytes"], entries["flags"], entries["value"] = BLOCK_BYTES, 1, 1.0
    entries["page"] = header_bytes // PAGE + np.arange(blocks_per_run) * (BLOCK_BYTES // PAGE)
    fd, number = -1, 0
    for number, begin in enumerate(range(0, len(keys), blocks_per_run)):
        if number % runs_per_segment == 0:
            if fd >= 0:
                os.ftruncate(fd, runs_per_segment * run_bytes)
                os.close(fd)
            fd = FILES.create(folder / f"{number // runs_per_segment + 1:06d}-{0:08x}.fwseg")
        entries["key"] = keys[begin : begin + blocks_per_run]
        offset = number % runs_per_segment * run_bytes
        header = RunHeader(header_bytes, run_bytes, number, NAMESPACE, NO_CIPHER_ID, 10**9, 0, offset, entries)
        os.pwrite(fd, encode_header(header), offset)
    os.ftruncate(fd, (number % runs_per_segment + 1) * run_bytes)
    os.close(fd)


def fill(index: SegmentIndex, keys: BlockKeys, clock: Clock) -> None:
    """Insert blocks in runs of 40."""
    entries, length = np.zeros(40, ENTRY), header_bytes_of(40)
    run_bytes = length + 40 * BLOCK_BYTES
    entries["stored_bytes"], entries["flags"], entries["value"] = BLOCK_BYTES, 1, 1.0
    entries["page"] = (length + np.arange(40) * BLOCK_BYTES) // PAGE
    for begin in range(0, len(keys), 40):
        number, place = divmod(begin // 40, 32)
        segment = index.add_segment(Path(f"{number:06d}-00000000.fwseg"), is_own=True)
        segment.num_bytes = 32 * run_bytes
        entries["key"] = keys.keys[begin : begin + 40]
        run = RunHeader(length, run_bytes, 0, NAMESPACE, NO_CIPHER_ID, 0, 0, place * run_bytes, entries)
        index.insert(run, segment, expires=0, used=clock.now_s())


def index_figures(folder: Path, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    keys = random_keys(rng, NUM_INDEXED)
    index, clock = SegmentIndex(), Clock()
    tracemalloc.start()
    fill(index, keys, clock)
    bytes_a_block = tracemalloc.get_traced_memory()[0] / NUM_INDEXED
    tracemalloc.stop()
    asked = keys.select(rng.permutation(NUM_INDEXED)[:LOOKUP_BLOCKS])
    half_absent = BlockKeys(NAMESPACE, asked.group_ids, asked.keys.copy())
    half_absent.keys[LOOKUP_BLOCKS // 2 :, 0] ^= 1
    lookups = []
    for keys_asked, expected in ((asked, LOOKUP_BLOCKS), (half_absent, LOOKUP_BLOCKS // 2)):
        for _ in range(50):
            began = time.perf_counter()
            found = index.contains(keys_asked, clock.now_s())
            lookups.append(time.perf_counter() - began)
            assert found.sum() == expected
    folder.mkdir(parents=True)
    write_snapshot(FILES, folder / "index", index.snapshot(index.segments()), clock, NO_CIPHER_ID)
    del index
    gc.collect()
    snapshots = []
    for _ in range(rounds):
        began = time.perf_counter()
        snapshot = read_snapshot(FILES, folder / "index", clock, NO_CIPHER_ID)
        assert snapshot is not None
        fresh = SegmentIndex()
        fresh.insert_snapshot(snapshot, [fresh.add_segment(Path(name), is_own=True) for name, _ in snapshot.segments])
        assert len(fresh) == NUM_INDEXED
        snapshots.append(time.perf_counter() - began)
    assert fresh.contains(asked, clock.now_s()).all()
    del fresh, snapshot
    shutil.rmtree(folder)
    home = folder / "v1" / ("0" * 32)
    sparse_segments(home, keys.keys, 40)
    for inner in (folder, folder / "v1"):
        inner.chmod(0o700)
    drop_from_page_cache(sorted(home.glob("*.fwseg")))
    options = DiskOptions(budget_bytes=10**15, min_free_bytes=0, segment_bytes=256 << 20)
    began = time.perf_counter()
    with DiskTier(folder, options) as tier:
        assert tier.wait_scanned()
        scan_s = time.perf_counter() - began
        assert tier.stats().num_blocks == NUM_INDEXED
        assert tier.lookup(asked).all()
    shutil.rmtree(folder)
    return {
        "index_1e6_snapshot_s": statistics.median(snapshots),
        "index_1e6_scan_s": scan_s,
        "index_bytes_a_block": bytes_a_block,
        "lookup_50k_ms": 1e3 * statistics.median(lookups),
    }


# ---------------------------------------------------------------------------------------------- report


TARGETS: dict[str, tuple[str, float]] = {
    "load_cold_of_preadv": (">=", 0.8),
    "load_warm_mb_s": (">=", 3500),
    "store_mb_s": (">=", 1200),
    "index_1e6_snapshot_s": ("<=", 0.5),
    "index_1e6_scan_s": ("<=", 10),
    "index_bytes_a_block": ("<=", 80),
    "lookup_50k_ms": ("<=", 2),
    "wrong_blocks": ("<=", 0),
    "disk_hit_over_ram_hit_ms": ("<=", 50),
    "store_hit_over_ram_hit_ms": ("<=", 80),
    "step_p99_ratio_loading": ("<=", 1.10),
    "step_p99_ratio_storing": ("<=", 1.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure; default: a temporary one")
    parser.add_argument("--mb", type=int, default=400, help="megabytes of payload")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--engine", choices=("full", "quick", "none"), default="full", help="which figures of an engine to measure"
    )
    parser.add_argument("--prompts", type=int, default=7, help="prompts of 4,096 tokens for the engine (default: 7)")
    parser.add_argument("--model", action="append", default=[], help="folder of a real model to restart")
    parser.add_argument("--restarts", type=int, default=12, help="restarts of each --model (default: 12)")
    parser.add_argument("--vllm", metavar="PATH", help="a wheel or folder of vLLM, or `auto`; default: not measured")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    args = parser.parse_args()
    for name in ("mb", "rounds", "flips", "kills", "prompts", "restarts"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give at least 1")
    folder = Path(tempfile.mkdtemp(dir=args.path))
    try:
        figures: dict[str, float] = {
            **rates(folder / "rates", args.mb, args.rounds),
            **index_figures(folder / "index", args.rounds),
            **flips(folder / "flips", args.flips),
            **kills(folder / "kills", args.kills),
        }
        if args.engine != "none":
            figures.update(engine_figures(folder / "engine", args.prompts, quick=args.engine == "quick"))
        for number, model in enumerate(args.model):
            figures.update(restart_figures(model, folder / f"model{number}", args.restarts))
        beside = (
            {"vllm": "not measured: give --vllm"}
            if args.vllm is None
            else vllm_figures(folder / "vllm", args.vllm, args.mb, args.rounds)
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures["wrong_blocks"] = figures["wrong_after_flips"] + figures["wrong_after_kills"]
    if not args.json:
        for name, value in figures.items():
            sign, limit = TARGETS.get(name, ("", 0.0))
            print(f"{name:28} {value:12.4g}" + (f"   target {sign} {limit:g}" if sign else ""))
        for name, told in beside.items():
            print(f"{name:28} " + (told if isinstance(told, str) else f"{told:12.4g}"))
        print(f"load beside {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")
    rounded = {name: told if isinstance(told, str) else round(float(told), 4) for name, told in beside.items()}
    print(json.dumps({name: round(float(value), 4) for name, value in figures.items()} | rounded))


if __name__ == "__main__":
    main()

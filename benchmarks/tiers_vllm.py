"""vLLM's file tier beside ours: the same blocks, in the same run, round by round.

The tier is vLLM's own code, `vllm/v1/kv_offload/` of a wheel or a folder that the user names, or that pip downloads for
this run. This repository holds none of it. Stand-ins replace the other modules of vLLM that the tier imports (logger,
metrics, hints), which move no bytes, so no GPU is needed. The tier's optional C functions need CUDA's libraries; where
these are missing, the tier uses its Python functions, as vLLM does.

Both tiers get the same jobs, one for each prefix of 4,096 tokens. vLLM's tier has 32 threads, which is its default, and
works at one job with one thread. It opens files with O_DIRECT, writes a file for each block, and never syncs. Our tier
seals and syncs its files within the measured time.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import mmap
import shutil
import statistics
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers
from tiers_blocks import BLOCK_BYTES, PREFIX_BLOCKS, drop_from_page_cache, options_for, payloads

THEIR_TIER = "vllm.v1.kv_offload"
THEIR_C = "vllm.fs_io_C"
NUM_FLIPS = 64


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the tier's modules in a folder, and gives stand-ins for all other modules of vLLM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm" or name.startswith((THEIR_TIER, THEIR_C)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        is_parent = THEIR_TIER.startswith(spec.name + ".")
        module: Any = types.ModuleType(spec.name) if is_parent else MagicMock()
        module.__path__ = [str(self._folder / spec.name.replace(".", "/"))]
        return module

    def exec_module(self, module: object) -> None:
        return


def find_vllm(source: str, scratch: Path) -> tuple[Path, str]:
    """A folder in which `vllm/` lies, and its version. Raises an error with the reason if there is none."""
    path = Path(source)
    if source == "auto":
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), "vllm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise RuntimeError(f"pip cannot download vllm: {done.stderr.strip().splitlines()[-1:]}")
        (path,) = scratch.glob("vllm-*.whl")
    if path.is_dir():
        return path, path.name
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith("vllm/v1/kv_offload/")])
    return scratch, path.name.split("-")[1]


def whole_pages(count: int, num_bytes: int) -> np.ndarray:
    """An array of blocks that O_DIRECT can read into."""
    return np.frombuffer(mmap.mmap(-1, count * num_bytes), np.uint8).reshape(count, num_bytes)


class TheirTier:
    """vLLM's file tier over an array of blocks, [blocks, bytes], which it fills and reads."""

    def __init__(self, modules: Any, root: Path, rows: np.ndarray) -> None:
        self._m, self._num_jobs = modules, 0
        parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["all"])],
            parallel=SimpleNamespace(**parallel, rank=0, is_parallelism_agnostic=True),
            model=SimpleNamespace(name="bench", dtype="float16"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        self._request = modules.base.ReqContext("bench")
        self._tier = modules.manager.FileSystemTierManager(spec, memoryview(rows), "fs", str(root))

    def path_of(self, key: bytes) -> Path:
        return Path(self._tier.file_mapper.get_file_name(self._key(key)))

    def _key(self, key: bytes) -> Any:
        return self._m.base.make_offload_key(key, 0)

    def run(self, what: str, keys: Sequence[bytes], size: int) -> tuple[float, int]:
        """Stores or loads blocks 0, 1, ..., `size` in one job. Returns the seconds, and the jobs that failed."""
        submit = self._tier.submit_store if what == "store" else self._tier.submit_load
        waiting, failed, began = 0, 0, time.perf_counter()
        for begin in range(0, len(keys), size):
            names = [self._key(key) for key in keys[begin : begin + size]]
            places = np.arange(begin, begin + len(names))
            submit(self._m.tiering.TransferJob(self._num_jobs, names, places, what == "load", self._request))
            self._num_jobs += 1
            waiting += 1
        while waiting:
            self._tier._pool.wait_idle()
            for result in self._tier.get_finished_jobs():
                waiting -= 1
                failed += not result.success
        return time.perf_counter() - began, failed

    def look_up(self, keys: Sequence[bytes]) -> int:
        """The number of blocks that the tier has. Asks until the tier has answered for all."""
        hit, retry = self._m.base.LookupResult.HIT, self._m.base.LookupResult.RETRY
        while True:
            found = [self._tier.lookup(self._key(key), self._request) for key in keys]
            if retry not in found:
                return sum(one is hit for one in found)
            self._tier.on_schedule_end(None)
            time.sleep(0.0005)

    def close(self) -> None:
        self._tier.shutdown()


class OurTier:
    """The disk tier with the same calls."""

    def __init__(self, folder: Path, rows: np.ndarray, options: DiskOptions) -> None:
        self.rows, self._tier = rows, DiskTier(folder, options)
        assert self._tier.wait_scanned()

    def run(self, what: str, keys: BlockKeys, size: int) -> tuple[float, int]:
        began, tickets = time.perf_counter(), []
        for begin in range(0, len(keys), size):
            own = keys.select(slice(begin, begin + size))
            blocks = Buffers([row.data for row in self.rows[begin : begin + len(own)]])
            if what == "store":
                tickets.append(self._tier.store(BlockRun.chain(own, self.rows.shape[1], blocks)))
                assert tickets[-1].wait()  # the tier's queue is bounded
            else:
                lengths = np.full(len(own), self.rows.shape[1])
                tickets.append(self._tier.load(own, lengths, blocks, deadline_s=600))
        assert all(ticket.wait() for ticket in tickets)
        failed = sum(ticket.report.num_done < ticket.num_blocks for ticket in tickets)
        if what == "store":
            self._tier.close(60)
        return time.perf_counter() - began, failed

    def num_corrupt(self, keys: BlockKeys) -> int:
        """Loads all blocks. Returns the number that the tier refused as damaged."""
        lengths = np.full(len(keys), self.rows.shape[1])
        ticket = self._tier.load(keys, lengths, Buffers([row.data for row in self.rows]), deadline_s=600)
        assert ticket.wait()
        return int((ticket.report.outcomes == Outcome.CORRUPT).sum())

    def look_up(self, keys: BlockKeys) -> int:
        return int(self._tier.lookup(keys).sum())

    def close(self) -> None:
        self._tier.close(60)


class Rounds:
    """The same bytes, stored and loaded by both tiers."""

    def __init__(self, modules: Any, folder: Path, num_mb: int) -> None:
        self.modules, self.ours, self.theirs = modules, folder / "ours", folder / "theirs"
        self.keys, self.rows = payloads(num_mb)
        self.options = options_for(self.rows.nbytes)
        self.their_keys = [key.tobytes() for key in self.keys.keys]
        self._source = whole_pages(*self.rows.shape)
        self._source[:] = self.rows
        self.samples: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float, num_failed: int = 0) -> None:
        assert not num_failed, f"{name}: {num_failed} jobs failed"
        self.samples.setdefault(name, []).append(seconds)

    def store_ours(self) -> None:
        shutil.rmtree(self.ours, ignore_errors=True)
        self.note("store", *OurTier(self.ours, self.rows, self.options).run("store", self.keys, PREFIX_BLOCKS))

    def store_theirs(self) -> None:
        shutil.rmtree(self.theirs, ignore_errors=True)
        tier = TheirTier(self.modules, self.theirs, self._source)
        self.note("vllm_store", *tier.run("store", self.their_keys, PREFIX_BLOCKS))
        tier.close()

    def load_ours(self) -> None:
        out, segments = np.ones_like(self.rows), sorted(self.ours.glob("v1/*/*.fwseg"))
        drop_from_page_cache(segments)
        began = time.perf_counter()
        tier = OurTier(self.ours, out, self.options)
        assert tier.look_up(self.keys) == len(self.keys)
        self.note("restart", time.perf_counter() - began)
        self.note("load_prefix", *tier.run("load", self.keys.select(slice(0, PREFIX_BLOCKS)), PREFIX_BLOCKS))
        drop_from_page_cache(segments)
        self.note("load", *tier.run("load", self.keys, PREFIX_BLOCKS))
        tier.close()
        assert np.array_equal(out, self.rows)

    def load_theirs(self) -> None:
        out = whole_pages(*self.rows.shape)
        out[:] = 1
        began = time.perf_counter()
        tier = TheirTier(self.modules, self.theirs, out)
        assert tier.look_up(self.their_keys) == len(self.keys)
        self.note("vllm_restart", time.perf_counter() - began)
        self.note("vllm_load_prefix", *tier.run("load", self.their_keys[:PREFIX_BLOCKS], PREFIX_BLOCKS))
        self.note("vllm_load", *tier.run("load", self.their_keys, PREFIX_BLOCKS))
        tier.close()
        assert np.array_equal(out, self.rows)

    def run(self, rounds: int) -> dict[str, float]:
        for number in range(rounds):
            for pair in ((self.store_ours, self.store_theirs), (self.load_ours, self.load_theirs)):
                for run in pair[:: 1 if number % 2 else -1]:
                    run()
        medians = {name: statistics.median(values) for name, values in self.samples.items()}
        prefix_bytes = PREFIX_BLOCKS * self.rows.shape[1]
        figures = {}
        for name, num_bytes in (
            ("store", self.rows.nbytes),
            ("load", self.rows.nbytes),
            ("load_prefix", prefix_bytes),
        ):
            for whose in ("", "vllm_"):
                figures[f"beside_{whose}{name}_mb_s"] = num_bytes / 1e6 / medians[whose + name]
            figures[f"{name}_over_vllm"] = medians["vllm_" + name] / medians[name]
        for whose in ("", "vllm_"):
            figures[f"beside_{whose}restart_ms"] = 1e3 * medians[whose + "restart"]
        figures["restart_over_vllm"] = medians["vllm_restart"] / medians["restart"]
        return figures


def vllm_figures(folder: Path, source: str, num_mb: int, rounds: int) -> dict[str, float | str]:
    """Figures of both tiers on about `num_mb` megabytes, or why there are none."""
    folder.mkdir(parents=True)
    try:
        where, version = find_vllm(source, folder)
        sys.meta_path.insert(0, _StandIns(where))
        names = {"base": ".base", "tiering": ".tiering.base", "manager": ".tiering.fs.manager", "io": ".tiering.fs.io"}
        modules = SimpleNamespace(**{name: importlib.import_module(THEIR_TIER + end) for name, end in names.items()})
        TheirTier(modules, folder / "probe", whole_pages(1, BLOCK_BYTES)).close()
    except Exception as error:  # whatever another release does: the figures are left out, with the reason
        return {"vllm": f"not measured: {type(error).__name__}: {error}"}
    both = Rounds(modules, folder, num_mb)
    figures = both.run(rounds)
    figures |= _flips(both)
    return {"vllm": version, "vllm_in_c": float(modules.io._HAS_FSIO_C), **figures}


def _flips(both: Rounds) -> dict[str, float]:
    """Flips a bit of each of some blocks in the files of both tiers. Returns the number that each tier refuses."""
    keys, rows, ours = both.keys, both.rows, both.ours
    rng, chosen = np.random.default_rng(4), keys.select(slice(0, NUM_FLIPS))
    places = rng.integers(0, rows.shape[1], NUM_FLIPS)
    out = whole_pages(NUM_FLIPS, rows.shape[1])
    their_tier = TheirTier(both.modules, both.theirs, out)
    (segment, *_) = sorted(ours.glob("v1/*/*.fwseg"))
    content = bytearray(segment.read_bytes())
    for number, place in enumerate(places.tolist()):
        path = their_tier.path_of(chosen.keys[number].tobytes())
        damaged = bytearray(path.read_bytes())
        damaged[place] ^= 1
        path.write_bytes(damaged)
        at = content.find(rows[number].tobytes())
        content[at + place] ^= 1
    segment.write_bytes(content)
    _, num_failed = their_tier.run("load", [key.tobytes() for key in chosen.keys], 1)
    wrong = int((out != rows[:NUM_FLIPS]).any(axis=1).sum())
    their_tier.close()
    tier = OurTier(ours, np.zeros_like(rows[:NUM_FLIPS]), both.options)
    caught = tier.num_corrupt(chosen)
    tier.close()
    return {
        "beside_flips": NUM_FLIPS,
        "beside_flips_caught": caught,
        "beside_vllm_flips_caught": num_failed,
        "beside_vllm_blocks_served_wrong": wrong,
    }

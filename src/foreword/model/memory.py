"""The memory that KV blocks may take. On a GPU it is measured by running the largest possible step once.

total      |---------------------------- utilisation -----------------------------|-- left free --|
           |- others -|- weights -|- a step's activations -|- graphs -|--- pool ---|
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from foreword.batch import Batch, Entries
from foreword.cache import TokenSequence
from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.model.gpu.device import Device
from foreword.model.gpu.runner import DeviceRunner, RunnerLimits
from foreword.model.layout import CacheLayout
from foreword.model.loader import LoadedModel
from foreword.model.machine import available_cpu_bytes
from foreword.model.storage import KVStorage
from foreword.request import Request, SamplingParams

GIB = 2**30
CPU_DEFAULT_SHARE = 0.25
CPU_DEFAULT_LIMIT_BYTES = 4 * GIB
CPU_DEFAULT_LEAST_BYTES = GIB
"""The default limit of KV blocks on a CPU is at least this many bytes, even if the requests that run together need
less. The rest keeps the prefixes of earlier requests.
"""
GPU_DEFAULT_SHARE = 0.9


def kv_cache_bytes(
    options: ModelConfig, measure: Callable[[], MemoryUse] | None, most_running_bytes: int | None = None
) -> int:
    """Decide on the memory for KV blocks, after the weights were loaded. Raises ConfigError if nothing is left.

    `measure` measures what takes a GPU's memory; None on a CPU. `most_running_bytes`: the bytes of KV that requests
    hold when as many as allowed run together.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    share = options.gpu_memory_utilization
    if measure is not None:
        return measure().pool_bytes(share or GPU_DEFAULT_SHARE)
    available = available_cpu_bytes()
    if share is not None:
        return int(share * available)
    limit = CPU_DEFAULT_LIMIT_BYTES
    if most_running_bytes is not None:  # the same size again keeps the KV of ended requests
        limit = min(limit, max(CPU_DEFAULT_LEAST_BYTES, 2 * most_running_bytes))
    return min(int(CPU_DEFAULT_SHARE * available), limit)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes of a device's memory, divided by what takes them."""

    total_bytes: int
    others_bytes: int
    """Bytes that other programs take, and that the driver takes for this program."""
    weights_bytes: int
    activations_bytes: int
    """The most bytes that one step takes, including sampling."""
    graphs_bytes: int = 0

    def pool_bytes(self, utilization: float) -> int:
        """The bytes that are left for KV if all programs together use this share of the device's memory.
        Raises ConfigError, with remedies, if nothing is left.
        """
        needed = self.others_bytes + self.weights_bytes + self.activations_bytes + self.graphs_bytes
        num_bytes = int(utilization * self.total_bytes) - needed
        if num_bytes > 0:
            return num_bytes
        raise ConfigError(
            f"gpu_memory_utilization={utilization} of {self.total_bytes / GIB:.2f} GiB leaves nothing for KV: weights "
            f"take {self.weights_bytes / GIB:.2f}, a step {self.activations_bytes / GIB:.2f}, recorded steps "
            f"{self.graphs_bytes / GIB:.2f}, other programs {self.others_bytes / GIB:.2f} GiB; raise it, lower "
            "max_num_batched_tokens or max_num_seqs, end other programs, or take a larger GPU or a smaller model"
        )


def measure_memory_use(
    model: LoadedModel, layout: CacheLayout, device: Device, limits: RunnerLimits, max_num_batched_tokens: int
) -> MemoryUse:
    """With a pool of one block, run the largest step and record the largest graph; return the memory that they take."""
    storage = KVStorage(layout, 1, device.torch_device)
    device.watch_peak()
    before = device.memory()
    runner = DeviceRunner(model, storage, device, RunnerLimits(limits.max_tokens, limits.max_num_seqs, ()))
    runner.launch(largest_step(layout, storage, limits, max_num_batched_tokens)).result()
    after = device.memory()
    device.watch_peak()
    graphs = 0
    if limits.sizes:
        idle = device.memory().reserved
        runner.limits = RunnerLimits(limits.max_tokens, limits.max_num_seqs, tuple(limits.sizes[-1:]))
        runner.record()
        graphs = max(0, device.memory().reserved - idle)
    use = MemoryUse(
        total_bytes=after.total,
        others_bytes=max(0, after.total - after.free - after.reserved),
        weights_bytes=before.reserved,
        activations_bytes=max(0, after.peak - before.reserved),
        graphs_bytes=graphs,
    )
    logger.info("memory without KV: %s", use)
    return use


def largest_step(layout: CacheLayout, storage: KVStorage, limits: RunnerLimits, max_num_batched_tokens: int) -> Batch:
    """The largest step: the most tokens, the longest sequences, and the most requests that sample.

    It writes to the scrap block and reads from it.
    """
    num_requests = min(limits.max_num_seqs, max_num_batched_tokens)
    lengths = [1] * num_requests
    num_spare = max_num_batched_tokens - num_requests
    for number in range(num_requests):
        more = min(num_spare, limits.max_tokens - 1)
        lengths[number] += more
        num_spare -= more
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=1)
    tables = tuple(
        np.full((num_requests, -(-max(lengths) // spec.block_size)), storage.scrap_block, np.int32)
        for spec in layout.specs
    )
    sequences = (
        TokenSequence(f"profile-{n}", np.zeros(size, np.int32), block_size=16) for n, size in enumerate(lengths)
    )
    entries = Entries.of_prompts([Request(sequence, params, max_tokens=1) for sequence in sequences])
    batch = Batch.of_spans([np.zeros(length, np.int32) for length in lengths], [0] * num_requests, tables)
    return replace(batch, entries=entries)

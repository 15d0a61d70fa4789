"""How much memory the pool gets: arithmetic on what a GPU's memory is needed for, and the step that measures it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_device import FakeDevice
from foreword.cache import KVCacheManager, TokenSequence
from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.model.gpu.runner import RunnerLimits
from foreword.model.layout import LayoutOptions
from foreword.model.machine import available_cpu_bytes, total_cpu_bytes
from foreword.model.memory import (
    GPU_DEFAULT_SHARE,
    MemoryUse,
    kv_cache_bytes,
    largest_step,
    measure_memory_use,
)
from foreword.model.storage import MAX_SLOTS, KVStorage
from tiny_models import TinyModels

GIB = 2**30
USE = MemoryUse(80 * GIB, GIB // 2, 16 * GIB, 3 * GIB, GIB // 2)


def test_the_pool_gets_what_weights_activations_graphs_and_others_leave_of_the_share() -> None:
    assert USE.pool_bytes(0.5) == 20 * GIB
    assert USE.pool_bytes(1.0) == 60 * GIB
    assert MemoryUse(10 * GIB, 0, 4 * GIB, GIB).pool_bytes(0.9) == 4 * GIB


def test_a_share_that_leaves_nothing_is_refused_with_what_takes_it_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError,
        match=r"gpu_memory_utilization=0.2 of 80.00 GiB leaves nothing for KV: weights take 16.00, a step 3.00, "
        r"recorded steps 0.50, other programs 0.50 GiB; raise it, lower max_num_batched_tokens",
    ):
        USE.pool_bytes(0.2)


def test_memory_that_was_asked_for_is_not_measured() -> None:
    def measure() -> MemoryUse:
        raise AssertionError("not needed")

    assert kv_cache_bytes(ModelConfig("m", kv_cache_memory_bytes=123), measure) == 123


def test_a_gpu_uses_nine_tenths_unless_told_otherwise() -> None:
    assert kv_cache_bytes(ModelConfig("m"), lambda: USE) == USE.pool_bytes(GPU_DEFAULT_SHARE)
    assert kv_cache_bytes(ModelConfig("m", gpu_memory_utilization=0.5), lambda: USE) == USE.pool_bytes(0.5)


def test_on_a_cpu_the_share_is_of_what_is_available() -> None:
    share = kv_cache_bytes(ModelConfig("m", gpu_memory_utilization=0.01), None)
    assert share == pytest.approx(0.01 * available_cpu_bytes(), rel=0.5)
    assert 0 < share < total_cpu_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroups_limit_counts_and_what_it_keeps_of_files_is_free(tmp_path: Path, version: int) -> None:
    own, above = (tmp_path / f"sys/fs/cgroup/{name}" for name in ("pod/box", "pod"))
    own.mkdir(parents=True)
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 64000000 kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n" if version == 2 else "5:memory:/pod/box\n")
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (tmp_path / "proc/self/mountinfo").write_text(f"35 24 0:30 / /sys/fs/cgroup rw - {kind}\n")
    assert available_cpu_bytes(tmp_path) == 16 * GIB
    (above / limit).write_text(f"{8 * GIB}\n")
    (above / used).write_text(f"{8 * GIB}\n")
    assert available_cpu_bytes(tmp_path) == 0
    (above / "memory.stat").write_text(f"anon 5\ninactive_file {4 * GIB}\nactive_file {GIB}\n")
    assert available_cpu_bytes(tmp_path) == 5 * GIB
    (own / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert available_cpu_bytes(tmp_path) == 5 * GIB
    (own / limit).write_text(f"{GIB}\n")
    assert total_cpu_bytes(tmp_path) == GIB


def test_the_default_on_a_cpu_follows_what_requests_can_use() -> None:
    available = available_cpu_bytes()
    if available < 24 * GIB // 2:
        pytest.skip("a quarter of this machine's free memory is the least limit")
    assert kv_cache_bytes(ModelConfig("m"), None, 1000) == GIB, "old prefixes have room"
    assert kv_cache_bytes(ModelConfig("m"), None, 3 * GIB // 4) == 3 * GIB // 2
    assert GIB < kv_cache_bytes(ModelConfig("m"), None, 1 << 50) <= 4 * GIB


def test_the_largest_step_has_as_many_tokens_and_samples_as_a_step_can(tiny_models: TinyModels) -> None:
    model = tiny_models.loaded("gemma2")
    layout = model.plan_layout(LayoutOptions(4))
    storage = KVStorage(layout, 1, model.device)
    for most_tokens, most_requests, longest in ((512, 8, 300), (64, 100, 50), (40, 4, 1000)):
        batch = largest_step(layout, storage, RunnerLimits(longest, most_requests), most_tokens)
        assert batch.num_tokens == min(most_tokens, most_requests * longest)
        assert sum(entry.samples for entry in batch.entries) == len(batch.entries) == min(most_requests, most_tokens)
        assert batch.positions.max() < longest
        for group_id, spec in enumerate(layout.specs):
            assert set(storage.slot_mapping(batch, group_id) // spec.block_size) == {storage.scrap_block}


def test_measuring_takes_weights_peak_and_graphs_apart(tiny_models: TinyModels) -> None:
    """The fake device tells what was taken before the step, after it, before recording and after it."""
    model = tiny_models.loaded("llama")
    device = FakeDevice(total_bytes=10 * GIB, taken_bytes=[2 * GIB, 5 * GIB, 3 * GIB, 4 * GIB])
    layout = model.plan_layout(LayoutOptions(16))
    limits = RunnerLimits(128, 4, (16,))
    with pytest.MonkeyPatch.context() as patch:  # the compiled kernel's steps are not recorded
        patch.setattr("foreword.model.gpu.runner.why_not_recordable", lambda *_: "not here")
        use = measure_memory_use(model, layout, device, limits, 64)
    assert use == MemoryUse(10 * GIB, 0, 2 * GIB, 3 * GIB, GIB)


def test_more_slots_than_their_numbers_can_name_are_refused(tiny_models: TinyModels) -> None:
    layout = tiny_models.loaded("llama").plan_layout(LayoutOptions(16))
    with pytest.raises(ConfigError, match="lower kv_cache_memory_bytes"):
        KVStorage(layout, MAX_SLOTS // 16 + 1, torch.device("meta"))
    KVStorage(layout, MAX_SLOTS // 16 - 1, torch.device("meta"))
    assert np.int64(MAX_SLOTS) == 2**31 - 1


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "llama4_text", "mistral"])
def test_a_pool_holds_the_tokens_that_it_says(tiny_models: TinyModels, name: str) -> None:
    """Short prompts fill the pool: none of their blocks is beyond a window, so no group can do without one."""
    layout = tiny_models.loaded(name).plan_layout(LayoutOptions(4))
    num_blocks = 60 * len(layout.groups)
    manager = KVCacheManager(num_blocks, block_size=layout.block_size, groups=layout.specs)
    length, num_held = layout.hit_granularity, 0
    while manager.get_num_free_blocks() >= layout.blocks_of(length):
        request_id = str(num_held)
        tokens = np.full(length, num_held, np.int32)
        sequence = TokenSequence(request_id, tokens, block_size=layout.block_size)
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, length, hit) is not None
        num_held += 1
    told = layout.tokens_in(num_blocks)
    assert num_held * length <= told
    assert told - num_held * length <= 2 * length * len(layout.groups)


@pytest.mark.parametrize(("name", "num_groups"), [("qwen2", 1), ("gemma3_text", None)])
def test_groups_of_layers_share_the_pool(tiny_models: TinyModels, name: str, num_groups: int | None) -> None:
    layout = tiny_models.loaded(name).plan_layout(LayoutOptions(16))
    assert num_groups in (None, len(layout.groups))
    assert layout.tokens_in(1000) == 1000 * 16 // len(layout.groups)
    assert layout.blocks_of(17) == 2 * len(layout.groups)

"""Writes vllm_streams.json.gz: batches of events in vLLM's own bytes, and what its lookups found.

Run with a Python that has vLLM 0.33: it drives vLLM's own KVCacheManager and encoder, without a model.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.request import Request

BLOCK, UNIT = 16, 4


def attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def states() -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((8, 32),), dtypes=(torch.float32,), mamba_cache_mode="align")


class Engine:
    """vLLM's cache manager, and a scheduler that runs one request after the other."""

    def __init__(self, specs: list[KVCacheSpec], num_blocks: int, unit: int) -> None:
        groups = [KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(config, 4096, BLOCK, unit, enable_kv_cache_events=True)
        self.hasher = get_request_block_hasher(unit, sha256_cbor)
        self.has_states = unit < BLOCK
        self.batches: list[str] = []
        self.truth: list[dict[str, Any]] = []
        self.time = 1000.0

    def serve(self, prompt: list[int], *, answer: int = 0, full: bool = True, **more: Any) -> None:
        adapter = more.pop("adapter", None)
        extra = {"kv_cache_report_mode": "full"} if full else None
        request = Request(
            f"r{len(self.truth)}",
            prompt,
            SamplingParams(max_tokens=max(1, answer), extra_args=extra),
            None,
            block_hasher=self.hasher,
            lora_request=LoRARequest(adapter, 1, "nowhere") if adapter else None,
            **more,
        )
        self.manager.new_step_starts()
        try:
            blocks, found, _ = self.manager.get_computed_blocks(request)
        except IndexError:  # vLLM 0.33 cannot report a hit inside the last block of a prompt
            return
        # vLLM's scheduler cuts prompts of models with states after the last whole block, and after the last whole unit.
        end = found
        units = (BLOCK, UNIT) if self.has_states else ()
        while end < len(prompt):
            stops = [*((len(prompt) - 1) // unit * unit for unit in units), len(prompt)]
            step = min(stop for stop in stops if stop > end) - end
            if end == found:
                got = self.manager.allocate_slots(request, step, found, blocks)
            else:
                got = self.manager.allocate_slots(request, step)
            assert got is not None
            end += step
            request.num_computed_tokens = end
            self.publish()
            self.manager.new_step_starts()
        for at in range(answer):
            request.append_output_token_ids(900 + at)
            assert self.manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            self.publish()
        self.manager.free(request)
        self.truth.append({"found": found, "prompt": len(prompt), "session": more.get("session_id")})
        self.time += 60.0

    def publish(self) -> None:
        self.time += 0.1
        _, retained = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(retained)
        if events := self.manager.take_events():
            batch = KVEventBatch(ts=round(self.time, 3), events=events, data_parallel_rank=0)
            self.batches.append(msgspec.msgpack.encode(batch).hex())


def workload(engine: Engine, *, full: bool) -> None:
    system = list(range(100, 150))
    engine.serve([1, 2, 3, 4, 5, 6], full=full)  # shorter than a block: a tail alone
    engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9], full=full)  # its tail comes after the tail before
    engine.serve([*system, *range(200, 220)], full=full, session_id="a")
    engine.serve([*system, *range(300, 330)], full=full, session_id="b", answer=40)
    engine.serve([*system, *range(200, 220)], full=full, session_id="a")  # whole
    engine.serve([*system, *range(200, 220), *range(600, 640)], full=full, session_id="a")  # goes on inside a block
    engine.serve(system[:48], full=full)  # whole blocks exactly
    engine.serve([*system, *range(400, 410)], full=full, cache_salt="tenant")
    engine.serve([*system, *range(400, 410)], full=full, adapter="sql")
    engine.serve([*system[:20], *range(500, 560)], full=full, session_id="b")  # parts inside the second block
    engine.manager.reset_prefix_cache()
    engine.publish()
    engine.serve([*system, *range(200, 220)], full=full, session_id="a")


init_none_hash(sha256_cbor)
streams = {}
for name, specs, unit in (
    ("one group", [attention()], BLOCK),
    ("attention, states", [attention(), states()], UNIT),
    ("states, attention", [states(), attention()], UNIT),
):
    for full in (False, True):
        engine = Engine(specs, 400, unit)
        workload(engine, full=full)
        streams[f"{name}, {'full' if full else 'incremental'}"] = {"batches": engine.batches, "truth": engine.truth}
engine = Engine([attention()], 12, BLOCK)
for at in range(6):  # three conversations take turns in a pool of 11 blocks
    engine.serve([*range(100, 120), *range(1000 * (at % 3 + 1), 1000 * (at % 3 + 1) + 90)])
streams["too small"] = {"batches": engine.batches, "truth": engine.truth}
Path(sys.argv[1]).write_bytes(gzip.compress(json.dumps(streams).encode(), mtime=0))
for name, one in streams.items():
    print(name, len(one["batches"]), [(t["found"], t["prompt"]) for t in one["truth"]])

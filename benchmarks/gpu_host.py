"""The host's time for a decoding step on a GPU, measured without a GPU.

    python benchmarks/gpu_host.py [--batch 256] [--context 1024] [--steps 64] [--temperature 0] [--json]

The engine, scheduler, cache and GPU runner are the real ones. The device is this processor, which replays no graphs and
samples from 64 words. The figures contain Python, numpy, and the time torch takes to call operations. They do not
contain waiting and the driver's part of launches and copies, which only a GPU can show (`gpu.py`). They do not contain
text either: requests have no tokenizer.

Figures are processor time of one thread. A part's time excludes that of the parts inside it. They are medians over
steps that were planned while the previous step ran. What the timers cost is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foreword import SamplingParams
from foreword.cache import KVCacheManager
from foreword.config import ModelConfig, SchedulerConfig
from foreword.engine import Engine, ModelLimits, Prompt
from foreword.kernels.triton.attention import TritonAttention
from foreword.model.checkpoint.random_weights import save_random_model
from foreword.model.gpu.decode_graphs import DecodeGraphs
from foreword.model.gpu.device import DeviceMemory
from foreword.model.gpu.runner import DeviceRunner, ExpectedTokens, PendingResult, RunnerLimits, StepBuffer
from foreword.model.layout import LayoutOptions
from foreword.model.loader import load_model
from foreword.model.runner import ForwardPass
from foreword.model.sampling.readout import Readout
from foreword.model.storage import KVStorage
from step_profile import Clock
from workloads import QUICK_SHAPE

BLOCK_SIZE = 16
MOST_TOKENS = 32_784
"""The longest request in tokens, for which graphs are made, as in gpu.py."""
SHAPE = replace(QUICK_SHAPE, vocab_size=64)


class Nothing:
    """Stands for an event that has happened, and for a graph without work."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def replay(self) -> None: ...


class IdleDevice:
    """A device on this processor whose graphs do nothing."""

    torch_device = torch.device("cpu")

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Nothing:
        return Nothing()

    def capture(self, work: Callable[[], None]) -> Nothing:
        return Nothing()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(0, 0, 0, 0)

    def watch_peak(self) -> None: ...


class PromptsForNothing(DeviceRunner):
    """A model that computes nothing for prompts."""

    def _run(self, passes: list[ForwardPass]) -> Tensor:
        rows = sum(one.num_kept for one in passes)
        return torch.zeros(rows, self._model.vocab_size)


def build(folder: str, batch: int, length: int) -> Engine:
    """An engine for `batch` requests of `length` tokens."""
    loaded = load_model(ModelConfig(folder, dtype="bfloat16", attention_kernel="reference"))
    model = replace(loaded, kernel=TritonAttention())  # plans; nothing attends
    layout = model.plan_layout(LayoutOptions(BLOCK_SIZE))
    num_blocks = batch * (length // BLOCK_SIZE + 2)
    manager = KVCacheManager(num_blocks, block_size=BLOCK_SIZE)
    storage = KVStorage(layout, num_blocks, torch.device("cpu"))
    runner = PromptsForNothing(model, storage, IdleDevice(), RunnerLimits(MOST_TOKENS, batch))
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8192)
    return Engine(manager, config, runner, ModelLimits(model.vocab_size, length))


def watch_parts(clock: Clock, engine: Engine) -> None:
    clock.watch("next step planned: requests, blocks, batch", engine.scheduler, "schedule_after")
    clock.watch("tokens recorded", engine.scheduler, "commit")
    clock.watch("outputs", engine._outputs, "collect")
    clock.watch("attention planned", DecodeGraphs, "_plans")
    clock.watch("rows: tokens, positions, slots", DecodeGraphs, "_row_array")
    clock.watch("sampling planned", Readout, "make")
    clock.watch("arrays packed", StepBuffer, "put")
    clock.watch("model queued", DecodeGraphs, "replay")
    clock.watch("sampling queued", Readout, "take")
    clock.watch("expected tokens queued", ExpectedTokens, "fill")
    clock.watch("results read", PendingResult, "result")
    clock.watch("rest of the launch", engine._runner, "launch")


def run(batch: int, context: int, steps: int, temperature: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        save_random_model(Path(folder), SHAPE)
        engine = build(folder, batch, context + steps + 64)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=steps + 60, ignore_eos=True)
    outputs = []
    for number in range(batch):
        prompt = Prompt(rng.integers(0, SHAPE.vocab_size, context).astype(np.int32))
        outputs.append(engine.add_request(str(number), prompt, params))
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    clock = Clock(time.thread_time)
    watch_parts(clock, engine)
    step = clock.timed("engine", engine.step)
    for _ in range(4):
        step()
    samples: list[dict[str, float]] = []
    for _ in range(steps):
        clock.own.clear()
        assert len(step()) == batch
        samples.append(dict(clock.own))
    parts = {part: 1e3 * statistics.median(sample[part] for sample in samples) for part in samples[0]}
    total = 1e3 * statistics.median(sum(sample.values()) for sample in samples)
    assert isinstance(engine._runner, DeviceRunner)
    return {
        "parts_ms": parts,
        "host_ms": total,
        "copied_in_bytes": engine._runner.buffer.num_bytes,
        "batch": batch,
        "context": context,
        "temperature": temperature,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="requests that decode together (default: 256)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--steps", type=int, default=64, help="steps whose medians are taken (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy, as gpu.py decodes (default)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    args = parser.parse_args()
    for name in ("batch", "context", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is too few; use at least 1")
    report = run(args.batch, args.context, args.steps, args.temperature)
    title = f"host time of a decoding step of {args.batch} requests, without a GPU: {report['host_ms']:.2f} ms"
    table = Table(box=SIMPLE_HEAD, title=title)
    for name in ("part", "ms", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part, own in sorted(report["parts_ms"].items(), key=lambda item: -item[1]):
        table.add_row(part, f"{own:.3f}", f"{own / report['host_ms']:.1%}")
    console = Console(stderr=args.json, width=100)
    console.print(table)
    console.print(f"copied to the device: {report['copied_in_bytes']:,} bytes")
    print(json.dumps({"benchmark": "gpu_host", "is_gpu_figure": False} | report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

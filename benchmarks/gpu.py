"""The limits of a GPU, and how close foreword comes to them: one command, a table, one JSON line.

    python benchmarks/gpu.py                 a random model of Qwen2-1.5B's shape on the first CUDA device
    ... --shape 7b                           Qwen2.5-7B's shape, for which the targets are set
    ... --without transformers,two_phase     leave sections out

Sections, each in the same process and after warming up:

1. ceilings       copy bandwidth (bytes read and written) and the rate of a large bfloat16 matrix product
2. decode         steps of 1 to 256 requests: bytes that a step must read (weights once, every request's KV) per second,
                  as a share of the bandwidth; and the host's time for a step without the time it waits for the device
3. prefill        operations per second of a long prompt, as a share of the matrix rate
4. first_token    time to the first token of N + 16 tokens, the N cached or not
5. two_phase      attention alone, 32 heads of 128, 32 requests whose contexts are shared (ChunkAttention's Table 3):
                  KV read once, beside the same blocks read by every request, and beside a copy for each request
6. transformers   the same weights: prefill and decoding with transformers' own cache and SDPA

Decoding and prefill are measured with `exact=True` (equal bits with and without the cache) and with `exact=False`.
Without a CUDA device the script says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreword import LLM, SamplingParams
from foreword.batch import NO_ENTRIES, Batch
from foreword.config import ModelConfig
from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import AttentionKernel, make_kernel
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, RandomModelShape, save_random_model
from foreword.model.gpu.runner import DeviceRunner
from foreword.model.loader import load_model

SHAPES = {
    "0.5b": QWEN2_0_5B,
    "1.5b": RandomModelShape(28, 1536, 12, 2, 8960, 151_936, 32_784),
    "7b": RandomModelShape(28, 3584, 28, 4, 18_944, 152_064, 32_784),
}
NOT_A_GPU = "run on the CPU to show that the script runs: NOT ONE FIGURE HERE IS A GPU FIGURE"
BLOCK_SIZE = 16
FRESH_TOKENS = 16
TARGETS = {
    "decode_64_share_of_bandwidth": (0.7, "at least"),
    "prefill_share_of_matrix_rate": (0.5, "at least"),
    "two_phase_4096_ratio": (4.8, "at least"),
    "decode_256_host_ms": (1.0, "at most"),
}
"""The targets on an H200-class card: a figure's bound, and on which side of it the figure should be."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, the batches and the prompts."""

    shape: RandomModelShape
    copy_bytes: int
    matrix: int
    batches: tuple[int, ...]
    context: int
    """Tokens of each request before decoding begins."""
    steps: int
    prefill: int
    first_token: tuple[int, ...]
    shared: tuple[int, ...]
    attention: tuple[int, int, int]
    """Requests, heads, head size."""
    rounds: int

    @classmethod
    def full(cls, shape: RandomModelShape) -> Sizes:
        lengths = (1024, 2048, 4096, 8192, 16_384, 32_768 - FRESH_TOKENS)
        return cls(
            shape, 2**31, 8192, (1, 4, 16, 64, 128, 256), 1024, 32, 8192, lengths, (1024, 2048, 4096), (32, 32, 128), 5
        )

    @classmethod
    def quick(cls) -> Sizes:
        shape = RandomModelShape(2, 128, 2, 1, 256, 1000, 1024)
        return cls(shape, 2**20, 128, (1, 4), 32, 4, 96, (64,), (512,), (4, 4, 32), 2)


class Clock:
    """Times calls, including the device work that they queue."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, work: Callable[[], Any]) -> float:
        """Milliseconds of one call."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def median(self, work: Callable[[], Any], repeats: int = 1) -> float:
        """Milliseconds of one call; the first round warms up."""

        def several() -> None:
            for _ in range(repeats):
                work()

        self.once(several)
        return statistics.median(self.once(several) for _ in range(self.rounds)) / repeats


@dataclass
class Bench:
    """What all sections share."""

    device: torch.device
    sizes: Sizes
    clock: Clock
    folder: str
    figures: dict[str, float]

    def put(self, name: str, value: float) -> None:
        self.figures[name] = value

    @contextmanager
    def llm(self, *, exact: bool, max_num_seqs: int) -> Any:
        sizes = self.sizes
        options: dict[str, Any] = {}
        if self.device.type != "cuda":
            options["kv_cache_memory_bytes"] = 2**26
        with LLM(
            self.folder,
            device=str(self.device),
            dtype="bfloat16",
            exact=exact,
            self_check=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=min(8192, sizes.shape.max_positions),
            eviction_policy="lru",
            explain_misses=False,
            **options,
        ) as llm:
            yield llm
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prompt(self, seed: int, num_tokens: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(0, self.sizes.shape.vocab_size, num_tokens).tolist()
        return tokens


# ---------------------------------------------------------------------------------------------- sections


def ceilings(bench: Bench) -> None:
    source = torch.zeros(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copied_ms = bench.clock.median(lambda: target.copy_(source), repeats=4)
    bench.put("copy_gbytes_per_s", 2 * bench.sizes.copy_bytes / copied_ms / 1e6)
    size = bench.sizes.matrix
    left, right = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    product_ms = bench.clock.median(lambda: left @ right, repeats=4)
    bench.put("matrix_tflops", 2 * size**3 / product_ms / 1e9)


class Waiting:
    """Measures how long the host waits for results. The rest of a step is the host's own time."""

    def __init__(self, llm: LLM) -> None:
        self.ms = 0.0
        runner: Any = llm.engine._runner
        if isinstance(runner, DeviceRunner):
            mark = runner._accelerator.mark
            runner._accelerator.mark = lambda: self._watched(mark())  # type: ignore[method-assign]
        else:  # what computes while the host waits, on a CPU
            runner._run = self._timed(runner._run)

    def _watched(self, event: Any) -> Any:
        event.synchronize = self._timed(event.synchronize)
        return event

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args)
            finally:
                self.ms += 1e3 * (time.perf_counter() - start)

        return call


def decode(bench: Bench, exact: bool) -> None:
    sizes = bench.sizes
    suffix = "" if exact else "_inexact"
    with bench.llm(exact=exact, max_num_seqs=max(sizes.batches)) as llm:
        waiting = Waiting(llm)
        for batch in sizes.batches:
            if batch * (sizes.context + 3 * sizes.steps) > llm.engine.manager.num_blocks * BLOCK_SIZE:
                continue  # the pool does not hold that number of contexts
            # The first requests decode while the last ones' prompts are computed, a few in a step.
            ahead = batch * sizes.context // llm.config.scheduler.max_num_batched_tokens
            params = SamplingParams(temperature=0.0, max_tokens=sizes.steps + 2 * ahead + 6, ignore_eos=True)
            llm.reset_prefix_cache()
            outputs = []
            for number in range(batch):
                prompt = llm._prompt({"prompt_token_ids": bench.prompt(1000 * batch + number, sizes.context)})
                outputs.append(llm.engine.add_request(f"decode-{batch}-{number}", prompt, params))
            while not all(output.outputs[0].token_ids for output in outputs):
                llm.engine.step()
            llm.engine.step()
            steps, hosts = [], []
            for _ in range(sizes.steps):
                waiting.ms, start = 0.0, time.perf_counter()
                moved = llm.engine.step()
                if len(moved) != batch or any(output.finished for output in outputs):
                    break  # the first of them end while the last ones' prompts are computed
                steps.append(1e3 * (time.perf_counter() - start))
                hosts.append(steps[-1] - waiting.ms)
            llm.engine.abort_all()
            if not steps:
                continue
            step_ms = statistics.median(steps)
            num_tokens = sum(sizes.context + len(output.outputs[0].token_ids) for output in outputs)
            read_bytes = _weight_bytes(sizes.shape) + num_tokens * _kv_bytes_per_token(sizes.shape)
            bench.put(f"decode_{batch}_ms{suffix}", step_ms)
            bench.put(f"decode_{batch}_tokens_per_s{suffix}", 1e3 * batch / step_ms)
            share = read_bytes / step_ms / 1e6 / bench.figures["copy_gbytes_per_s"]
            bench.put(f"decode_{batch}_share_of_bandwidth{suffix}", share)
            bench.put(f"decode_{batch}_host_ms{suffix}", statistics.median(hosts))


def prefill(bench: Bench, exact: bool) -> None:
    sizes = bench.sizes
    suffix = "" if exact else "_inexact"
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with bench.llm(exact=exact, max_num_seqs=8) as llm:
        seeds = iter(range(100))

        def run() -> None:
            llm.generate({"prompt_token_ids": bench.prompt(next(seeds), sizes.prefill)}, params)

        elapsed_ms = bench.clock.median(run)
    operations = _operations(sizes.shape, sizes.prefill)
    bench.put(f"prefill_{sizes.prefill}_ms{suffix}", elapsed_ms)
    share = operations / elapsed_ms / 1e9 / bench.figures["matrix_tflops"]
    bench.put(f"prefill_share_of_matrix_rate{suffix}", share)


def first_token(bench: Bench) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with bench.llm(exact=True, max_num_seqs=8) as llm:
        for length in bench.sizes.first_token:
            if length + FRESH_TOKENS + 1 > llm.engine.limits.max_model_len:
                continue
            times: dict[str, list[float]] = {"miss": [], "hit": []}
            for number in range(bench.clock.rounds + 1):
                llm.reset_prefix_cache()
                prefix = bench.prompt(17 * number + length, length)
                for kind, seed in (("miss", 1), ("hit", 2)):
                    prompt = prefix + bench.prompt(1000 * seed + number, FRESH_TOKENS)
                    outputs: list[Any] = []
                    ms = bench.clock.once(
                        lambda asked=prompt, got=outputs: got.extend(  # type: ignore[misc]
                            llm.generate({"prompt_token_ids": asked}, params)
                        )
                    )
                    cached = outputs[0].num_cached_tokens
                    assert (cached >= length) == (kind == "hit"), f"{cached} of {length} tokens were cached: {kind}"
                    if number:
                        times[kind].append(ms)
            for kind, each in times.items():
                bench.put(f"ttft_{kind}_{length}_ms", statistics.median(each))
            bench.put(f"ttft_{length}_ratio", statistics.median(times["miss"]) / statistics.median(times["hit"]))


def two_phase(bench: Bench) -> None:
    for shared in bench.sizes.shared:
        cases = {
            "shared": _attention(bench, shared, share=True, copies=False),
            "unshared": _attention(bench, shared, share=False, copies=False),
            "paged": _attention(bench, shared, share=False, copies=True),
        }
        results = {name: attend() for name, attend in cases.items()}
        assert all(torch.equal(result, results["shared"]) for result in results.values()), "bits differ"
        times = {name: bench.clock.median(attend, repeats=10) for name, attend in cases.items()}
        bench.put(f"two_phase_{shared}_ms", times["shared"])
        bench.put(f"two_phase_{shared}_ratio", times["paged"] / times["shared"])
        bench.put(f"two_phase_{shared}_ratio_same_blocks", times["unshared"] / times["shared"])


def transformers(bench: Bench) -> None:
    """The same weights in transformers' own code: SDPA, a DynamicCache, no graphs; prompts of equal length."""
    from transformers import AutoModelForCausalLM, DynamicCache

    sizes = bench.sizes
    model = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(bench.device).eval()
    with torch.inference_mode():
        tokens = torch.tensor([bench.prompt(1, sizes.prefill)], device=bench.device)
        prefilled_ms = bench.clock.median(
            lambda: model(tokens, past_key_values=DynamicCache(), logits_to_keep=1).logits.argmax(-1).cpu()
        )
        bench.put(f"transformers_prefill_{sizes.prefill}_ms", prefilled_ms)
        for batch in sizes.batches:
            prompts = [bench.prompt(1000 * batch + number, sizes.context) for number in range(batch)]
            try:
                cache, tokens = DynamicCache(), torch.tensor(prompts, device=bench.device)
                next_ids = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
                steps = []
                for _ in range(sizes.steps):
                    start = time.perf_counter()
                    next_ids = model(next_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
                    next_ids.cpu()
                    steps.append(1e3 * (time.perf_counter() - start))
            except torch.OutOfMemoryError:
                break
            bench.put(f"transformers_decode_{batch}_ms", statistics.median(steps))


# ---------------------------------------------------------------------------------------------- arithmetic


def _weight_bytes(shape: RandomModelShape) -> int:
    """Bytes of weights that a step reads: all matrices once. The embedding is also the output head."""
    return 2 * shape.num_parameters


def _kv_bytes_per_token(shape: RandomModelShape) -> int:
    return 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def _operations(shape: RandomModelShape, num_tokens: int) -> float:
    """Operations of a prompt: all layers' matrices for each token, each query with the keys and values before it."""
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) / 2
    return 2 * shape.num_linear_parameters * num_tokens + attention


def _attention(bench: Bench, context: int, *, share: bool, copies: bool) -> Callable[[], torch.Tensor]:
    """Times decoding after `context` tokens that are equal for all requests, in shared blocks or in copies."""
    requests, heads, dim = bench.sizes.attention
    kernel = _kernel(bench.device, share)
    count = context // BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    shape = (count, BLOCK_SIZE, heads, dim)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(requests, heads, dim, generator=generator).bfloat16().to(bench.device)
    tables = np.tile(np.arange(count, dtype=np.int32), (requests, 1))
    if copies:
        keys, values = keys.repeat(requests, 1, 1, 1), values.repeat(requests, 1, 1, 1)
        tables += count * np.arange(requests, dtype=np.int32)[:, None]
    batch = Batch(
        entries=NO_ENTRIES,
        token_ids=np.zeros(requests, np.int32),
        positions=np.full(requests, context - 1, np.int32),
        query_starts=np.arange(requests + 1, dtype=np.int32),
        group_tables=(tables,),
        write_from=np.zeros(requests, np.int32),
        copies=np.empty((0, 2), np.int32),
    )
    scrap = torch.zeros(1, *shape[1:], dtype=torch.bfloat16)
    blocks = KVBlocks.plain(*(torch.cat([part, scrap]).to(bench.device) for part in (keys, values)))
    num_blocks = len(blocks.keys) - 1
    options = AttentionOptions(dim**-0.5)
    kernel.attend(query, blocks, kernel.plan(batch, num_blocks, BLOCK_SIZE, bench.device), options)
    plan = kernel.plan(batch, num_blocks, BLOCK_SIZE, bench.device)  # the kernel knows its sizes now
    return lambda: kernel.attend(query, blocks, plan, options)


def _kernel(device: torch.device, share: bool) -> AttentionKernel:
    """The kernel that the device gets, with two-phase attention or without."""
    own = type(make_kernel("auto", device))
    kernel: AttentionKernel = own(share=share)  # type: ignore[call-arg]
    return kernel


# ---------------------------------------------------------------------------------------------- the script


def run(bench: Bench, without: set[str]) -> None:
    sections: dict[str, Callable[[], None]] = {
        "decode": lambda: [decode(bench, exact) for exact in (True, False)] and None,
        "prefill": lambda: [prefill(bench, exact) for exact in (True, False)] and None,
        "first_token": lambda: first_token(bench),
        "two_phase": lambda: two_phase(bench),
        "transformers": lambda: transformers(bench),
    }
    ceilings(bench)
    for name, section in sections.items():
        if name not in without:
            print(f"... {name}", file=sys.stderr, flush=True)
            section()


def show(bench: Bench, title: str) -> None:
    on_gpu = bench.device.type == "cuda"
    table = Table(box=SIMPLE_HEAD, title=title)
    table.add_column("figure")
    for name in ("value", "target"):
        table.add_column(name, justify="right")
    for name, value in bench.figures.items():
        target = ""
        if on_gpu and name in TARGETS:
            limit, kind = TARGETS[name]
            met = value >= limit if kind == "at least" else value <= limit
            target = f"{kind} {limit:g}: {'met' if met else 'NOT MET'}"
        table.add_row(name, f"{value:.4g}", target)
    Console(width=100).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", help="sizes of the random model (default: 1.5b)")
    parser.add_argument("--without", default="", help="sections to leave out, separated by commas")
    # These options show that the script runs without a GPU. Its figures then mean nothing.
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"benchmarks/gpu.py measures a CUDA device, and torch {torch.__version__} sees none: run it where there "
            "is an NVIDIA GPU, with a CUDA build of torch",
            file=sys.stderr,
        )
        return 2
    sizes = Sizes.quick() if args.quick else Sizes.full(SHAPES[args.shape])
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else NOT_A_GPU
    with TemporaryDirectory(prefix="foreword-") as folder:
        save_random_model(Path(folder), sizes.shape)
        load_model(ModelConfig(folder, device=str(device)))  # refuses what cannot run before anything is measured
        bench = Bench(device, sizes, Clock(device, sizes.rounds), folder, {})
        run(bench, set(args.without.split(",")))
    title = f"{name}; torch {torch.__version__}, model of {sizes.shape.num_parameters / 1e6:,.0f}M parameters"
    show(bench, title)
    if not on_gpu:
        print(NOT_A_GPU)
    report = {
        "benchmark": "gpu",
        "device": name,
        "are_gpu_figures": on_gpu,
        "torch": torch.__version__,
        "shape": args.shape if not args.quick else "quick",
        "figures": bench.figures,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

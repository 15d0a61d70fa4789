"""What adapters cost, and what aLoRA saves, on a real checkpoint.

Measures decoding of one request under an adapter of rank 16, and of sixteen requests under eight adapters, each
interleaved with the same requests without adapters (A B, then B A, ...). Then four experts answer, one after the other,
about one long beginning that the base model has computed before: aLoRA experts, which find the base model's KV, and
LoRA experts, which compute their own KV. The adapters' matrices are random, and change all products.

    python benchmarks/adapters.py --model FOLDER [--prefix TOKENS] [--repeats N]

The last line is JSON: medians of tokens per second and of ratios, and milliseconds to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foreword import LLM, LoRARequest, SamplingParams

RANK, TARGETS = 16, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv_proj gate_up_proj".split()
INVOCATION = [7, 11, 13]
DECODED, PROMPT = 32, 64


def make_adapter(folder: Path, model: Path, seed: int, **config: Any) -> LoRARequest:
    """An adapter of random matrices for all products of a checkpoint."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                module = name.removesuffix(".weight")
                if module != name and module.rpartition(".")[2] in TARGETS:
                    out, inputs = file.get_slice(name).get_shape()
                    for matrix, shape in (("A", (RANK, inputs)), ("B", (out, RANK))):
                        key = f"base_model.model.{module}.lora_{matrix}.weight"
                        tensors[key] = 0.01 * torch.randn(shape, generator=generator)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return LoRARequest(folder.name, seed + 1, str(folder))


def prompt_of(number: int, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [100 + (number * 7919 + 31 * at * at) % 5000 for at in range(length)]}


def seconds(llm: LLM, prompts: Sequence[Any], num_tokens: int, adapters: Any) -> float:
    """Seconds from the earliest first token to the last token of all requests; for one token, of the whole call."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, lora_request=adapters, show_progress=False)
    if num_tokens == 1:
        return time.perf_counter() - started
    begun = min(output.metrics.first_token_time or 0.0 for output in outputs)
    return max(output.metrics.finished_time or 0.0 for output in outputs) - begun


def decoding(llm: LLM, adapters: Sequence[LoRARequest], count: int, repeats: int) -> dict[str, float]:
    """Times requests under these adapters, in alternation with the same requests without adapters."""
    own = [adapters[number % len(adapters)] for number in range(count)]
    found: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for adapted in (True, False) if repeat % 2 else (False, True):
            llm.reset_prefix_cache()
            prompts = [prompt_of(number, PROMPT) for number in range(count)]
            taken = seconds(llm, prompts, DECODED, own if adapted else None)
            if repeat:
                found[adapted].append(count * (DECODED - 1) / taken)
    ratios = [with_them / without for with_them, without in zip(found[True], found[False], strict=True)]
    rates = {name: round(statistics.median(found[key]), 1) for name, key in (("tok_s", True), ("plain_tok_s", False))}
    return {**rates, "time_of_plain": round(1 / statistics.median(ratios), 3)}


def switches(llm: LLM, experts: Sequence[LoRARequest], length: int, repeats: int) -> list[float]:
    """Median milliseconds to the first token of each expert, one after the other, after the base read the beginning."""
    times: list[list[float]] = [[] for _ in experts]
    for _ in range(repeats):
        llm.reset_prefix_cache()
        beginning = prompt_of(1, length)["prompt_token_ids"]
        seconds(llm, [{"prompt_token_ids": beginning}], 1, None)
        for own, expert in zip(times, experts, strict=True):
            asked = {"prompt_token_ids": [*beginning, *INVOCATION, 9]}
            own.append(1e3 * seconds(llm, [asked], 1, expert))
    return [round(statistics.median(own), 1) for own in times]


def main() -> int:
    parser = argparse.ArgumentParser(description="what adapters cost, and what aLoRA saves")
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="a checkpoint of a family that foreword implements"
    )
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the shared beginning (default: 4096)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up (default: 5)")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.repeats < 1 or args.prefix < 1:
        parser.error("--repeats and --prefix must be 1 or more")
    with TemporaryDirectory(prefix="foreword-adapters-") as folder:
        root, model = Path(folder), Path(args.model)
        plain = [make_adapter(root / f"lora{number}", model, number) for number in range(8)]
        activated = [
            make_adapter(root / f"alora{number}", model, number, alora_invocation_tokens=INVOCATION)
            for number in range(4)
        ]
        options: dict[str, Any] = {"enable_lora": True, "max_loras": 12, "draft_tokens": 0, "dtype": args.dtype}
        with LLM(args.model, kv_cache_memory_bytes=2 << 30, **options) as llm:
            report: dict[str, Any] = {"prefix": args.prefix}
            report["one"] = decoding(llm, plain[:1], 1, args.repeats)
            print("one request, one adapter:", report["one"], flush=True)
            report["sixteen"] = decoding(llm, plain, 16, args.repeats)
            print("sixteen requests, eight adapters:", report["sixteen"], flush=True)
            report["alora_first_token_ms"] = switches(llm, activated, args.prefix, args.repeats)
            report["lora_first_token_ms"] = switches(llm, plain[:4], args.prefix, args.repeats)
            print("first tokens of four experts in turn, ms:", report["alora_first_token_ms"], "aLoRA,", flush=True)
            print("   ", report["lora_first_token_ms"], "LoRA")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

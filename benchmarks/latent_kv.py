"""Bytes and time of latent KV, beside the same model with expanded KV in transformers' modules.

    PYTHONPATH=src python benchmarks/latent_kv.py                    layers of DeepSeek-V2-Lite (about 4 minutes)
    ... --family minicpm3                                            layers of MiniCPM3-4B, without experts
    ... --layers 4 --experts 16                                      number of layers and experts; random weights
    ... --context 8192 --prompt 1024 --requests 1,4 --rounds 5       what is timed
    ... --dtype float32 --threads 1

1. Bytes of KV a token, of each path.
2. Seconds that the whole model takes for a decoding step after `--context` tokens and after 16, and for a prompt of
`--prompt` tokens,
   in alternating rounds on the same weights. The contexts' KV is random numbers, on which times do not depend.

V2-Lite has 27 layers, 26 of them with 64 experts. A token uses 6 experts, as here, but this model has fewer layers and
experts, so that it fits into memory. With any KV, experts run faster in foreword's code than in transformers' modules;
MiniCPM3 has no experts.

Wall time is the median round; processor time is the sum of all rounds, which other programs disturb less. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foreword.config import Dtype, ModelConfig
from foreword.model.kv_quality import FormatPool
from foreword.model.loader import LoadedModel, load_foreign_model, load_model
from kv_formats import alternate, fill

VOCAB = 8_000
V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32_768,
}
MINICPM3 = {"num_attention_heads": 40, "max_position_embeddings": 32_768}
"""Sizes of MiniCPM3-4B that differ from the defaults of transformers."""


def save_model(folder: Path, family: str, layers: int, experts: int) -> None:
    """Write a checkpoint with random weights and a small vocabulary."""
    sizes: dict[str, Any] = {**V2_LITE, "n_routed_experts": experts} if family == "deepseek_v2" else MINICPM3
    config = AutoConfig.for_model(family, **sizes, vocab_size=VOCAB, num_hidden_layers=layers)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def times(models: dict[str, LoadedModel], args: argparse.Namespace) -> dict[str, Any]:
    """Times decoding steps and prompts."""
    found, rng = {}, np.random.default_rng(0)
    vocab = models["latent"].vocab_size

    def pools(num_tokens: int) -> dict[str, FormatPool]:
        return {name: FormatPool(model, num_tokens) for name, model in models.items()}

    def compare(rivals: dict[str, FormatPool], starts: list[int], tokens: list[list[int]]) -> dict[str, Any]:
        rows = np.cumsum([len(own) for own in tokens]) - 1
        runs = {name: functools.partial(own.logits, own.batch(starts, tokens), rows) for name, own in rivals.items()}
        return alternate(runs, args.rounds, before="expanded", after="latent")

    for count in (int(number) for number in args.requests.split(",")):
        for context in (16, args.context):
            rivals = pools(count * context)
            for rival in rivals.values():
                fill(rival)
            tokens = [[int(rng.integers(vocab))] for _ in range(count)]
            found[f"decoding {count} at {context}"] = compare(rivals, [context - 1] * count, tokens)
    prompt = rng.integers(0, vocab, args.prompt).tolist()
    found[f"prefill of {args.prompt}"] = compare(pools(args.prompt), [0], [prompt])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", choices=("deepseek_v2", "minicpm3"), default="deepseek_v2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype: Dtype = args.dtype
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.family, args.layers, args.experts)
        options = ModelConfig(folder, dtype=dtype)
        models = {"latent": load_model(options), "expanded": load_foreign_model(options)}
    sizes = {
        name: sum(sum(layer.token_bytes(model.kv_format)) for layer in model.layers.values())
        for name, model in models.items()
    }
    result: dict[str, Any] = {
        "family": args.family,
        "layers": args.layers,
        "experts": args.experts,
        "dtype": str(models["latent"].dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "bytes_a_token": sizes,
        "more_tokens": sizes["expanded"] / sizes["latent"],
        "times": times(models, args),
    }
    print(f"latent KV beside expanded KV, {args.layers} layers of {args.family}'s sizes, {result['dtype']}")
    print(f"  bytes of KV a token: {sizes['latent']:,} and {sizes['expanded']:,}, {result['more_tokens']:.2f} times")
    for name, own in result["times"].items():
        milliseconds, by_cpu = own["wall_s"]["latent"] * 1e3, own["speedup_of_processor_time"]
        print(
            f"  {name:24} {own['speedup']:8.2f} times as fast ({by_cpu:.2f} by processor time), {milliseconds:.1f} ms"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()

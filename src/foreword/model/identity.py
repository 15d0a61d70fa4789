"""The facts that decide the bits of a model's KV, besides the prompt.

`foreword.tiers.identity` makes digests of these facts.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch

from foreword import kernels
from foreword.config import library_switches
from foreword.kernels.cpu.attention import CpuAttention
from foreword.kernels.cpu.layout import MODE_NAMES
from foreword.model.checkpoint.weights_digest import digest_sources
from foreword.model.layout import CacheLayout
from foreword.model.loader import LoadedModel

ARITHMETIC_VERSION = 1
"""Raise it when a change gives KV other bits. tests/model/test_golden_bits.py fails until then."""
LAYOUT_VERSION = 1
"""Raise it when the meaning of a block's bytes changes and `CacheLayout` stays equal."""
MANY_THREADS = 3
"""From this number of threads on, torch may divide float32 activations and single products differently
(docs/decisions/0002). Smaller numbers change no bit. If torch computes no layer, no number changes a bit."""
_LIBRARIES = ("torch", "transformers", "numba", "llvmlite")
_ARITHMETIC = ("amx", "avx", "f16c", "fma", "neon", "sse", "sve")
"""Beginnings of the names of processor features that compute numbers."""


def model_facts(model: LoadedModel, weights: str, sink_token_ids: Sequence[int]) -> dict[str, Any]:
    """The facts that decide a model's KV, whatever machine computes it. `weights`: a digest of the weights' content.

    The model's path, its name and its tokenizer are not among them.
    """
    described = dict(model.config)
    for name in ("_name_or_path", "transformers_version"):  # they differ for the same model on another machine
        described.pop(name, None)
    return {
        "weights": weights,
        "dtype": model.kv_format.key(model.dtype),
        "sink_token_ids": [int(token) for token in sink_token_ids],
        "code": model.code,
        "config": described,
    }


def layout_facts(layout: CacheLayout) -> dict[str, Any]:
    """The facts that give a block's bytes their meaning: all of the layout, except the interval at which recurrent
    states are saved.
    """
    facts = asdict(layout)
    del facts["state_interval"]
    for group, group_layout in zip(facts["groups"], layout.groups, strict=True):
        group["kind"] = type(group_layout.spec).__name__
        group["spec"].pop("interval_tokens", None)
    return {"version": LAYOUT_VERSION, **facts}


def arithmetic_facts(model: LoadedModel, probe: str) -> dict[str, Any]:
    """The facts that decide the bits of this process. `probe`: a digest of the model's results for one prompt."""
    on_gpu = model.device.type != "cpu"
    return {
        "version": ARITHMETIC_VERSION,
        "sources": digest_sources(Path(kernels.__path__[0]), Path(__file__).parent),
        "path": _path(model),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "torch": {
            "build": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
            "float32": torch.get_float32_matmul_precision(),
            "onednn": torch.backends.mkldnn.enabled,
        },
        "switches": library_switches(),
        "processor": _gpu(model) if on_gpu else _cpu(),
        "probe": probe,
    }


def name_of_speed(fingerprint: str) -> str:
    """The key of measured step times: a model, a processor, and the number of threads."""
    return f"{fingerprint} with {torch.get_num_threads()} threads"


def _path(model: LoadedModel) -> dict[str, Any]:
    """The code that computes: attention, products, and how much of the model's own code runs."""
    attention = [type(model.kernel).__name__]
    if isinstance(model.kernel, CpuAttention):
        in_floats = model.dtype == torch.float32 or (model.kv_format.is_coded and model.dtype == torch.float16)
        attention.append("floats" if in_floats else MODE_NAMES[model.kernel.bfloat16])
    facts: dict[str, Any] = {"device": model.device.type, "attention": attention, "parts": model.parts()}
    if model.device.type != "cpu":
        return {**facts, "exact": model.exact}
    threads, parts = torch.get_num_threads(), model.parts()
    is_ours = parts["in one program"] > 0 and isinstance(model.kernel, CpuAttention)
    in_float32 = model.dtype == torch.float32 or model.routes_in_float32
    if threads >= MANY_THREADS and not is_ours and (in_float32 or not model.is_packed):
        facts["threads"] = threads
    return facts


def _cpu() -> dict[str, Any]:
    """The processor's kind and features. Libraries choose instructions and sizes of blocks by the kind."""
    features = llvm.get_host_cpu_features()
    return {
        "machine": platform.machine(),
        "kind": llvm.get_host_cpu_name(),
        "features": sorted(name for name, there in features.items() if there and name.startswith(_ARITHMETIC)),
    }


def _gpu(model: LoadedModel) -> dict[str, Any]:
    return {
        "name": torch.cuda.get_device_name(model.device),
        "capability": torch.cuda.get_device_capability(model.device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton": None if find_spec("triton") is None else version("triton"),
    }

"""Adapters of random matrices in the folders that PEFT writes, made on the spot.

B is random too: PEFT's own begins with zeros, which would change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
NETWORK = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


def save_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + NETWORK,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    size: float = 0.2,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint in `base`.

    `ranks`: rank_pattern by the last part of a module's name; `size`: the spread of the matrices' numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors, named = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), set[str]()
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        for name, shape in sorted(shapes.items()):
            module = name.removesuffix(".weight")
            last, parts = module.rpartition(".")[2], module.split(".")
            if last not in targets or name == module or (layers is not None and int(parts[2]) not in layers):
                continue
            own = (ranks or {}).get(last, rank)
            named.add(last)
            for matrix, its in (("A", (own, shape[1])), ("B", (shape[0], own))):
                numbers = torch.randn(its, generator=generator) * size
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = numbers.to(dtype)
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": sorted(named),
        "task_type": "CAUSAL_LM",
        "rank_pattern": ranks or {},
        **({} if layers is None else {"layers_to_transform": list(layers)}),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder

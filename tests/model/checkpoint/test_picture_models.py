"""How experts lie in one tensor, which no field of a checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foreword.model.checkpoint.picture_models import parted
from foreword.model.checkpoint.tensors import UnreadableError, safetensors_places

LAYER = "layers.0.mlp.experts"
HIDDEN, COUNT = 8, 2
RAW = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": HIDDEN,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {},
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("inner", [HIDDEN, HIDDEN // 2, 3])
def test_experts_are_found_whichever_way_their_tensors_lie(tmp_path: Path, inner: int, is_turned: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    weights = {
        "gate_up_proj": torch.randn(COUNT, 2 * inner, HIDDEN, generator=numbers),
        "down_proj": torch.randn(COUNT, HIDDEN, inner, generator=numbers),
    }
    stored = {
        f"model.language_model.{LAYER}.{name}": (own.transpose(1, 2) if is_turned else own).contiguous()
        for name, own in weights.items()
    }
    # Of other tensors nothing is known; in a file they come first.
    other = {f"model.language_model.{LAYER}.a_scale": torch.zeros(COUNT, *((HIDDEN, 1) if is_turned else (1, HIDDEN)))}
    save_file(stored | other, tmp_path / "model.safetensors", {"format": "pt"})
    places, _ = parted(tmp_path, RAW, safetensors_places(tmp_path))
    assert places[f"model.{LAYER}.a_scale"].shape == other.popitem()[1].shape
    for expert in range(COUNT):
        expected = {
            "gate_proj": weights["gate_up_proj"][expert, :inner],
            "up_proj": weights["gate_up_proj"][expert, inner:],
            "down_proj": weights["down_proj"][expert],
        }
        for name, own in expected.items():
            assert torch.equal(places[f"model.{LAYER}.{expert}.{name}.weight"].read(torch.float32), own)


@pytest.mark.parametrize("sides", [(HIDDEN, HIDDEN), (3, 5)])
def test_experts_that_could_lie_either_way_are_refused(tmp_path: Path, sides: tuple[int, int]) -> None:
    stored = {f"model.language_model.{LAYER}.gate_up_proj": torch.zeros(COUNT, *sides)}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableError, match="does not tell outputs from inputs"):
        parted(tmp_path, RAW, safetensors_places(tmp_path))
